package consumer

import (
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/retry"
)

// fetchBytes is what one fetch asks for at most.
const fetchBytes = 1 << 20

// entry is one record that was fetched. It stays until everything before it is finished, its body only until it is.
type entry struct {
	offset int64
	lane   int32
	parts  []part
	open   int // parts that are not done

	rec   Record
	m     *Message // nil while the body is not in memory
	cause error    // of a record that cannot be decoded
	size  int
	time  int64 // when the record was written, in Unix milliseconds

	orphan atomic.Bool // its topic was created anew
}

// part is one handler's share of an entry.
type part struct {
	reg   *registration
	state partState
	at    Attempts
}

// any reports whether some part is in that state. The partition's lock is held; the rest of a part is its track's.
func (e *entry) any(state partState) bool {
	for i := range e.parts {
		if e.parts[i].state == state {
			return true
		}
	}
	return false
}

type partState uint8

const (
	waiting partState = iota // not in memory, or about to be queued
	queued
	started
	done
)

// partition is one partition of this member: it reads, hands out to its tracks, and knows up to where all is finished.
type partition struct {
	s  *session
	tp TopicPartition

	mu        sync.Mutex
	entries   []*entry // by offset; the first is not finished
	orphans   []*entry // that were abandoned while they were being handled
	next      int64    // to be fetched
	fetched   int64    // everything below was fetched or is a hole
	committed int64
	bodies    int
	bytes     int
	rewind    bool // something below next is to be fetched again
	closed    bool // nothing begins any more
	gone      bool // and nothing is counted
	tracks    map[trackKey]*track
	attached  map[string]*attachment
	id        *string   // of the topic that the offsets are of, nil while that is unknown; only read uses it
	measured  time.Time // when its lag was told

	wake     chan struct{} // there is room, or something to fetch again
	tracking sync.WaitGroup
	still    atomic.Bool // all tracks have ended, after close
}

// trackKey is a lane and the name of a handler. What was registered under a name before, and is taken back, has the same
// place in the inbox: its messages that began are finished before those of the next registration begin.
type trackKey struct {
	lane    int32
	handler string
}

func newPartition(s *session, a Assignment) *partition {
	return &partition{
		s: s, tp: a.TopicPartition, next: a.Offset, fetched: a.Offset, committed: a.Offset,
		tracks: map[trackKey]*track{}, attached: map[string]*attachment{}, wake: make(chan struct{}, 1),
	}
}

// read fetches until the generation ends.
func (p *partition) read() {
	ctx := p.s.soft
	b := retry.Reopen.Start()
	for ctx.Err() == nil {
		if p.s.c.gate.paused() {
			p.drop()
			if p.s.c.gate.wait(ctx) != nil {
				return
			}
		}
		if p.s.away.wait(ctx) != nil {
			return
		}
		from, ok := p.position()
		if !ok {
			select {
			case <-p.wake:
			case <-p.pauses():
			case <-ctx.Done():
			}
			continue
		}
		f, err := p.s.g.Fetch(ctx, p.tp, from, min(fetchBytes, p.s.c.s.bytes))
		var gap *RangeError
		switch {
		case err == nil:
			b.Reset()
			p.take(from, f)
			if p.id == nil && f.Next > from { // the offsets are of this topic: it has them
				p.identify(ctx)
			}
		case ctx.Err() != nil:
			return
		case errors.As(err, &gap):
			p.jump(ctx, gap)
		default:
			p.s.report(fmt.Errorf("fetching partition %s: %w", p.tp, err))
			_ = b.Wait(ctx)
		}
	}
}

// pauses tells of the next change of the gate.
func (p *partition) pauses() <-chan struct{} {
	_, _, changed := p.s.c.gate.state()
	return changed
}

// lost finishes what was to be fetched again, from one offset up to another, and is no longer in the log: compaction or
// retention removed it while it was not in memory. The lock is held.
func (p *partition) lost(from, to int64) {
	for _, e := range p.entries {
		if e.offset < from || e.offset >= to {
			continue
		}
		if e.m != nil {
			p.enqueue(e) // another handler has it still
			continue
		}
		for i := range e.parts {
			x := &e.parts[i]
			if x.state != waiting {
				continue
			}
			if x.reg.once {
				x.reg.fired.Store(false)
			}
			x.state = done
			e.open--
		}
	}
}

// idle reports whether nothing of the entry is being handled. The lock is held.
func (p *partition) idle(e *entry) bool {
	return !e.any(started) && !e.any(queued)
}

// position is the offset to fetch from, or false if there is no room.
func (p *partition) position() (int64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rewind {
		p.rewind = false
		p.next = p.fetched
		for _, e := range p.entries {
			if e.any(waiting) {
				p.next = e.offset
				break
			}
		}
	}
	s := &p.s.c.s
	room := p.bodies < s.records && p.bytes < s.bytes
	if p.next >= p.fetched { // what is fetched again was counted already
		room = room && len(p.entries) < s.ahead
	}
	return p.next, room
}

// take hands out what a fetch brought.
func (p *partition) take(from int64, f Fetched) {
	list := make([]*entry, 0, len(f.Records))
	for i := range f.Records {
		if r := &f.Records[i]; r.Offset >= from {
			list = append(list, p.newEntry(r))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.rewind || p.s.c.gate.paused() {
		for _, e := range list {
			p.unfire(e)
		}
		return // it is fetched again
	}
	messages, bytes := p.bodies, p.bytes
	for _, e := range list {
		p.add(e)
	}
	p.next = max(f.Next, from)
	p.fetched = max(p.fetched, p.next)
	p.lost(from, p.next)
	p.s.passed(p.trim())
	p.s.countHeld(int64(p.bodies-messages), int64(p.bytes-bytes))
	p.behind(f.End)
}

// behind tells the lag. The lock is held.
func (p *partition) behind(end int64) {
	p.measured = time.Now()
	p.s.c.s.observer.Lag(p.tp.Topic, p.tp.Partition, max(0, end-p.floor()))
}

// gaugeInterval is how often partitions are measured beside their fetches.
const gaugeInterval = 3 * time.Second

// gauge tells how old the oldest unfinished message of each partition is, and the lag of those that are not fetched: of a
// partition that stands still nobody would learn otherwise that it falls behind.
func (s *session) gauge() {
	for retry.Sleep(s.soft, gaugeInterval) == nil {
		for tp, p := range s.parts {
			p.mu.Lock()
			age := time.Duration(0)
			if len(p.entries) > 0 {
				age = max(0, time.Since(time.UnixMilli(p.entries[0].time)))
			}
			stale := time.Since(p.measured) > gaugeInterval
			p.mu.Unlock()

			s.c.s.observer.Oldest(tp.Topic, tp.Partition, age)
			if !stale {
				continue
			}
			if log, err := s.g.Log(s.soft, tp); err == nil && log.End >= 0 {
				p.mu.Lock()
				p.behind(log.End)
				p.mu.Unlock()
			}
		}
	}
}

// unfire lets a handler for one message alone have another one.
func (p *partition) unfire(e *entry) {
	for i := range e.parts {
		if r := e.parts[i].reg; r.once && e.parts[i].state != done {
			r.fired.Store(false)
		}
	}
}

// add takes in one entry, new or fetched again. The lock is held.
func (p *partition) add(e *entry) {
	if i := sort.Search(len(p.entries), func(i int) bool { return p.entries[i].offset >= e.offset }); i < len(p.entries) {
		if p.entries[i].offset == e.offset && p.entries[i].open > 0 {
			p.unfire(e)
			old := p.entries[i]
			if old.m == nil {
				old.rec, old.m = e.rec, e.m
				if old.parts[0].reg != p.s.c.poison || e.cause != nil { // what could not be decoded stays that
					old.cause = e.cause
				}
				p.bodies++
				p.bytes += old.size
			}
			p.enqueue(old)
		}
		return
	}
	if e.offset < p.fetched {
		p.unfire(e)
		return // finished before
	}
	p.entries = append(p.entries, e)
	if e.open == 0 {
		p.s.c.reg.finished(e.m)
		e.rec, e.m = Record{}, nil
		return
	}
	p.bodies++
	p.bytes += e.size
	p.enqueue(e)
}

// enqueue queues those parts that wait. The lock is held.
func (p *partition) enqueue(e *entry) {
	for i := range e.parts {
		x := &e.parts[i]
		if x.state != waiting {
			continue
		}
		x.state = queued
		k := trackKey{e.lane, x.reg.name}
		t := p.tracks[k]
		if t == nil {
			t = &track{p: p, key: k, lane: e.lane}
			p.tracks[k] = t
		}
		t.queue = append(t.queue, task{e, x})
		if !t.running {
			t.running = true
			p.tracking.Go(t.run)
		}
	}
}

// drop lets go of everything that was fetched and is not being handled.
func (p *partition) drop() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.tracks {
		for _, x := range t.queue {
			x.part.state = waiting
		}
		t.queue = nil
	}
	for _, e := range p.entries {
		p.shed(e)
	}
	p.rewind = true
}

// shed lets go of the body of an entry that is not being handled. The lock is held.
func (p *partition) shed(e *entry) {
	if p.gone || e.m == nil || !p.idle(e) {
		return
	}
	e.rec, e.m = Record{}, nil
	p.bodies--
	p.bytes -= e.size
	p.s.countHeld(-1, -int64(e.size))
}

// finish marks tasks as done.
func (p *partition) finish(list []task) {
	var through []*Message
	p.mu.Lock()
	for _, x := range list {
		x.part.state = done
		if x.part.reg.once {
			reg := x.part.reg
			defer p.s.c.reg.remove(func(r *registration) bool { return r == reg })
		}
		if x.entry.open--; x.entry.open == 0 {
			through = append(through, x.entry.m)
		}
		p.shed(x.entry)
	}
	passed := p.trim()
	p.signal()
	p.mu.Unlock()
	for _, m := range through {
		p.s.c.reg.finished(m)
	}
	p.s.passed(passed)
}

// trim forgets the finished entries at the front and says how many. The lock is held.
func (p *partition) trim() int {
	n := 0
	for n < len(p.entries) && p.entries[n].open == 0 {
		n++
	}
	if n > 0 {
		p.entries = slices.Delete(p.entries, 0, n)
	}
	return n
}

// floor is the offset up to which everything is finished. The lock is held.
//
// N29: contiguous is what was fetched, not the numbers: markers and compaction leave holes.
func (p *partition) floor() int64 {
	if len(p.entries) > 0 {
		return p.entries[0].offset
	}
	return p.fetched
}

func (p *partition) committable() (at int64, news bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at = p.floor()
	return at, at != p.committed
}

func (p *partition) commit(at int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.committed = at
}

func (p *partition) signal() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// close drops what did not begin; nothing begins any more.
func (p *partition) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, t := range p.tracks {
		t.queue = nil
	}
}

// forget takes what is left out of the counts.
func (p *partition) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.entries {
		p.unfire(e)
	}
	p.s.countHeld(-int64(p.bodies), -int64(p.bytes))
	p.bodies, p.bytes, p.entries, p.gone = 0, 0, nil, true
}
