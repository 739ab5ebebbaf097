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

	mu          sync.Mutex
	maxCounters int // counters
	counters    int // counters in use
	topics      map[string]*topicGates
	stopped     map[Gate]struct{} // keys of which a delivery outside of the stream's order came back, which is not yet written down
	waiting     int
	changes     uint32 // changes of any gate
}

// topicGates are the gates of one topic, by hash. A topic with too many keys has fewer bits of the hash.
type topicGates struct {
	mask   uint32
	byHash map[uint32]gateCount
}

// Gate is the scope of an order: the collection, by the value of its header `outrelay-ns`, the topic, and the key.
type Gate struct {
	NS, Topic, Key string
}

// gateCount is how many wait behind a gate, and when that last changed.
type gateCount struct {
	waiting   int32
	changedAt uint32
}

func newGates(most int) *gates {
	return &gates{maxCounters: most, topics: map[string]*topicGates{}, stopped: map[Gate]struct{}{}}
}

// fullMask of the hash tell the keys of a topic apart while there are not too many.
const fullMask = math.MaxUint32

var hashSeed = maphash.MakeSeed()

// hashKey is the hash of a key in a namespace, of their bytes or of their text.
func hashKey(ns, key string) uint32 {
	return mixHashes(maphash.String(hashSeed, ns), maphash.String(hashSeed, key))
}

func hashKeyBytes(ns, key []byte) uint32 {
	return mixHashes(maphash.Bytes(hashSeed, ns), maphash.Bytes(hashSeed, key))
}

func mixHashes(ns, key uint64) uint32 { return uint32((ns*31 + key) >> 32) }

// changeWaiting changes the number that waits behind a gate by n.
func (g *gates) changeWaiting(ns, topic, key string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.changeLocked(topic, hashKey(ns, key), n)
}

func (g *gates) changeLocked(topic string, hash uint32, n int) {
	c := g.topics[topic]
	if c == nil {
		c = &topicGates{mask: fullMask, byHash: map[uint32]gateCount{}}
	}
	at := hash & c.mask
	had, known := c.byHash[at]
	left := int(had.waiting) + n
	if left < 0 {
		return // one that was counted before the gates were loaded anew, or that an audit took off
	}

	g.changes++
	g.waiting += n
	if left > 0 {
		g.topics[topic] = c
		c.byHash[at] = gateCount{int32(left), g.changes}
	} else {
		delete(c.byHash, at)
	}
	switch {
	case left > 0 && !known:
		g.counters++
	case left == 0 && known:
		g.counters--
	}
	if len(c.byHash) == 0 {
		delete(g.topics, topic) // it begins anew with all bits of the hash
	}
	if g.counters > g.maxCounters {
		g.foldLocked()
	}
	g.updateActiveLocked()
}

// foldLocked takes bits of the hash off the topics that have most counters, until a quarter of all is free.
func (g *gates) foldLocked() {
	for g.counters > g.maxCounters-g.maxCounters/4 {
		var most *topicGates
		for _, c := range g.topics {
			if most == nil || len(c.byHash) > len(most.byHash) {
				most = c
			}
		}
		n := len(most.byHash)
		if n < 2 {
			return // so many topics
		}
		most.mask = min(most.mask>>1, 1<<(bits.Len(uint(n))-2)-1)
		by := make(map[uint32]gateCount, n/2)
		for hash, c := range most.byHash {
			was := by[hash&most.mask]
			by[hash&most.mask] = gateCount{was.waiting + c.waiting, max(was.changedAt, c.changedAt)}
		}
		most.byHash = by
		g.counters += len(by) - n
	}
}

func (g *gates) updateActiveLocked() { g.active.Store(int64(g.waiting + len(g.stopped))) }

func (g *gates) openAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.topics)
	g.waiting, g.counters = 0, 0
	g.updateActiveLocked()
}

// stopKey keeps deliveries outside of the stream's order of a key back until resume.
func (g *gates) stopKey(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped[Gate{ns, topic, key}] = struct{}{}
	g.updateActiveLocked()
}

func (g *gates) resumeKey(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.stopped, Gate{ns, topic, key})
	g.updateActiveLocked()
}

func (g *gates) checkGate(rec *record.Record, side bool) error {
	if g.active.Load() == 0 {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	ns, shut := rec.Header(record.HeaderNamespace), false
	if side {
		_, shut = g.stopped[Gate{string(ns), rec.Topic, string(rec.Key)}]
	} else if c := g.topics[rec.Topic]; c != nil {
		_, shut = c.byHash[hashKeyBytes(ns, rec.Key)&c.mask]
	}
	if shut {
		return record.ErrBlocked
	}
	return nil
}
