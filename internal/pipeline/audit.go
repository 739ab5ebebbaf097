package pipeline

import "maps"

// Audit compares the gates with the exceptions in the collections (N15).
//
// Gates are kept by counting, so they differ from the collections only after a fault. A count
// that is too high blocks its key for too long. A count that is too low would let an event
// overtake another.
//
// Exceptions are stored a little later than they are decided. Therefore a difference counts
// only if the previous audit found the same one, if the gate has not changed since, and if no
// exception waits to be stored. The gate of an envelope in flight opens later than its document
// changes, so gates with envelopes in flight are left out.
type Audit struct {
	d          *Dispatcher
	mismatches map[gateID]mismatch // of the previous comparison
}

// gateID identifies one counter of a topic.
type gateID struct {
	topic string
	hash  uint32
}

// mismatch is a gate that differed from the collections.
type mismatch struct {
	gate   gateCount
	stored int32
}

// NewAudit returns an audit without a previous comparison.
func (d *Dispatcher) NewAudit() *Audit { return &Audit{d: d} }

// Comparison is one comparison: the gates before the collections were read, the exceptions in
// the collections, and the keys with an envelope in flight.
type Comparison struct {
	audit    *Audit
	topics   map[string]*topicGates
	stored   map[string]map[uint32]int32
	inFlight map[uint32]bool
}

// StartComparison starts a comparison with a copy of the gates. It must be called before the collections
// are read.
func (a *Audit) StartComparison() *Comparison {
	g := a.d.gates
	g.mu.Lock()
	defer g.mu.Unlock()

	c := &Comparison{
		audit:    a,
		topics:   make(map[string]*topicGates, len(g.topics)),
		stored:   map[string]map[uint32]int32{},
		inFlight: map[uint32]bool{},
	}
	for topic, gates := range g.topics {
		c.topics[topic] = &topicGates{mask: gates.mask, byHash: maps.Clone(gates.byHash)}
	}
	return c
}

// AddStored counts an exception of the stream in a collection.
func (c *Comparison) AddStored(ns, topic, key string) {
	byHash := c.stored[topic]
	if byHash == nil {
		byHash = map[uint32]int32{}
		c.stored[topic] = byHash
	}
	byHash[hashKey(ns, key)&c.hashMask(topic)]++
}

// MarkInFlight marks a key that has an envelope in flight: it was published and is not resolved yet. It
// must be called after the collections are read.
func (c *Comparison) MarkInFlight(ns, key string) { c.inFlight[hashKey(ns, key)] = true }

// CorrectGates corrects the gates that are certainly wrong, and returns their number.
func (c *Comparison) CorrectGates() (corrected int) {
	mismatches := map[gateID]mismatch{}
	compareGate := func(id gateID, gate gateCount, stored int32) {
		if gate.waiting == stored || c.isInFlight(id) {
			return
		}

		m := mismatch{gate, stored}
		if c.audit.mismatches[id] == m && c.audit.d.correctGate(id, gate, stored, c.hashMask(id.topic)) {
			corrected++
			return
		}
		mismatches[id] = m
	}

	for topic, gates := range c.topics {
		for hash, gate := range gates.byHash {
			compareGate(gateID{topic, hash}, gate, c.stored[topic][hash])
		}
	}

	// Stored exceptions without a gate.
	for topic, byHash := range c.stored {
		gates := c.topics[topic]
		for hash, n := range byHash {
			if gates == nil || gates.byHash[hash].waiting == 0 {
				compareGate(gateID{topic, hash}, gateCount{}, n)
			}
		}
	}

	c.audit.mismatches = mismatches
	return corrected
}

// hashMask returns the mask that topic had when the comparison started.
func (c *Comparison) hashMask(topic string) uint32 {
	if gates := c.topics[topic]; gates != nil {
		return gates.mask
	}
	return fullMask
}

// isInFlight reports whether a key of the gate has an envelope in flight.
func (c *Comparison) isInFlight(id gateID) bool {
	mask := c.hashMask(id.topic)
	if mask == fullMask {
		return c.inFlight[id.hash]
	}

	for hash := range c.inFlight {
		if hash&mask == id.hash {
			return true
		}
	}
	return false
}

// correctGate sets a gate to the stored number. It does nothing and returns false if the gate has
// changed since the comparison started, or if exceptions wait to be stored.
func (d *Dispatcher) correctGate(id gateID, gate gateCount, stored int32, mask uint32) bool {
	// The lock keeps new exceptions out of the queue until the gate is corrected.
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.exceptions) > 0 || d.writing {
		return false
	}

	g := d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	c := g.topics[id.topic]
	if c == nil {
		c = &topicGates{mask: fullMask}
	}
	if c.mask != mask || c.byHash[id.hash] != gate {
		return false
	}

	g.changeLocked(id.topic, id.hash, int(stored-gate.waiting))
	return true
}
