package metrics

import (
	"fmt"
	"testing"
	"time"
)

func TestFiguresReplaceTheEarlierOnes(t *testing.T) {
	t.Parallel()
	s := New("")
	s.Figures.Show([]Collection{
		{Name: "shop.outbox", Pending: 7, HasPending: true, OldestAge: 3 * time.Second, Scheduled: 2, HasScheduled: true, DeadLetters: 5, HasDead: true},
		// The user may not read this collection. It has no series, and not a zero.
		{Name: "forbidden.outbox"},
	}, nil, map[string]int64{"parked": 3})

	for name, want := range map[string]float64{"outrelay_pending_envelopes": 7, "outrelay_oldest_pending_seconds": 3, "outrelay_scheduled_envelopes": 2, "outrelay_dead_letters_stored": 5} {
		if got := value(t, s, name, "collection", "shop.outbox"); got != want {
			t.Errorf("%s = %v, want %v", name, got, want)
		}
		if n := series(t, s, name); n != 1 {
			t.Errorf("%s has %d series", name, n)
		}
	}

	s.Figures.Clear()
	if n := series(t, s, "outrelay_pending_envelopes"); n != 0 {
		t.Errorf("%d series of a collection that is not counted any more are left", n)
	}
}

func TestCollectionsAreBounded(t *testing.T) {
	t.Parallel()
	s := New("")
	list := make([]Collection, maxCollections+400)
	for i := range list {
		list[i] = Collection{Name: fmt.Sprint("tenant_", i, ".outbox"), Pending: 1, HasPending: true, OldestAge: time.Duration(i) * time.Second}
	}

	list[maxCollections].OldestAge = time.Hour
	s.Figures.Show(list, nil, nil)
	if n := series(t, s, "outrelay_pending_envelopes"); n != maxCollections+1 {
		t.Errorf("%d series", n)
	}
	if got := value(t, s, "outrelay_pending_envelopes", "collection", OtherTopics); got != 400 {
		t.Errorf("the others hold %v", got)
	}
	if got := value(t, s, "outrelay_oldest_pending_seconds", "collection", OtherTopics); got != 3600 {
		t.Errorf("the oldest of the others is %v s old", got)
	}
}

// TestExemplars: exemplars keep the last trace of each bucket, and do not change the counts of Observe.
func TestExemplars(t *testing.T) {
	t.Parallel()
	s := New("")
	s.ObserveLatency(4*time.Millisecond, 1)
	s.PublishLatency.Exemplar(4*time.Millisecond, "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
	s.PublishLatency.Exemplar(5*time.Millisecond, "1af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
	s.PublishLatency.Exemplar(time.Hour, "2af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")
	families, err := s.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}

	found := map[string]string{}
	for _, f := range families {
		if f.GetName() != "outrelay_publish_latency_seconds" {
			continue
		}
		h := f.GetMetric()[0].GetHistogram()
		if h.GetSampleCount() != 1 {
			t.Errorf("count = %d", h.GetSampleCount())
		}
		for _, b := range h.GetBucket() {
			for _, l := range b.GetExemplar().GetLabel() {
				if l.GetName() == "trace_id" {
					found[fmt.Sprint(b.GetUpperBound())] = l.GetValue()[:2]
				}
			}
		}
	}
	if len(found) != 2 || found["0.005"] != "1a" || found["+Inf"] != "2a" {
		t.Errorf("exemplars %v", found)
	}

	var none *Histogram
	none.Exemplar(time.Second, "x", "y")
}

func series(t *testing.T, s *Set, name string) int {
	t.Helper()
	families, err := s.Registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			return len(f.GetMetric())
		}
	}
	return 0
}
