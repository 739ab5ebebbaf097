package scheduled

import (
	"container/heap"
	"hash/maphash"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
)

// timer is one scheduled envelope that is due soon. It is only a hint: the envelope may have been
// canceled or rescheduled since.
type timer struct {
	due        int64 // when to try, in Unix milliseconds
	key        uint64
	collection *scheduledCollection
	id         bson.RawValue
	tries      int
	locked     int  // claims in a row that found it locked
	fed        bool // it came from the index
}

// timerCache is a bounded cache of the envelopes that are due next, ordered by time. Any goroutine may
// use it. It identifies an envelope by a 64-bit hash and keeps one entry for it. If two hashes collide,
// the second envelope has no hint until the first is gone, and then the index brings it again.
type timerCache struct {
	seed maphash.Seed
	max  int
	wake chan struct{} // holds one token: the next entry may be due earlier than before

	mu       sync.Mutex
	heap     timerHeap
	dueByKey map[uint64]int64    // due time of the valid entry; other entries of the key are stale
	inFlight map[uint64]struct{} // claimed and not finished: not to be claimed again
}

func newTimers(most int) *timerCache {
	return &timerCache{
		seed:     maphash.MakeSeed(),
		max:      most,
		wake:     make(chan struct{}, 1),
		dueByKey: map[uint64]int64{},
		inFlight: map[uint64]struct{}{},
	}
}

func (t *timerCache) hashID(collection *scheduledCollection, id bson.RawValue) uint64 {
	var hash maphash.Hash
	hash.SetSeed(t.seed)
	_, _ = hash.WriteString(collection.ns)
	_ = hash.WriteByte(0)
	_ = hash.WriteByte(byte(id.Type))
	_, _ = hash.Write(id.Value)
	return hash.Sum64()
}

// addCopy is pushTimer for an envelope, whose id it copies.
func (t *timerCache) addCopy(collection *scheduledCollection, id bson.RawValue, due int64, fed bool) bool {
	id.Value = slices.Clone(id.Value)
	return t.pushTimer(timer{due: due, key: t.hashID(collection, id), collection: collection, id: id, fed: fed})
}

// pushTimer adds pushed. It returns false without adding it if the envelope is in flight, has an entry that
// is due no later, or the cache is full of earlier entries.
func (t *timerCache) pushTimer(pushed timer) bool {
	t.mu.Lock()
	defer t.mu.Unlock()

	if _, inFlight := t.inFlight[pushed.key]; inFlight {
		return false
	}
	if old, ok := t.dueByKey[pushed.key]; ok && old <= pushed.due {
		return false
	}

	// Entries of the stream get half of the room. The index brings their envelopes as well, but has to
	// start again for entries that find no room.
	room := t.max
	if !pushed.fed {
		room /= 2
	}

	if last := len(t.heap) - 1; last+1 >= room {
		if t.heap[last].due <= pushed.due {
			return false
		}
		// The last entry is a leaf, so the heap stays valid without it. The index brings it again.
		t.uncountLocked(t.heap.Pop().(timer))
	}

	// This makes an entry with a later time stale.
	t.dueByKey[pushed.key] = pushed.due
	heap.Push(&t.heap, pushed)
	if pushed.fed {
		pushed.collection.indexEntries.Add(1)
	}
	if t.heap[0].key == pushed.key {
		retry.Signal(t.wake)
	}
	return true
}

// uncountLocked updates the counts for an entry that left the heap. It reports whether the entry was
// valid.
func (t *timerCache) uncountLocked(timer timer) bool {
	if timer.fed {
		timer.collection.indexEntries.Add(-1)
	}

	due, ok := t.dueByKey[timer.key]
	if !ok || due != timer.due {
		return false
	}
	delete(t.dueByKey, timer.key)
	return true
}

// takeDue removes up to n entries that are due by now, marks them as in flight and returns them. They are of at most the
// given number of collections, because each costs a statement. next is the due time of the first remaining entry, and
// more reports whether there is one.
func (t *timerCache) takeDue(now int64, n, collections int) (due []timer, next int64, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	seen := map[*scheduledCollection]struct{}{}
	for len(t.heap) > 0 && len(due) < n {
		head := t.heap[0]
		if head.due > now {
			break
		}
		if _, known := seen[head.collection]; !known && len(seen) >= collections {
			break
		}
		seen[head.collection] = struct{}{}

		heap.Pop(&t.heap)
		// The entry is stale: the envelope has got an earlier time since.
		if !t.uncountLocked(head) {
			continue
		}
		t.inFlight[head.key] = struct{}{}
		due = append(due, head)
	}

	if len(t.heap) == 0 {
		return due, 0, false
	}
	return due, t.heap[0].due, true
}

// countDue returns the number of entries that are due by now, including stale ones. It reads all entries.
func (t *timerCache) countDue(now int64) (n int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := range t.heap {
		if t.heap[i].due <= now {
			n++
		}
	}
	return n
}

// endFlight removes an envelope from those in flight.
func (t *timerCache) endFlight(key uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.inFlight, key)
}

func (t *timerCache) countInFlight() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.inFlight)
}

// removeEntries removes the entries of collections for which gone returns true.
func (t *timerCache) removeEntries(gone func(*scheduledCollection) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()

	kept := t.heap[:0]
	for _, e := range t.heap {
		if gone(e.collection) {
			t.uncountLocked(e)
			continue
		}
		kept = append(kept, e)
	}

	// Clear the rest of the array, so that it holds no ids.
	clear(t.heap[len(kept):])
	t.heap = kept
	heap.Init(&t.heap)
}

type timerHeap []timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(pushed any)   { *h = append(*h, pushed.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = timer{}
	*h = old[:len(old)-1]
	return last
}
