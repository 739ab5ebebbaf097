package pipeline

import (
	"hash/maphash"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// maxGates is the maximum number of counters of one term. Each takes about 20 bytes. If more
// keys wait, keys of the topic with the most counters share theirs.
const maxGates = 250_000

// gates are N15: the number of waiting envelopes of each (namespace, topic, key).
//
// A gate closes in stream order, when the dispatcher decides that an envelope has to wait. It
// opens when the last of its waiting envelopes is recorded as sent, or is dead. A query never opens
// it: it could miss a waiting envelope that is about to be stored. If somebody deletes a waiting envelope, its
// gate stays closed until the term ends, and the reconciler sends the later events of the key. The lock is a leaf.
//
// Namespace and key are hashed. Keys with equal hashes share a gate: one of them may wait
// although only the other has a waiting envelope. Each topic has its own counters, so the keys of one
// topic never wait for the keys of another.
type gates struct {
	active atomic.Int64 // waiting envelopes and stopped keys; if it is 0, a check costs one load

	mu          sync.Mutex
	maxCounters int
	counters    int // counters in use
	topics      map[string]*topicGates

	// stopped holds keys with a side delivery that the sink returned and whose outcome is not
	// recorded yet.
	stopped map[gate]struct{}
	waiting int // waiting envelopes, over all gates
}

// topicGates are the gates of one topic by hash. A topic with too many keys has a mask with
// fewer bits.
type topicGates struct {
	mask   uint32
	byHash map[uint32]int32
}

// gate is the scope of an order: the collection, by the value of its header `outrelay-ns`, the
// topic, and the key.
type gate struct {
	NS, Topic, Key string
}

func newGates(maxCounters int) *gates {
	return &gates{maxCounters: maxCounters, topics: map[string]*topicGates{}, stopped: map[gate]struct{}{}}
}

// fullMask is the mask of a topic until it has too many keys.
const fullMask = math.MaxUint32

var hashSeed = maphash.MakeSeed()

// hashKey returns the hash of a key in a namespace. It equals hashKeyBytes of the same bytes.
func hashKey(ns, key string) uint32 {
	return mixHashes(maphash.String(hashSeed, ns), maphash.String(hashSeed, key))
}

func hashKeyBytes(ns, key []byte) uint32 {
	return mixHashes(maphash.Bytes(hashSeed, ns), maphash.Bytes(hashSeed, key))
}

func mixHashes(ns, key uint64) uint32 { return uint32((ns*31 + key) >> 32) }

// changeWaiting changes the number of waiting envelopes of a gate by n.
func (g *gates) changeWaiting(ns, topic, key string, n int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	gates := g.topics[topic]
	if gates == nil {
		gates = &topicGates{mask: fullMask, byHash: map[uint32]int32{}}
	}
	masked := hashKey(ns, key) & gates.mask
	before, known := gates.byHash[masked]

	// The gate never counted a document that no relay made a waiting envelope.
	left := int(before) + n
	if left < 0 {
		return
	}

	g.waiting += n
	if left > 0 {
		g.topics[topic] = gates
		gates.byHash[masked] = int32(left)
	} else {
		delete(gates.byHash, masked)
	}

	switch {
	case left > 0 && !known:
		g.counters++
	case left == 0 && known:
		g.counters--
	}

	// A topic that is added again starts with the full mask.
	if len(gates.byHash) == 0 {
		delete(g.topics, topic)
	}
	if g.counters > g.maxCounters {
		g.foldLocked()
	}
	g.updateActiveLocked()
}

// foldLocked shortens the masks of the topics with the most counters, until a quarter of all
// counters is free.
func (g *gates) foldLocked() {
	for g.counters > g.maxCounters-g.maxCounters/4 {
		var largest *topicGates
		for _, c := range g.topics {
			if largest == nil || len(c.byHash) > len(largest.byHash) {
				largest = c
			}
		}

		// Every topic has a single counter: there is nothing left to share.
		n := len(largest.byHash)
		if n < 2 {
			return
		}

		// The mask has so few values that at most half of the counters are left.
		largest.mask = min(largest.mask>>1, 1<<(bits.Len(uint(n))-2)-1)
		folded := make(map[uint32]int32, n/2)
		for hash, waiting := range largest.byHash {
			folded[hash&largest.mask] += waiting
		}
		largest.byHash = folded
		g.counters += len(folded) - n
	}
}

// updateActiveLocked updates active after a change.
func (g *gates) updateActiveLocked() { g.active.Store(int64(g.waiting + len(g.stopped))) }

// openAll opens every gate. Stopped keys stay stopped.
func (g *gates) openAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	clear(g.topics)
	g.waiting, g.counters = 0, 0
	g.updateActiveLocked()
}

// stopKey blocks deliveries outside of the stream's order for a key until resumeKey.
func (g *gates) stopKey(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stopped[gate{ns, topic, key}] = struct{}{}
	g.updateActiveLocked()
}

// resumeKey ends stopKey.
func (g *gates) resumeKey(ns, topic, key string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.stopped, gate{ns, topic, key})
	g.updateActiveLocked()
}

// checkGate returns record.ErrBlocked if rec has to wait: at its gate, or, for a side
// delivery, because its key is stopped. It costs one load while nothing waits.
func (g *gates) checkGate(rec *record.Record, side bool) error {
	if g.active.Load() == 0 {
		return nil
	}

	g.mu.Lock()
	defer g.mu.Unlock()
	ns := rec.Header(record.HeaderNamespace)
	blocked := false
	if side {
		_, blocked = g.stopped[gate{string(ns), rec.Topic, string(rec.Key)}]
	} else if gates := g.topics[rec.Topic]; gates != nil {
		_, blocked = gates.byHash[hashKeyBytes(ns, rec.Key)&gates.mask]
	}

	if blocked {
		return record.ErrBlocked
	}
	return nil
}
