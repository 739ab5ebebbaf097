package dispatch

// Audit compares the gates with what the collections hold (N15). Gates are kept by counting, so the two differ only where
// something went wrong: a gate too high holds its key back for longer than it must, one too low would let an event overtake.
// What is decided is written a little later, so a difference counts only if it was there at the audit before, if nothing
// has moved the gate since, and if nothing waits to be written. What is published and not told of yet opens its gate later,
// although its document says already that it waits no more.
type Audit struct {
	d    *Dispatcher
	last map[Gate]suspect
}

// suspect is a gate that differed at the last audit.
type suspect struct {
	was  count
	held int
}

// NewAudit begins without a suspicion.
func (d *Dispatcher) NewAudit() *Audit { return &Audit{d: d} }

// Gates is how the gates stand, to be taken before the collections are read; false while there are too many to tell.
func (a *Audit) Gates() (map[Gate]count, bool) {
	g := a.d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wide {
		return nil, false
	}
	all := make(map[Gate]count, len(g.keys))
	for id, n := range g.keys {
		all[id] = n
	}
	return all, true
}

// Compare takes the gates and what was then read of the collections, and sets those right that are wrong for certain. It
// returns how many. busy tells of which gates something is published and has no fate yet, since it was asked after the
// collections were read.
func (a *Audit) Compare(gates map[Gate]count, held map[Gate]int, busy func(Gate) bool) (mended int) {
	now := map[Gate]suspect{}
	note := func(id Gate, was count, held int) {
		if was.n != held && busy(id) {
			return
		}
		if s := (suspect{was, held}); was.n != held {
			if a.last[id] == s && a.d.mend(id, was, held) {
				mended++
				return
			}
			now[id] = s
		}
	}
	for id, n := range gates {
		note(id, n, held[id])
	}
	for id, n := range held {
		if _, known := gates[id]; !known {
			note(id, count{}, n)
		}
	}
	a.last = now
	return mended
}

// mend sets a gate that has not moved since it was looked at.
func (d *Dispatcher) mend(id Gate, was count, held int) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.exceptions) > 0 || d.writing {
		return false
	}
	g := d.gates
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.wide || g.keys[id] != was {
		return false
	}
	g.change(id, held-was.n)
	return true
}
