package dispatch

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/record"
)

// maxGates is how many counters the gates of one term have at most; each takes about 20 bytes. With more waiting keys, keys of the topic
// that has most share counters.
const maxGates = 250_000

// gates are N15: the number of exceptions that wait for each (namespace, topic, key). A gate closes when the decision that
// an envelope has to wait is taken, in stream order, and opens when the last of them was sent and written down, or is
// dead; it is never opened by a query, which could miss what is about to be written. Its lock is a leaf.
//
// Namespace and key are hashed. Keys whose hashes are equal share a gate: one of them may wait although only the other has an
// exception. Each topic has counters of its own, so that the keys of one never wait for those of another.
type gates struct {
	active atomic.Int64 // exceptions and stopped keys; 0 is the healthy case, which costs one load per record

	mu      sync.Mutex
	max     int // counters
	size    int // counters in use
	topics  map[string]*counters
	stopped map[Gate]struct{} // keys of which a delivery outside of the stream's order came back, which is not yet written down
	total   int
	moves   uint32 // changes of any gate
}

// counters are the gates of one topic, by hash. A topic with too many keys has fewer bits of the hash.
type counters struct {
	mask uint32
	by   map[uint32]count
}

// Gate is the scope of an order: the collection, by the value of its header `outrelay-ns`, the topic, and the key.
type Gate struct {
	NS, Topic, Key string
}

// count is how many wait behind a gate, and when that last changed.
type count struct {
	n    int32
	when uint32
}

func newGates(most int) *gates {
	return &gates{max: most, topics: map[string]*counters{}, stopped: map[Gate]struct{}{}}
}

// allBits of the hash tell the keys of a topic apart while there are not too many.
const allBits = math.MaxUint32

var seed = maphash.MakeSeed()

// hashOf is the hash of a key in a namespace, of their bytes or of their text.
func hashOf(ns, key string) uint32 { return mix(maphash.String(seed, ns), maphash.String(seed, key)) }

func hashOfBytes(ns, key []byte) uint32 {
	return mix(maphash.Bytes(seed, ns), maphash.Bytes(seed, key))
}

func mix(ns, key uint64) uint32 { return uint32((ns*31 + key) >> 32) }

// add changes the number that waits behind a gate by n.
func (g *gates) add(ns, topic, key string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.change(topic, hashOf(ns, key), n)
}

func (g *gates) change(topic string, hash uint32, n int) {
	c := g.topics[topic]
	if c == nil {
		c = &counters{mask: allBits, by: map[uint32]count{}}
	}
	at := hash & c.mask
	had, known := c.by[at]
	left := int(had.n) + n
	if left < 0 {
		return // one that was counted before the gates were loaded anew, or that an audit took off
	}

	g.moves++
	g.total += n
	if left > 0 {
		g.topics[topic] = c
		c.by[at] = count{int32(left), g.moves}
	} else {
		delete(c.by, at)
	}
	switch {
	case left > 0 && !known:
		g.size++
	case left == 0 && known:
		g.size--
	}
	if len(c.by) == 0 {
		delete(g.topics, topic) // it begins anew with all bits of the hash
	}
	if g.size > g.max {
		g.fold()
	}
	g.count()
}

// fold takes bits of the hash off the topics that have most counters, until a quarter of all is free.
func (g *gates) fold() {
	for g.size > g.max-g.max/4 {
		var most *counters
		for _, c := range g.topics {
			if most == nil || len(c.by) > len(most.by) {
				most = c
			}
		}
		n := len(most.by)
		if n < 2 {
			return // so many topics
		}
		most.mask = min(most.mask>>1, 1<<(bits.Len(uint(n))-2)-1)
		by := make(map[uint32]count, n/2)
		for hash, c := range most.by {
			was := by[hash&most.mask]
			by[hash&most.mask] = count{was.n + c.n, max(was.when, c.when)}
		}
		most.by = by
		g.size += len(by) - n
	}
}

func (g *gates) count() { g.active.Store(int64(g.total + len(g.stopped))) }

func (g *gates) forget() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.topics)
	g.total, g.size = 0, 0
	g.count()
}

// stop keeps deliveries outside of the stream's order of a key back until resume.
func (g *gates) stop(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped[Gate{ns, topic, key}] = struct{}{}
	g.count()
}

func (g *gates) resume(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.stopped, Gate{ns, topic, key})
	g.count()
}

func (g *gates) closed(rec *record.Record, side bool) error {
	if g.active.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	ns, shut := rec.Header(record.HeaderNamespace), false
	if side {
		_, shut = g.stopped[Gate{string(ns), rec.Topic, string(rec.Key)}]
	} else if c := g.topics[rec.Topic]; c != nil {
		_, shut = c.by[hashOfBytes(ns, rec.Key)&c.mask]
	}
	if shut {
		return record.ErrBlocked
	}
	return nil
}
