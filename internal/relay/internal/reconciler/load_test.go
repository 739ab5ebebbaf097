package reconciler

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestN15_LoadFindsGatesAndRepeatedEvents(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.enter(
		h.newEntry(1, "k", waiting.Parked, pending("a", "b")), h.newEntry(2, "k", waiting.Blocked),
		h.newEntry(3, "q", waiting.Retry), h.newEntry(4, "q", waiting.Queued, origin(waiting.OriginRequeue, 1)),
		h.newEntry(5, "7", waiting.Parked, pending()),
		// Another watcher's.
		h.newEntry(6, "k", waiting.Parked, func(e *waiting.Entry) { e.Watcher = "orders2" }),
	)

	te := h.newTerm()
	defer te.out.kill(nil)
	gates, known := map[string]int{}, []string{}
	n, err := te.x.Load(t.Context(), func(pos string) bool { return pos > "82000002" },
		func(ns, topic, key string) { gates[ns[len(h.db.Name()):]+" "+topic+" "+key]++ },
		func(_ string, id bson.RawValue, pos string, topics []string) {
			known = append(known, fmt.Sprint(id.StringValue(), " ", pos, " ", topics))
		})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{".outbox a k": 2, ".outbox b k": 1, ".outbox a q": 1, ".outbox  7": 1}
	if !maps.Equal(gates, want) || n != (Loaded{Waiting: 5, Gates: 5, Known: 2}) {
		t.Errorf("%+v, gates %v, want %v", n, gates, want)
	}
	if slices.Sort(known); !slices.Equal(known, []string{"e000003 82000003 [a]", "e000005 82000005 []"}) {
		t.Errorf("known: %v", known)
	}
}

func TestN08_FinishSentFinishesEnvelopesOfAnEarlierOwner(t *testing.T) {
	t.Parallel()
	h := newScene(t)
	h.recording = ledger.RecordMark
	h.enter(
		h.newEntry(1, "k", waiting.Parked, pending("a", "b")), h.newEntry(2, "k", waiting.Parked, pending("a", "b")),
		h.newEntry(3, "k", waiting.Queued, origin(waiting.OriginRequeue, 2)), h.newEntry(4, "k", waiting.Parked),
		h.newEntry(5, "s", waiting.Queued, origin(waiting.OriginScheduled, 0), pending()),
		// It was claimed ahead of its time.
		h.newEntry(6, "s", waiting.Queued, origin(waiting.OriginScheduled, 0), pending(), nextAt(time.Now().Add(20*time.Second))),
		h.newEntry(7, "s", waiting.Parked, func(e *waiting.Entry) { e.Watcher = "orders2" }),
	)
	for _, r := range []struct {
		topic    string
		n        int
		key      string
		delivery int32
	}{{"a", 1, "k", 0}, {"b", 1, "k", 0}, {"b", 2, "k", 0}, {"a", 3, "k", 1}, {"a", 5, "s", 0}, {"a", 6, "s", 0}, {"a", 7, "s", 0}} {
		h.broker.appendRecord(r.topic, fmt.Sprintf("e%06d", r.n), r.key, r.delivery)
	}

	te := h.newTerm()
	te.out.routes = []string{"a"}
	n, err := te.x.FinishSent(t.Context())
	if err != nil || n != 4 {
		t.Fatalf("%d, %v", n, err)
	}
	te.out.kill(nil)
	for _, n := range []int{1, 5, 6} {
		if d := h.find(n); d != nil {
			t.Errorf("all of it was there: %v", d)
		}
	}
	if d := h.find(2); d["reason"] != "blocked" && d["reason"] != "parked" || d["topics"] != "a" {
		t.Errorf("half of it was there: %v", d)
	}
	// The record is that of another delivery.
	if d := h.find(3); d == nil || h.find(4) == nil || h.find(7) == nil {
		t.Error("an envelope that was not sent is gone")
	}
	if len(te.out.opened) > 0 || len(te.out.settled) > 0 {
		t.Error("gates or tickets of an earlier owner were given free")
	}

	h.broker.appendRecord("a", "e000003", "k", 2)
	te = h.newTerm()
	defer te.out.kill(nil)
	te.out.routes = []string{"a"}
	if n, err = te.x.FinishSent(t.Context()); err != nil || n != 1 || h.find(3) != nil {
		t.Errorf("a later delivery: %d, %v", n, err)
	}

	counts, err := waiting.CountGroups(t.Context(), h.coll, waiting.Query{Watcher: h.watcher})
	if err != nil || len(counts) == 0 || counts[0].Topic != "a" {
		t.Errorf("counts: %+v, %v", counts, err)
	}
}

// TestN10_ALaterEnvelopeIsNotFinishedBeforeAnEarlierOneOfItsKey in a compacted topic, where the record of the earlier one may have
// been removed: it is sent again, and the later one after it.
func TestN10_ALaterEnvelopeIsNotFinishedBeforeAnEarlierOneOfItsKey(t *testing.T) {
	t.Parallel()
	for compacted, want := range map[bool]string{true: "[1 4]", false: "[1 3 4]"} {
		t.Run(fmt.Sprint("compacted ", compacted), func(t *testing.T) {
			t.Parallel()
			h := newScene(t)
			h.enter(h.newEntry(1, "k", waiting.Parked), h.newEntry(2, "k", waiting.Parked), h.newEntry(3, "k", waiting.Parked), h.newEntry(4, "l", waiting.Parked))
			for i, key := range map[int]string{1: "k", 3: "k", 4: "l"} {
				h.broker.appendRecord("a", fmt.Sprintf("e%06d", i), key, 0)
			}

			te := h.newTerm()
			defer te.out.kill(nil)
			te.out.routes = []string{"a"}
			te.x.config.Compacted = func(string) bool { return compacted }
			if _, err := te.x.FinishSent(t.Context()); err != nil {
				t.Fatal(err)
			}

			var finished []int
			for i := 1; i <= 4; i++ {
				if h.find(i) == nil {
					finished = append(finished, i)
				}
			}
			if fmt.Sprint(finished) != want {
				t.Errorf("finished are %v, want %s", finished, want)
			}
		})
	}
}
