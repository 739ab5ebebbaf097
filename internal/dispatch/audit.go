package dispatch

import "maps"

// Audit compares the gates with what the collections hold (N15). Gates are kept by counting, so the two differ only where
// something went wrong: a gate too high holds its key back for longer than it must, one too low would let an event overtake.
// What is decided is written a little later, so a difference counts only if it was there at the audit before, if nothing
// has moved the gate since, and if nothing waits to be written. What is published and not told of yet opens its gate later,
// although its document says already that it waits no more.
type Audit struct {
	d    *Dispatcher
	last map[counter]suspect
}

// counter is one of those of a topic.
type counter struct {
	topic string
	hash  uint32
}

// suspect is a gate that differed at the last audit.
type suspect struct {
	was  count
	held int32
}

// NewAudit begins without a suspicion.
func (d *Dispatcher) NewAudit() *Audit { return &Audit{d: d} }

// Look is one comparison: how the gates stood before the collections were read, what these hold, and for which keys something is
// published and has no fate yet.
type Look struct {
	a      *Audit
	topics map[string]*counters
	held   map[string]map[uint32]int32
	busy   map[uint32]bool
}

// Look begins a comparison. It is to be taken before the collections are read.
func (a *Audit) Look() *Look {
	g := a.d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	l := &Look{a: a, topics: make(map[string]*counters, len(g.topics)), held: map[string]map[uint32]int32{}, busy: map[uint32]bool{}}
	for topic, c := range g.topics {
		l.topics[topic] = &counters{mask: c.mask, by: maps.Clone(c.by)}
	}
	return l
}

// Held counts an exception of the stream that a collection holds.
func (l *Look) Held(ns, topic, key string) {
	by := l.held[topic]
	if by == nil {
		by = map[uint32]int32{}
		l.held[topic] = by
	}
	by[hashOf(ns, key)&l.mask(topic)]++
}

// Busy says that something of a key is published and has no fate yet. It is to be asked for after the collections are read.
func (l *Look) Busy(ns, key string) { l.busy[hashOf(ns, key)] = true }

// Compare sets those gates right that are wrong for certain, and returns how many.
func (l *Look) Compare() (mended int) {
	now := map[counter]suspect{}
	note := func(id counter, was count, held int32) {
		if was.n == held || l.isBusy(id) {
			return
		}
		s := suspect{was, held}
		if l.a.last[id] == s && l.a.d.mend(id, was, held, l.mask(id.topic)) {
			mended++
			return
		}
		now[id] = s
	}
	for topic, c := range l.topics {
		for hash, n := range c.by {
			note(counter{topic, hash}, n, l.held[topic][hash])
		}
	}
	for topic, by := range l.held {
		c := l.topics[topic]
		for hash, n := range by {
			if c == nil || c.by[hash].n == 0 {
				note(counter{topic, hash}, count{}, n)
			}
		}
	}
	l.a.last = now
	return mended
}

func (l *Look) mask(topic string) uint32 {
	if c := l.topics[topic]; c != nil {
		return c.mask
	}
	return allBits
}

func (l *Look) isBusy(id counter) bool {
	mask := l.mask(id.topic)
	if mask == allBits {
		return l.busy[id.hash]
	}
	for hash := range l.busy {
		if hash&mask == id.hash {
			return true
		}
	}
	return false
}

// mend sets a gate that has not moved since it was looked at.
func (d *Dispatcher) mend(id counter, was count, held int32, mask uint32) bool {
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
		c = &counters{mask: allBits}
	}
	if c.mask != mask || c.by[id.hash] != was {
		return false
	}
	g.change(id.topic, id.hash, int(held-was.n))
	return true
}
