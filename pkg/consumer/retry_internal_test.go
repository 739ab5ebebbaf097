package consumer

import (
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/setaside"
)

var errTest = errors.New("the service is away")

// decideAfter returns the verdict after n failures, the first of which was so long ago.
func decideAfter(d *retryDecider, err error, n int, ago time.Duration) Verdict {
	m, a := &Message{Attempt: 1}, Attempts{}
	for range n {
		a = a.Note(err, m, time.Now().Add(-ago))
	}
	return d.Decide(err, m, a)
}

func TestDefaultsOfRetry(t *testing.T) {
	t.Parallel()
	d := &retryDecider{base: Retry{}.withDefaults()}
	for n, want := range []time.Duration{
		100 * time.Millisecond, 400 * time.Millisecond,
		5 * time.Second, 10 * time.Second, 20 * time.Second, 40 * time.Second, 80 * time.Second, 160 * time.Second,
		5 * time.Minute, 5 * time.Minute,
	} {
		v := decideAfter(d, errTest, n+1, time.Hour)
		action, least := SetAside, want*4/5
		if n < 2 {
			action, least = RetryInline, want
		}
		if v.Action != action || v.Delay < least || v.Delay > want {
			t.Errorf("failure %d: got %s after %v, want %s after %v to %v", n+1, v.Action, v.Delay, action, least, want)
		}
	}

	if v := decideAfter(d, errTest, 100, 23*time.Hour); v.Action != SetAside {
		t.Errorf("after 23 hours: got %s, want %s", v.Action, SetAside)
	}
	if v := decideAfter(d, errTest, 100, 24*time.Hour); v.Action != DeadLetter {
		t.Errorf("after 24 hours: got %s, want %s", v.Action, DeadLetter)
	}
	if v := decideAfter(d, mongo.CommandError{Code: 91}, 100, 48*time.Hour); v.Action != RetryAfter || !v.Uncounted {
		t.Errorf("while the database is away: got %+v", v)
	}
	if v := decideAfter(d, &InvalidError{}, 1, 0); v.Action != DeadLetter {
		t.Errorf("an invalid message: got %s, want %s", v.Action, DeadLetter)
	}
}

func TestRetryForAnErrorComesBeforeTheDefault(t *testing.T) {
	t.Parallel()
	never := Retry{GiveUpAfter: -1, Then: ThenDiscard}.withDefaults()
	d := &retryDecider{base: Retry{}.withDefaults(), rules: []retryRule{
		{ErrorIs(ErrValidation), never},
		{ErrorIs(errTest), NoRetry().withDefaults()},
	}}
	if v := decideAfter(d, errTest, 1, 0); v.Action != DeadLetter {
		t.Errorf("NoRetry: got %s, want %s", v.Action, DeadLetter)
	}
	if v := decideAfter(d, &InvalidError{}, 100, 1000*time.Hour); v.Action != SetAside {
		t.Errorf("without an end: got %s, want %s", v.Action, SetAside)
	}
	if v := decideAfter(d, errors.New("another"), 1, 0); v.Action != RetryInline {
		t.Errorf("another error: got %s, want %s", v.Action, RetryInline)
	}
	if v := decideAfter(d, RetryIn(time.Hour, errors.New("another")), 100, 25*time.Hour); v.Action != DeadLetter {
		t.Errorf("RetryIn after a day: got %s, want %s", v.Action, DeadLetter)
	}
	if v := decideAfter(d, RetryIn(time.Hour, nil), 100, time.Hour); v.Action != SetAside || v.Delay != time.Hour || !v.Uncounted {
		t.Errorf("RetryIn: got %+v", v)
	}
}

func TestMistakesInRetryAreListed(t *testing.T) {
	t.Parallel()
	err := Retry{Quick: []time.Duration{-1}, Min: time.Hour, Max: time.Minute, Then: 9}.findProblems("WithRetry")
	for _, want := range []string{"Quick", "Min is 1h0m0s and Max is 1m0s", "Then is 9"} {
		if !errors.Is(err, ErrConfiguration) || !strings.Contains(err.Error(), want) {
			t.Errorf("findProblems: got %v, want it to contain %q", err, want)
		}
	}
	for _, r := range []Retry{{}, {Max: time.Second}, {Min: time.Hour}, NoRetry()} {
		if err := r.findProblems("WithRetry"); err != nil {
			t.Errorf("%+v: %v", r, err)
		}
	}
}

func TestASuspensionEndsWithASuccess(t *testing.T) {
	t.Parallel()
	r := Retry{Outage: 3, Min: time.Hour, Max: 2 * time.Hour}.withDefaults()
	var s suspension
	queue := func(name string) setaside.Digest { return setaside.KeyQueue([]byte(name)) }
	fail := func(name string) bool {
		_, began := s.noteFailure(queue(name), &r)
		return began
	}

	// Failures of one key, and failures with a success in between, are no outage.
	for _, name := range []string{"a", "a", "a", "b", "success", "c", "a"} {
		if name == "success" && s.noteSuccess() || name != "success" && fail(name) {
			t.Fatal("suspended without an outage")
		}
	}
	if !fail("b") {
		t.Fatal("three keys failed in a row, and the handler is not suspended")
	}
	now := time.Now()
	if p := s.mayStart(now); p.ok || p.wait < 40*time.Minute {
		t.Errorf("a suspended handler: got %+v", p)
	}

	// One probe at a time. A probe that fails doubles the wait.
	later := now.Add(time.Hour + time.Second)
	probe := s.mayStart(later)
	if !probe.ok || probe.probe == 0 || s.mayStart(later).ok {
		t.Fatalf("a probe: got %+v, and a second one at the same time", probe)
	}
	fail("d")
	if s.isProbe(probe.probe) {
		t.Error("a probe that failed still runs")
	}
	if p := s.mayStart(now); p.ok || p.wait < 90*time.Minute {
		t.Errorf("after a failed probe: got %+v", p)
	}

	// A probe without an outcome lets the next one begin.
	later = now.Add(3 * time.Hour)
	probe = s.mayStart(later)
	s.endProbe(probe.probe)
	if probe = s.mayStart(later); !probe.ok || !s.noteSuccess() || !s.mayStart(now).ok {
		t.Error("a successful probe did not end the suspension")
	}

	// Other successes do not shorten a suspension that the handler asked for.
	s.suspendFor(time.Hour)
	if s.noteSuccess() || s.mayStart(time.Now()).ok {
		t.Error("a success ended a suspension that the handler asked for")
	}
	s.suspendFor(UntilResumed)
	if s.mayStart(now.Add(1000 * time.Hour)).ok {
		t.Error("a suspension until Resume ended by itself")
	}
	if s.resume(); !s.mayStart(now).ok {
		t.Error("Resume did not end the suspension")
	}
}
