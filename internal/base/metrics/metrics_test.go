package metrics

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// value finds one series and returns its value, or the sum of a histogram.
func value(t *testing.T, s *Set, name string, labels ...string) float64 {
	t.Helper()
	families, err := s.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		if f.GetName() != name {
			continue
		}
	series:
		for _, m := range f.GetMetric() {
			for i := 0; i < len(labels); i += 2 {
				found := false
				for _, l := range m.GetLabel() {
					found = found || l.GetName() == labels[i] && l.GetValue() == labels[i+1]
				}
				if !found {
					continue series
				}
			}
			switch {
			case m.GetCounter() != nil:
				return m.GetCounter().GetValue()
			case m.GetGauge() != nil:
				return m.GetGauge().GetValue()
			case m.GetHistogram() != nil:
				return m.GetHistogram().GetSampleSum()
			}
		}
	}

	t.Fatalf("no series %s %v", name, labels)
	return 0
}

func TestEveryConventionalName(t *testing.T) {
	t.Parallel()
	s := New("1.2.3")

	// Metrics with labels are gathered only once they have a value.
	s.ObservePublish("orders", Acked, 1)
	s.StreamRestarts.WithLabelValues("resume")
	s.Gaps.WithLabelValues("history_lost")
	s.Figures.Waiting.WithLabelValues("retry")
	s.Reconciled.WithLabelValues("scheduled")
	s.UnwritableRecords.WithLabelValues("orders", "missing")
	s.DeadLetters.WithLabelValues("malformed")
	s.StreamState.SetCurrent("live")

	families, err := s.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	have := map[string]bool{}
	for _, f := range families {
		have[f.GetName()] = true
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", f.GetName())
		}
	}

	for _, name := range strings.Fields(`outrelay_lag_seconds outrelay_token_age_seconds outrelay_oplog_window_seconds
		outrelay_published_total outrelay_publish_latency_seconds outrelay_inflight_records outrelay_inflight_bytes
		outrelay_checkpoint_seconds outrelay_stream_restarts_total outrelay_gaps_total outrelay_lease_owner
		outrelay_lease_epoch outrelay_lease_suspended outrelay_waiting_envelopes outrelay_reconciled_total outrelay_build_info
		outrelay_unwritable_records outrelay_budget_used_bytes outrelay_budget_bytes outrelay_stream_state
		outrelay_ticket_window outrelay_dead_letters_total go_goroutines process_start_time_seconds`) {
		if !have[name] {
			t.Errorf("%s is missing", name)
		}
	}

	if got := value(t, s, "outrelay_build_info", "version", "1.2.3"); got != 1 {
		t.Errorf("build info = %v", got)
	}
}

func TestObservePublishCountsByTopicAndResult(t *testing.T) {
	t.Parallel()
	s := New("")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 1000 {
				s.ObservePublish("orders", Acked, 2)
				s.ObservePublish("orders", Skipped, 1)
			}
		})
	}

	wg.Wait()
	if got := value(t, s, "outrelay_published_total", "topic", "orders", "result", "acked"); got != 16000 {
		t.Errorf("acked = %v, want 16000", got)
	}
	if got := value(t, s, "outrelay_published_total", "topic", "orders", "result", "skipped"); got != 8000 {
		t.Errorf("skipped = %v, want 8000", got)
	}
}

func TestTopicsAreBounded(t *testing.T) {
	t.Parallel()
	s := New("")
	for i := range maxTopics + 500 {
		s.ObservePublish(fmt.Sprint("t", i), Acked, 1)
	}
	if got := value(t, s, "outrelay_published_total", "topic", OtherTopics, "result", "acked"); got != 500 {
		t.Errorf("other = %v, want 500", got)
	}
	if n := len(s.topics.byName); n != maxTopics+1 {
		t.Errorf("%d topics kept, want %d", n, maxTopics+1)
	}
}

func TestHistogramCountsBatches(t *testing.T) {
	t.Parallel()
	s := New("")
	s.ObserveLatency(500*time.Microsecond, 3) // on the bound: inside
	s.ObserveLatency(4*time.Millisecond, 2)
	// A backlog of a day must not overflow the sum.
	s.ObserveLatency(24*time.Hour, 1_000_000)
	s.ObserveLatency(-time.Second, 1)
	families, err := s.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	for _, f := range families {
		if f.GetName() != "outrelay_publish_latency_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 1_000_006 {
			t.Errorf("count = %d", h.GetSampleCount())
		}
		if sum := h.GetSampleSum(); sum < 86_400e6 || sum > 86_401e6 {
			t.Errorf("sum = %v", sum)
		}
		b := h.GetBucket()
		if b[0].GetUpperBound() != 0.0005 || b[0].GetCumulativeCount() != 4 {
			t.Errorf("first bucket: %v", b[0])
		}
		if last := b[len(b)-1]; last.GetUpperBound() != 10 || last.GetCumulativeCount() != 6 {
			t.Errorf("last bucket: %v", last)
		}
		return
	}

	t.Fatal("no histogram")
}

func TestLiveAsksAtTheScrape(t *testing.T) {
	t.Parallel()
	s := New("")
	s.Lag.Set(7)
	if got := value(t, s, "outrelay_lag_seconds"); got != 7 {
		t.Errorf("lag = %v", got)
	}

	n := 0.0
	s.Lag.SetSource(func() float64 { n++; return n })
	first, second := value(t, s, "outrelay_lag_seconds"), value(t, s, "outrelay_lag_seconds")
	if first != 1 || second != 2 {
		t.Errorf("lag = %v, then %v", first, second)
	}

	// A figure that nothing measures must not look like 0.
	s.Lag.SetSource(func() float64 { return math.NaN() })
	families, err := s.Registry.Gather()
	if err != nil || slices.ContainsFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "outrelay_lag_seconds" }) {
		t.Errorf("an unknown lag has a series, or %v", err)
	}

	s.Lag.SetSource(nil)
	s.Lag.Set(0)
	if got := value(t, s, "outrelay_lag_seconds"); got != 0 {
		t.Errorf("lag = %v", got)
	}
}

func TestStatesAreExclusive(t *testing.T) {
	t.Parallel()
	s := New("")
	s.StreamState.SetCurrent("opening")
	s.StreamState.SetCurrent("live")
	if value(t, s, "outrelay_stream_state", "state", "opening") != 0 || value(t, s, "outrelay_stream_state", "state", "live") != 1 {
		t.Error("two states at once")
	}
	if got := s.StreamState.current; got != "live" {
		t.Errorf("current = %q", got)
	}
}

func TestHotPathAllocatesNothing(t *testing.T) {
	s := New("")
	s.ObservePublish("orders", Acked, 1)
	if n := testing.AllocsPerRun(100, func() {
		s.ObservePublish("orders", Acked, 64)
		s.ObserveLatency(time.Millisecond, 64)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestNilSet(t *testing.T) {
	t.Parallel()
	var s *Set
	s.ObservePublish("orders", Acked, 1)
	s.ObserveLatency(time.Second, 1)
	if OrNew(s) == nil {
		t.Error("OrNew returned nil")
	}
	var _ prometheus.Gatherer = OrNew(s).Registry
}
