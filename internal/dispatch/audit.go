package dispatch

import "maps"

// Audit compares the gates with what the collections hold (N15). Gates are kept by counting, so the two differ only where
// something went wrong: a gate too high holds its key back for longer than it must, one too low would let an event overtake.
// What is decided is written a little later, so a difference counts only if it was there at the audit before, if nothing
// has moved the gate since, and if nothing waits to be written. What is published and not told of yet opens its gate later,
// although its document says already that it waits no more.
type Audit struct {
	d          *Dispatcher
	mismatches map[gateID]mismatch
}

// gateID is one of those of a topic.
type gateID struct {
	topic string
	hash  uint32
}

// mismatch is a gate that differed at the last audit.
type mismatch struct {
	gate   gateCount
	stored int32
}

// NewAudit begins without a suspicion.
func (d *Dispatcher) NewAudit() *Audit { return &Audit{d: d} }

// Comparison is one comparison: how the gates stood before the collections were read, what these hold, and for which keys something is
// published and has no fate yet.
type Comparison struct {
	audit    *Audit
	topics   map[string]*topicGates
	stored   map[string]map[uint32]int32
	inFlight map[uint32]bool
}

// Look begins a comparison. It is to be taken before the collections are read.
func (a *Audit) Look() *Comparison {
	g := a.d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	l := &Comparison{audit: a, topics: make(map[string]*topicGates, len(g.topics)), stored: map[string]map[uint32]int32{}, inFlight: map[uint32]bool{}}
	for topic, c := range g.topics {
		l.topics[topic] = &topicGates{mask: c.mask, byHash: maps.Clone(c.byHash)}
	}
	return l
}

// Held counts an exception of the stream that a collection holds.
func (l *Comparison) Held(ns, topic, key string) {
	by := l.stored[topic]
	if by == nil {
		by = map[uint32]int32{}
		l.stored[topic] = by
	}
	by[hashKey(ns, key)&l.hashMask(topic)]++
}

// Busy says that something of a key is published and has no fate yet. It is to be asked for after the collections are read.
func (l *Comparison) Busy(ns, key string) { l.inFlight[hashKey(ns, key)] = true }

// Compare sets those gates right that are wrong for certain, and returns how many.
func (l *Comparison) Compare() (mended int) {
	now := map[gateID]mismatch{}
	note := func(id gateID, was gateCount, held int32) {
		if was.waiting == held || l.isInFlight(id) {
			return
		}
		s := mismatch{was, held}
		if l.audit.mismatches[id] == s && l.audit.d.correctGate(id, was, held, l.hashMask(id.topic)) {
			mended++
			return
		}
		now[id] = s
	}
	for topic, c := range l.topics {
		for hash, n := range c.byHash {
			note(gateID{topic, hash}, n, l.stored[topic][hash])
		}
	}
	for topic, by := range l.stored {
		c := l.topics[topic]
		for hash, n := range by {
			if c == nil || c.byHash[hash].waiting == 0 {
				note(gateID{topic, hash}, gateCount{}, n)
			}
		}
	}
	l.audit.mismatches = now
	return mended
}

func (l *Comparison) hashMask(topic string) uint32 {
	if c := l.topics[topic]; c != nil {
		return c.mask
	}
	return fullMask
}

func (l *Comparison) isInFlight(id gateID) bool {
	mask := l.hashMask(id.topic)
	if mask == fullMask {
		return l.inFlight[id.hash]
	}
	for hash := range l.inFlight {
		if hash&mask == id.hash {
			return true
		}
	}
	return false
}

// correctGate sets a gate that has not moved since it was looked at.
func (d *Dispatcher) correctGate(id gateID, was gateCount, held int32, mask uint32) bool {
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
	if c.mask != mask || c.byHash[id.hash] != was {
		return false
	}
	g.changeLocked(id.topic, id.hash, int(held-was.waiting))
	return true
}
