package health

import (
	"errors"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// step is one observation with the expected result.
type step struct {
	after   time.Duration
	failed  bool
	waiting int64
	dead    int64
	want    Status
}

func TestRules(t *testing.T) {
	t.Parallel()
	const tick = 10 * time.Second
	ok := func(waiting, dead int64, want Status) step { return step{tick, false, waiting, dead, want} }
	bad := func(want Status) step { return step{after: tick, failed: true, want: want} }

	for name, steps := range map[string][]step{
		"one failed count degrades, three in a row are unhealthy, one that works heals": {
			ok(0, 0, OK), bad(Degraded), bad(Degraded), bad(Unhealthy), bad(Unhealthy), ok(0, 0, OK), bad(Degraded),
		},
		"the first evaluation only baselines":       {ok(1000, 5000, OK), ok(900, 5000, OK)},
		"a failure before the baseline counts":      {bad(Degraded), ok(10, 10, OK)},
		"not falling for three counts":              {ok(5, 0, OK), ok(5, 0, OK), ok(6, 0, OK), ok(6, 0, Degraded), ok(7, 0, Degraded), ok(6, 0, OK)},
		"falling slowly is well":                    {ok(9, 0, OK), ok(8, 0, OK), ok(7, 0, OK), ok(6, 0, OK), ok(5, 0, OK), ok(4, 0, OK)},
		"nothing waits":                             {ok(0, 0, OK), ok(0, 0, OK), ok(0, 0, OK), ok(0, 0, OK), ok(0, 0, OK)},
		"a count that was nought rises, then stays": {ok(0, 0, OK), ok(3, 0, OK), ok(3, 0, OK), ok(3, 0, Degraded)},
		"a hundred dead letters within a minute":    {ok(0, 50, OK), ok(0, 149, OK), ok(0, 150, Degraded), ok(0, 150, Degraded)},
		"the same over many minutes":                {ok(0, 0, OK), {2 * time.Minute, false, 0, 90, OK}, {2 * time.Minute, false, 0, 180, OK}, {2 * time.Minute, false, 0, 400, Degraded}},
		"the minute passes":                         {ok(0, 0, OK), ok(0, 100, Degraded), {time.Minute, false, 0, 100, OK}, {tick, false, 0, 100, OK}},
		"letters that are removed are no growth":    {ok(0, 1000, OK), ok(0, 10, OK), ok(0, 60, OK), ok(0, 110, Degraded)},
		"after a long pause the count starts again": {ok(5, 0, OK), ok(5, 0, OK), ok(5, 0, OK), ok(5, 0, Degraded), {time.Hour, false, 5, 900, OK}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			var e Evaluator
			at := time.Unix(1000, 0)
			if r := e.Report(); r.Status != OK || len(r.Checks) != 0 {
				t.Fatalf("before anything was seen: %+v", r)
			}

			for i, s := range steps {
				at = at.Add(s.after)
				o := Observation{At: at, Counts: []Count{{WaitingRule, s.waiting}}, Dead: s.dead}
				if s.failed {
					o.Err = errors.New("no response")
				}
				r := e.Observe(o)

				if r.Status != s.want {
					t.Fatalf("step %d: %s, want %s: %+v", i, r.Status, s.want, r.Checks)
				}

				for _, c := range r.Checks {
					if c.Detail == "" || (c.Status != OK) != (c.Fix != "") {
						t.Errorf("step %d: a failed check has an advice, and a good one has none: %+v", i, c)
					}
				}
			}
		})
	}
}

// TestHealthIsTheWorstCheck tests random observations.
func TestHealthIsTheWorstCheck(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var e Evaluator

		at := time.Unix(1000, 0)
		failed := 0
		for i := range rapid.IntRange(1, 30).Draw(t, "n") {
			at = at.Add(time.Duration(rapid.IntRange(1, 90).Draw(t, "after")) * time.Second)
			o := Observation{At: at, Counts: []Count{{WaitingRule, rapid.Int64Range(0, 3).Draw(t, "waiting")}}, Dead: rapid.Int64Range(0, 300).Draw(t, "dead")}

			if failed++; rapid.Bool().Draw(t, "fails") {
				o.Err = errors.New("x")
			} else {
				failed = 0
			}

			r := e.Observe(o)
			worst := OK
			for _, c := range r.Checks {
				if c.Status.severity() > worst.severity() {
					worst = c.Status
				}
			}

			if r.Status != worst || (r.Status == Unhealthy) != (failed >= failedLimit) || i == 0 && failed == 0 && r.Status != OK {
				t.Fatalf("%+v after %d failures", r, failed)
			}
		}
	})
}
