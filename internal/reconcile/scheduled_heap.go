package reconcile

import (
	"container/heap"
	"hash/maphash"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// timer is one scheduled envelope that is due soon. It is a hint: the envelope may have been cancelled or moved since.
type timer struct {
	due        int64 // Unix milliseconds; when to try
	key        uint64
	collection *scheduledCollection
	id         bson.RawValue
	tries      int
	fed        bool // it came from the index
}

// timerCache is a bounded cache of what is due next, ordered by time, for any goroutine. It knows an envelope by a hash of 64
// bits, once at most: a collision hides a hint until the other is gone, and then the index brings it again.
type timerCache struct {
	seed maphash.Seed
	max  int
	wake chan struct{} // 1 slot: the next one may be due earlier than was thought

	mu       sync.Mutex
	heap     timerHeap
	dueByKey map[uint64]int64    // due time of the one entry that counts
	inFlight map[uint64]struct{} // claimed and not finished: not to be claimed again
}

func newTimers(most int) *timerCache {
	return &timerCache{seed: maphash.MakeSeed(), max: most, wake: make(chan struct{}, 1), dueByKey: map[uint64]int64{}, inFlight: map[uint64]struct{}{}}
}

func (t *timerCache) hashID(cal *scheduledCollection, id bson.RawValue) uint64 {
	var h maphash.Hash
	h.SetSeed(t.seed)
	_, _ = h.WriteString(cal.ns)
	_ = h.WriteByte(0)
	_ = h.WriteByte(byte(id.Type))
	_, _ = h.Write(id.Value)
	return h.Sum64()
}

// addCopy takes an envelope unless it is in flight, known as due no later, or the cache is full of earlier ones. The id is
// copied.
func (t *timerCache) addCopy(cal *scheduledCollection, id bson.RawValue, due int64, fed bool) bool {
	id.Value = slices.Clone(id.Value)
	return t.pushTimer(timer{due: due, key: t.hashID(cal, id), collection: cal, id: id, fed: fed})
}

func (t *timerCache) pushTimer(e timer) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, busy := t.inFlight[e.key]; busy {
		return false
	}
	if old, ok := t.dueByKey[e.key]; ok && old <= e.due {
		return false
	}
	room := t.max
	if !e.fed {
		room /= 2 // the index brings those of the stream as well, but has to begin again for what finds no room
	}
	if last := len(t.heap) - 1; last+1 >= room {
		// The last one is a leaf, so nothing depends on it; the index will bring it again.
		if t.heap[last].due <= e.due {
			return false
		}
		t.uncountLocked(t.heap.Pop().(timer))
	}
	t.dueByKey[e.key] = e.due // an entry that is there for a later time no longer counts
	heap.Push(&t.heap, e)
	if e.fed {
		e.collection.indexEntries.Add(1)
	}
	if t.heap[0].key == e.key {
		signal(t.wake)
	}
	return true
}

// uncountLocked accounts for an entry that left the heap, and reports whether it was the one that counts.
func (t *timerCache) uncountLocked(e timer) bool {
	if e.fed {
		e.collection.indexEntries.Add(-1)
	}
	if due, ok := t.dueByKey[e.key]; !ok || due != e.due {
		return false
	}
	delete(t.dueByKey, e.key)
	return true
}

// takeDue moves up to n entries that are due by now into dst and marks them as in flight; of at most that many collections,
// because each costs a statement. next is when the first of the others is due, if there is one.
func (t *timerCache) takeDue(dst []timer, now int64, n, collections int) (out []timer, next int64, more bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	seen := map[*scheduledCollection]struct{}{}
	for len(t.heap) > 0 && len(dst) < n {
		head := t.heap[0]
		if head.due > now {
			break
		}
		if _, had := seen[head.collection]; !had && len(seen) >= collections {
			break
		}
		seen[head.collection] = struct{}{}
		heap.Pop(&t.heap)
		if !t.uncountLocked(head) {
			continue // replaced by an earlier one
		}
		t.inFlight[head.key] = struct{}{}
		dst = append(dst, head)
	}
	if len(t.heap) == 0 {
		return dst, 0, false
	}
	return dst, t.heap[0].due, true
}

// hasDue reports whether an entry is due by now, and less than most are in flight.
func (t *timerCache) hasDue(now int64, most int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.heap) > 0 && t.heap[0].due <= now && len(t.inFlight) < most
}

// endFlights ends the flight of an envelope.
func (t *timerCache) endFlights(keys ...uint64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range keys {
		delete(t.inFlight, k)
	}
}

func (t *timerCache) countInFlight() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.inFlight)
}

// entryCount is the number of entries, those that no longer count included.
func (t *timerCache) entryCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.heap)
}

// removeEntries drops the entries of collections that are not watched any more.
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
	clear(t.heap[len(kept):])
	t.heap = kept
	heap.Init(&t.heap)
}

func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

type timerHeap []timer

func (h timerHeap) Len() int           { return len(h) }
func (h timerHeap) Less(i, j int) bool { return h[i].due < h[j].due }
func (h timerHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *timerHeap) Push(x any)        { *h = append(*h, x.(timer)) }
func (h *timerHeap) Pop() any {
	old := *h
	e := old[len(old)-1]
	old[len(old)-1] = timer{}
	*h = old[:len(old)-1]
	return e
}
