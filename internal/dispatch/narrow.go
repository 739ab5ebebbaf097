package dispatch

// Gates that became too many to count by key stay wide until none is left, and with one that leaked, as when a collection
// was dropped, that would be for ever: each event of the topic would take the way of an exception. So where the collections
// hold few by now, the gates are counted anew. All that is uncertain counts as closed: a gate too high costs its key a while,
// until the audit lowers it, and one too low would let an event overtake.

// Recount begins to count the gates anew. The collections are to be read when Written holds for what it returns. It is false
// unless the gates are wide.
func (a *Audit) Recount() (decided int64, wide bool) {
	d := a.d
	d.mu.Lock()
	defer d.mu.Unlock()
	d.gates.mu.Lock()
	defer d.gates.mu.Unlock()
	if d.gates.wide {
		d.gates.fresh = map[Gate]int{}
	}
	return d.decided, d.gates.wide
}

// Written reports whether all that was decided by then is written.
func (a *Audit) Written(decided int64) bool {
	a.d.mu.Lock()
	defer a.d.mu.Unlock()
	return a.d.written >= decided
}

// Room is how many keys may be counted anew; with more the gates stay wide.
func (a *Audit) Room() int { return a.d.gates.max / 2 }

// Narrow takes over what waits in the collections, and what is published and has no fate yet, since it was asked after the
// collections were read. It reports whether the gates are counted by key again.
func (a *Audit) Narrow(held, flying map[Gate]int) bool {
	g := a.d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	fresh := g.fresh
	g.fresh = nil
	if !g.wide || fresh == nil || len(held)+len(flying)+len(fresh) > a.Room() {
		return false
	}
	g.wide, g.total = false, 0
	clear(g.keys)
	clear(g.topics)
	for _, list := range []map[Gate]int{held, flying, fresh} {
		for id, n := range list {
			if n > 0 {
				g.change(id, n)
			}
		}
	}
	g.count()
	return true
}

// closing notes what closes while the gates are counted anew. What opens meanwhile is left out: nobody knows whether the
// collections still showed it.
func (g *gates) closing(id Gate, n int) {
	switch {
	case g.fresh == nil || n < 0:
	case !g.wide || len(g.fresh) >= g.max:
		g.fresh = nil
	default:
		g.fresh[id] += n
	}
}
