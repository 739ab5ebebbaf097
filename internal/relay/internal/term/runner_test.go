package term

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/readiness"
)

func TestN05_FencedThreeTimesHalts(t *testing.T) {
	t.Parallel()
	r := &Runner{}
	err := fmt.Errorf("producing: %w", sink.ErrFenced)
	at := time.Unix(1000, 0)
	for i, step := range []struct {
		after time.Duration
		halts bool
	}{
		{0, false},
		{10 * time.Second, false},
		// The first two failures are too old to count.
		{71 * time.Second, false},
		{75 * time.Second, false},
		{100 * time.Second, true},
	} {
		halt := r.recordFenced(at.Add(step.after), err)
		if (halt != nil) != step.halts {
			t.Fatalf("step %d: halt %v, want %v", i, halt, step.halts)
		}

		if halt != nil && !errors.Is(halt, sink.ErrFenced) {
			t.Fatalf("%v has no reason", halt)
		}
	}
}

// TestN05_HaltOfAFencedOwnerEnds: another takeover loses nothing, so a halted process tries again without a person.
func TestN05_HaltOfAFencedOwnerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := &Runner{State: readiness.NewState(30*time.Second, time.Now, slog.New(slog.DiscardHandler))}

		var halt *readiness.HaltError
		for range fencedLimit {
			halt = r.recordFenced(time.Now(), sink.ErrFenced)
		}

		begin, ended := time.Now(), make(chan error)
		go func() { ended <- r.haltWithoutLease(t.Context(), halt) }()

		synctest.Wait()
		if ok, phase, _ := r.State.Ready(); ok || phase != "halted" {
			t.Errorf("ready %v, phase %q", ok, phase)
		}

		if err := <-ended; err != nil || time.Since(begin) != fencedHalt {
			t.Errorf("after %s: %v", time.Since(begin), err)
		}

		if _, _, reasons := r.State.Ready(); len(reasons) != 0 || r.recordFenced(time.Now(), sink.ErrFenced) != nil {
			t.Errorf("what happened before the halt still counts: %q", reasons)
		}

		stop, cancel := context.WithCancel(t.Context())
		cancel()
		if r.haltWithoutLease(stop, halt) == nil {
			t.Error("a process that stops goes on")
		}
	})
}

func TestBlockedGaugesShowTheSinkAndTheDispatcher(t *testing.T) {
	t.Parallel()
	r := &Runner{metrics: metrics.New("test")}
	read := func() (series int, sum float64) {
		t.Helper()
		all, err := r.metrics.Registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range all {
			if f.GetName() != "outrelay_unwritable_records" {
				continue
			}
			for _, m := range f.GetMetric() {
				series++
				sum += m.GetGauge().GetValue()
			}
		}
		return series, sum
	}

	r.setUnwritableGauges([]sink.Unwritable{
		{Topic: "a", Kind: "missing", Records: 2},
		{Topic: "b", Kind: "no_leader", Records: 1},
		{Topic: "b", Kind: "no_leader", Records: 3},
		{Topic: "b", Kind: "rejected", Records: 5},
	})

	if n, sum := read(); n != 3 || sum != 11 {
		t.Fatalf("%d series with a sum of %v, want one for each topic and reason, and each record once", n, sum)
	}

	r.setUnwritableGauges(nil)
	if n, _ := read(); n != 0 {
		t.Fatalf("%d series are left when nothing waits", n)
	}
}

// TestFewTargetsStandForMany: however many targets wait, the document, the metrics and the audit log name a hundred and add up
// the others. Those for which the position waits come first, and the list stays the same while more of them come.
func TestFewTargetsStandForMany(t *testing.T) {
	t.Parallel()
	list := func(n int) (all []sink.Unwritable) {
		for i := range n {
			all = append(all, sink.Unwritable{Topic: fmt.Sprint("t", i), Kind: "missing", Parked: true, Records: 2, Since: time.Unix(int64(i), 0)})
		}
		return append(all, sink.Unwritable{Topic: "urgent", Kind: "no_leader", Records: 1, Since: time.Unix(1<<30, 0)})
	}
	if got := limitUnwritable(list(99)); len(got) != 100 {
		t.Errorf("%d of 100", len(got))
	}

	got, more := limitUnwritable(list(5000)), limitUnwritable(list(6000))
	if len(got) != 101 || got[0].Topic != "urgent" || got[100].Topic != "other" || got[100].Records != 2*(5001-100) || !got[100].Parked {
		t.Errorf("%d targets: first %+v, last %+v", len(got), got[0], got[len(got)-1])
	}
	if !slices.Equal(got[:100], more[:100]) {
		t.Error("the listed targets change with the number of the others")
	}
}
