package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"github.com/google/go-cmp/cmp"
)

// TestLedger plants each kind of damage and expects it to be found.
func TestLedger(t *testing.T) {
	t.Parallel()
	type verdict struct{ Events, Lost, Duplicates, OutOfOrder int }

	for _, c := range []struct {
		name  string
		acked int
		came  []int
		want  verdict
	}{
		{"whole", 3, []int{1, 2, 3}, verdict{Events: 3}},
		{"one that was written and not acknowledged", 2, []int{1, 2, 3}, verdict{Events: 2}},
		{"lost", 3, []int{1, 2}, verdict{Events: 3, Lost: 1}},
		{"twice", 3, []int{1, 2, 2, 3}, verdict{Events: 3, Duplicates: 1}},
		{"late", 3, []int{1, 3, 2}, verdict{Events: 3, OutOfOrder: 2}},
		{"hole", 3, []int{1, 3}, verdict{Events: 3, Lost: 1, OutOfOrder: 1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			l := newLedger()
			const key = 5

			l.keys[key].acked = c.acked
			for _, n := range c.came {
				l.recordArrival(l.eventNumber(key, n), time.Now(), sender{id: 1})
			}
			// No event of this run has this number.
			l.recordArrival(7, time.Now(), sender{id: 1})

			var got verdict
			got.Events, got.Lost, got.Duplicates, got.OutOfOrder = l.countErrors()
			if d := cmp.Diff(c.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestLedgerExpectsAnotherSender: late deliveries of the ended owner are not the first delivery of the
// standby.
func TestLedgerExpectsAnotherSender(t *testing.T) {
	t.Parallel()
	l, at := newLedger(), time.Now()
	l.recordArrival(l.eventNumber(0, 1), at, sender{1, 0})
	next := l.awaitNewSender()
	l.recordArrival(l.eventNumber(0, 2), at.Add(time.Millisecond), sender{1, 0})
	select {
	case <-next:
		t.Fatal("a delivery by the same sender was taken for the standby's")
	default:
	}

	want := at.Add(time.Second)
	l.recordArrival(l.eventNumber(0, 3), want, sender{1, 1})
	if got := <-next; !got.Equal(want) {
		t.Errorf("first delivery at %v instead of %v", got, want)
	}
}

func TestLedgerPacesOneWriterForEachKey(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLedger()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := l.insertLoad(ctx, 64, func(context.Context, any) error { return nil }); err != nil {
			t.Fatal(err)
		}

		events, lost, _, _ := l.countErrors()
		if lost != events || events < 9*failoverRate || events > 10*failoverRate {
			t.Errorf("%d events in 10 s, at %d a second", events, failoverRate)
		}
	})
}

func TestShots(t *testing.T) {
	t.Parallel()
	s, err := newShots(100, 3, 64)
	if err != nil {
		t.Fatal(err)
	}

	for i := range s.acked {
		s.acked[i].Store(int64(time.Millisecond))
	}

	s.recordArrival(99, s.base.Add(time.Hour)) // of an earlier stretch
	s.recordArrival(100, s.base.Add(2*time.Millisecond))
	// The record arrives a second time.
	s.recordArrival(100, s.base.Add(time.Hour))
	// The record arrives before its writer has received the result.
	s.recordArrival(101, s.base.Add(time.Microsecond))
	select {
	case <-s.all:
		t.Fatal("all are reported as arrived after two of three")
	default:
	}

	s.recordArrival(102, s.base.Add(11*time.Millisecond))
	<-s.all
	h := s.delayHistogram()
	if p50, most := quantileMS(h, 50), quantileMS(h, 100); p50 < 0.99 || p50 > 1.01 || most < 9.9 || most > 10.1 || h.Min() != 0 {
		t.Errorf("p50 %.2f ms, most %.2f ms, least %d µs", p50, most, h.Min())
	}
}

// TestDrainIsCheckedByItsRelay: a drain counts if the relay has read each event once from the stream.
func TestDrainIsCheckedByItsRelay(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"outrelay_read_total 5\n": "",
		"outrelay_read_total 4\n": "4 events of a backlog of 5",
		"outrelay_read_total 6\n": "6 events of a backlog of 5",
		"outrelay_read_total 0\noutrelay_gaps_total{reason=\"history_lost\"} 1\n": "the oplog of MongoDB has lost the backlog",
		"outrelay_gaps_total{reason=\"a b\"} 0\noutrelay_read_total 5\n":          "",
	} {
		counters, err := parseCounters([]byte(text))
		if err == nil {
			err = counters.checkDrain(5)
		}

		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

// TestBenchmarkKeepsTheHistoryOfItsBacklog: each run can read the backlog, also after many writes of others.
func TestBenchmarkKeepsTheHistoryOfItsBacklog(t *testing.T) {
	t.Parallel()
	args := Options{Events: 100_000, Payload: 1024, Runs: 1000}.mongoOptions().Args
	if i := slices.Index(args, "--oplogMinRetentionHours"); i < 0 {
		t.Errorf("%q does not keep the oplog", args)
	}
}

// TestRecordsAfterTheEndAreNoPartOfTheRate: other lanes finish their transactions after the last record that is measured.
func TestRecordsAfterTheEndAreNoPartOfTheRate(t *testing.T) {
	t.Parallel()
	e := &effects{spec: spec{Events: 2}, delay: hdrhistogram.New(1, longestRecorded, 3), stop: func() {}}
	e.countDone(2, time.Millisecond)
	e.countDone(5, time.Second)

	out, err := e.finalOutcome(nil)
	if err != nil || out.Events != 2 || out.Goes != 1 || out.P99 > 2 {
		t.Errorf("%+v, %v", out, err)
	}
}

// TestEffectsOfConsumersAreChecked: a lost effect and a repeated one do not cancel out.
func TestEffectsOfConsumersAreChecked(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		effects, records int
		marked, good     bool
	}{{3, 3, true, true}, {5, 5, true, true}, {2, 2, true, false}, {3, 2, true, false}, {4, 3, true, false}, {4, 3, false, true}, {3, 2, false, false}} {
		err := spec{Events: 3, Handling: handling{Marked: c.marked}}.checkEffects(c.effects, c.records)
		inbox := spec{Events: 3, Handling: handling{Inbox: c.marked}}.checkEffects(c.effects, c.records)

		if (err == nil) != c.good || (inbox == nil) != c.good {
			t.Errorf("%+v: %v, %v", c, err, inbox)
		}
	}
}

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   []float64
		want float64
	}{{nil, 0}, {[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}} {
		if got := median(c.in); got != c.want {
			t.Errorf("median of %v: %v instead of %v", c.in, got, c.want)
		}
	}
}

// TestResultNames holds the names that others read.
func TestResultNames(t *testing.T) {
	t.Parallel()
	s := &samples{raw: []float64{100, 200, 400}, drain: []float64{90, 200, 200}, otherCPU: map[string][]float64{"drain": {1, 9, 2}, "both": {3}}}
	r := s.medians(&bench{Options: Options{Rates: []int{100}}})
	if r.DrainRatio != 0.9 || r.OtherCPUPct != 3 {
		t.Errorf("ratio %v, otherCPU %v: medians of each run's ratio, and the worst of the medians, are wanted", r.DrainRatio, r.OtherCPUPct)
	}

	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}

	for _, name := range []string{
		"raw_stream_eps", "raw_produce_eps", "both_eps", "drain_eps", "drain_ratio", "other_cpu_pct", "cpu_s_per_million",
		"raw_cpu_s_per_million", "cpu_ratio", "mongod_cpu_ratio", "peak_rss_mb", "allocs_per_event", "latency", "rate", "raw_p50_ms", "raw_p99_ms", "both_p50_ms", "both_p99_ms", "p50_ms", "p99_ms", "p999_ms",
	} {
		if !strings.Contains(string(text), `"`+name+`":`) {
			t.Errorf("%s is missing from %s", name, text)
		}
	}

	var table bytes.Buffer
	if err := r.Print(&table); err != nil || !strings.Contains(table.String(), "latency at 100/s") {
		t.Errorf("table: %v\n%s", err, &table)
	}
}

func TestOptionsReportAllProblems(t *testing.T) {
	t.Parallel()
	err := Options{Payload: 3, Runs: 0, Rates: []int{0}, TTL: 1, Transports: []string{"carrier pigeon"}, Peers: []string{"telegraph"}, Relay: "release", CPUProfile: "cpu"}.Check()
	for _, name := range []string{"events", "payload", "runs", "rates", "seconds", "ttl", "carrier pigeon", "telegraph", "relay"} {
		if err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s is missing from: %v", name, err)
		}
	}
}

// TestEachMeasurementOverTimeNeedsTime: also without rates, a measurement divides by its duration.
func TestEachMeasurementOverTimeNeedsTime(t *testing.T) {
	t.Parallel()
	for name, options := range map[string]Options{"rates": {Rates: []int{1}}, "failover": {Failover: 1}, "peers": {Peers: Peers()}, "growth": {Growth: []int{1}}} {
		options.Events, options.Payload, options.Runs = 1, minPayload, 1
		if err := options.Check(); err == nil || !strings.Contains(err.Error(), "seconds") {
			t.Errorf("%s without a duration: %v", name, err)
		}
	}

	if err := (Options{Events: 1, Payload: minPayload, Runs: 1}).Check(); err != nil {
		t.Error(err)
	}
}

// TestChildEndsWithItsInput: a child without a task, or with an unknown one, returns an error.
func TestChildEndsWithItsInput(t *testing.T) {
	t.Parallel()
	if err := Child(t.Context(), strings.NewReader(""), io.Discard); err == nil {
		t.Error("no order was no error")
	}
	var out bytes.Buffer
	if err := Child(t.Context(), strings.NewReader(`{"mode":"guess"}`+"\n"), &out); err != nil || !strings.Contains(out.String(), "guess") {
		t.Errorf("%v, %s", err, &out)
	}
}

// TestProcessUsage: burnt CPU time is seen as this process's own, not that of others.
func TestProcessUsage(t *testing.T) {
	before, ok := processUsage(os.Getpid())
	if !ok {
		// Without /proc the usage is documented as unknown.
		return
	}

	m, begun := startMeter(), time.Now()
	after, used, took := before, 0.0, 0.0
	// On a busy machine this may take a while.
	for used < 0.1 && took < 60 {
		for turn := time.Now(); time.Since(turn) < 50*time.Millisecond; {
		}
		after, _ = processUsage(os.Getpid())
		used, took = after.cpu-before.cpu, time.Since(begun).Seconds()
	}
	if used < 0.1 || used > took*float64(runtime.NumCPU())+0.1 {
		t.Errorf("%.3f s of CPU after %.3f s of burning", used, took)
	}
	if after.rss < 1 || after.hwm < after.rss {
		t.Errorf("resident %.1f MB, at most %.1f", after.rss, after.hwm)
	}
	if pct, ok := m.measureOtherCPU(); !ok || pct < 0 || pct > 100 {
		t.Errorf("CPU of others %v %v", pct, ok)
	}
}

// TestReconcilerResult: ratios are of one run, and the limit of a burst follows from the drain.
func TestReconcilerResult(t *testing.T) {
	t.Parallel()
	got := figures{"drain": {100, 200, 400}, "scheduled": {50, 50, 300}, "known": {10}}
	r := newReconcilerResult(Options{Events: 100, Runs: 3}, got, figures{"due": {1, 7, 3}, "purge": {2}})
	if r.ScheduledRatio != 0.5 || r.KnownRatio != 0.1 || r.BurstLimitS != 3 || r.OtherCPUPct != 3 || r.ParkedEvents != 20 {
		t.Errorf("%+v", r)
	}

	var table bytes.Buffer
	if err := r.Print(&table); err != nil || !strings.Contains(table.String(), "0.500 of the stream's") {
		t.Errorf("table: %v\n%s", err, &table)
	}
	if err := (Options{Events: 1, Payload: 8, Runs: 1, Only: []string{"sweep", "wish"}}).Check(); err == nil || !strings.Contains(err.Error(), `"wish"`) {
		t.Errorf("an unknown measurement: %v", err)
	}
}
