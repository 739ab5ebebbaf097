package scheduled

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"pgregory.net/rapid"
)

func timerID(n int) bson.RawValue {
	return bson.RawValue{Type: bson.TypeObjectID, Value: []byte{byte(n)}}
}

// For all sequences of additions and removals: no envelope is returned before its time, twice, or while it is in
// flight; a noted envelope is returned at the earliest noted time; and the count of each collection is that of the
// heap.
func TestTimersAgainstAModel(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		const room = 20
		x := newTimers(room)

		cals := []*scheduledCollection{{ns: "a.outbox"}, {ns: "b.outbox"}}
		type known struct {
			due int64
			fed bool
		}
		want := map[uint64]known{}
		flight := map[uint64]bool{}
		now := int64(0)

		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 3).Draw(t, "op") {
			case 0, 1:
				c, id := cals[rapid.IntRange(0, 1).Draw(t, "cal")], timerID(rapid.IntRange(0, 8).Draw(t, "id"))
				due, fed := rapid.Int64Range(0, 30).Draw(t, "due"), rapid.Bool().Draw(t, "fed")

				k := x.hashID(c, id)
				old, had := want[k]
				full := x.entryCount() >= room || !fed && x.entryCount() >= room/2

				took := x.addCopy(c, id, due, fed)
				if should := !flight[k] && (!had || due < old.due); took != should && !full {
					t.Fatalf("took %v, want %v", took, should)
				}

				if took {
					want[k] = known{due, fed}
				}
				// A full heap may have removed another timer.
				for k := range want {
					if _, ok := x.dueByKey[k]; !ok {
						delete(want, k)
					}
				}
			case 2:
				now += rapid.Int64Range(0, 10).Draw(t, "later")
				n := rapid.IntRange(1, 5).Draw(t, "n")
				out, next, more := x.takeDue(now, n, 2)

				last := int64(-1)
				for _, e := range out {
					if k, ok := want[e.key]; !ok || k.due != e.due || e.due > now || e.due < last || flight[e.key] {
						t.Fatalf("%+v at %d, want %+v", e, now, k)
					}
					last = e.due
					delete(want, e.key)
					flight[e.key] = true
				}

				if len(out) < n {
					for _, k := range want {
						if k.due <= now {
							t.Fatalf("one that is due since %d was left at %d", k.due, now)
						}
					}
					if more && next <= now {
						t.Fatalf("the next is due at %d, and it is %d", next, now)
					}
				}
			case 3:
				for k := range flight {
					x.endFlight(k)
					delete(flight, k)
					break
				}
			}

			var fed int64
			for _, e := range x.heap {
				if e.fed {
					fed++
				}
			}
			if len(want) != len(x.dueByKey) || x.countInFlight() != len(flight) || cals[0].indexEntries.Load()+cals[1].indexEntries.Load() != fed || x.entryCount() > room {
				t.Fatalf("%d known, want %d; %d aloft, want %d; %d entries", len(x.dueByKey), len(want), x.countInFlight(), len(flight), x.entryCount())
			}
		}
	})
}

// A full cache drops a later envelope for an earlier one, and never the next one.
func TestTimersAreBounded(t *testing.T) {
	t.Parallel()
	x, c := newTimers(100), &scheduledCollection{ns: "a.outbox"}
	dues := rand.Perm(1000)
	for i, due := range dues {
		x.addCopy(c, bson.RawValue{Type: bson.TypeObjectID, Value: []byte{byte(i), byte(i >> 8)}}, int64(due), i%2 == 0)
		if x.entryCount() > 100 || x.heap[0].due != int64(slices.Min(dues[:i+1])) {
			t.Fatalf("%d entries, the next is due at %d", x.entryCount(), x.heap[0].due)
		}
	}

	x.removeEntries(func(*scheduledCollection) bool { return true })
	if x.entryCount() > 0 || len(x.dueByKey) > 0 {
		t.Errorf("%d entries are left of a collection that is gone", x.entryCount())
	}
}

// One statement for each collection: a claim takes envelopes of so many at most.
func TestTimersOfManyCollections(t *testing.T) {
	t.Parallel()
	x, s := newTimers(1000), New(Config{Now: time.Now})
	for i := range 30 {
		c := &scheduledCollection{ns: string(rune('a'+i)) + ".outbox"}
		x.addCopy(c, timerID(1), int64(i), false)
		x.addCopy(c, timerID(2), int64(i), false)
	}

	var got int
	for range 3 {
		out, _, _ := x.takeDue(100, 1000, 10)
		if n := len(s.groupByCollection(out)); n != 10 || len(out) != 20 {
			t.Fatalf("%d envelopes of %d collections", len(out), n)
		}
		got += len(out)
	}

	if got != 60 {
		t.Errorf("%d taken", got)
	}
}

// entryCount returns the number of entries, including stale ones.
func (t *timerCache) entryCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.heap)
}
