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
	shares  []share
	openShares   int // parts that are not done

	rec   Record
	m     *Message // nil while the body is not in memory
	decodeErr error    // of a record that cannot be decoded
	size  int
	writtenAt  int64 // when the record was written, in Unix milliseconds

	orphan atomic.Bool // its topic was created anew
}

// share is one handler's share of an entry.
type share struct {
	reg   *registration
	state shareState
	attempts    Attempts
}

// hasShareLocked reports whether some part is in that state. The partition's lock is held; the rest of a part is its track's.
func (e *entry) hasShareLocked(state shareState) bool {
	for i := range e.shares {
		if e.shares[i].state == state {
			return true
		}
	}
	return false
}

type shareState uint8

const (
	shareWaiting shareState = iota // not in memory, or about to be queued
	shareQueued
	shareStarted
	shareDone
)

// partition is one partition of this member: it reads, hands out to its tracks, and knows up to where all is finished.
type partition struct {
	s  *session
	tp TopicPartition

	mu        sync.Mutex
	entries   []*entry // by offset; the first is not finished
	orphans   []*entry // that were abandoned while they were being handled
	nextFetch      int64    // to be fetched
	fetchedTo   int64    // everything below was fetched or is a hole
	committed int64
	heldMessages    int
	heldBytes     int
	refetch    bool // something below next is to be fetched again
	closed    bool // nothing begins any more
	forgotten      bool // and nothing is counted
	tracks    map[trackKey]*track
	attached  map[string]*attachment
	topicID        *string   // of the topic that the offsets are of, nil while that is unknown; only read uses it
	lagMeasured  time.Time // when its lag was told

	wake     chan struct{} // there is room, or something to fetch again
	trackGroup sync.WaitGroup
	stopped    atomic.Bool // all tracks have ended, after close
}

// trackKey is a lane and the name of a handler. What was registered under a name before, and is taken back, has the same
// place in the inbox: its messages that began are finished before those of the next registration begin.
type trackKey struct {
	lane    int32
	handler string
}

func newPartition(s *session, a Assignment) *partition {
	return &partition{
		s: s, tp: a.TopicPartition, nextFetch: a.Offset, fetchedTo: a.Offset, committed: a.Offset,
		tracks: map[trackKey]*track{}, attached: map[string]*attachment{}, wake: make(chan struct{}, 1),
	}
}

// fetchLoop fetches until the generation ends.
func (p *partition) fetchLoop() {
	ctx := p.s.serveCtx
	b := retry.Reopen.Start()
	for ctx.Err() == nil {
		if p.s.c.gate.isPaused() {
			p.dropUnstarted()
			if p.s.c.gate.waitOpen(ctx) != nil {
				return
			}
		}
		if p.s.outage.waitOver(ctx) != nil {
			return
		}
		from, ok := p.nextOffset()
		if !ok {
			select {
			case <-p.wake:
			case <-p.pauseChanged():
			case <-ctx.Done():
			}
			continue
		}
		f, err := p.s.g.Fetch(ctx, p.tp, from, min(fetchBytes, p.s.c.s.bufferBytes))
		var gap *RangeError
		switch {
		case err == nil:
			b.Reset()
			p.acceptFetched(from, f)
			if p.topicID == nil && f.Next > from { // the offsets are of this topic: it has them
				p.recordTopicID(ctx)
			}
		case ctx.Err() != nil:
			return
		case errors.As(err, &gap):
			p.skipGap(ctx, gap)
		default:
			p.s.report(fmt.Errorf("fetching partition %s: %w", p.tp, err))
			_ = b.Wait(ctx)
		}
	}
}

// pauseChanged tells of the next change of the gate.
func (p *partition) pauseChanged() <-chan struct{} {
	_, _, changed := p.s.c.gate.currentState()
	return changed
}

// finishLostLocked finishes what was to be fetched again, from one offset up to another, and is no longer in the log: compaction or
// retention removed it while it was not in memory. The lock is held.
func (p *partition) finishLostLocked(from, to int64) {
	for _, e := range p.entries {
		if e.offset < from || e.offset >= to {
			continue
		}
		if e.m != nil {
			p.enqueueLocked(e) // another handler has it still
			continue
		}
		for i := range e.shares {
			x := &e.shares[i]
			if x.state != shareWaiting {
				continue
			}
			if x.reg.once {
				x.reg.fired.Store(false)
			}
			x.state = shareDone
			e.openShares--
		}
	}
}

// isIdleLocked reports whether nothing of the entry is being handled. The lock is held.
func (p *partition) isIdleLocked(e *entry) bool {
	return !e.hasShareLocked(shareStarted) && !e.hasShareLocked(shareQueued)
}

// nextOffset is the offset to fetch from, or false if there is no room.
func (p *partition) nextOffset() (int64, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refetch {
		p.refetch = false
		p.nextFetch = p.fetchedTo
		for _, e := range p.entries {
			if e.hasShareLocked(shareWaiting) {
				p.nextFetch = e.offset
				break
			}
		}
	}
	s := &p.s.c.s
	room := p.heldMessages < s.bufferRecords && p.heldBytes < s.bufferBytes
	if p.nextFetch >= p.fetchedTo { // what is fetched again was counted already
		room = room && len(p.entries) < s.maxAhead
	}
	return p.nextFetch, room
}

// acceptFetched hands out what a fetch brought.
func (p *partition) acceptFetched(from int64, f Fetched) {
	list := make([]*entry, 0, len(f.Records))
	for i := range f.Records {
		if r := &f.Records[i]; r.Offset >= from {
			list = append(list, p.newEntry(r))
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || p.refetch || p.s.c.gate.isPaused() {
		for _, e := range list {
			p.rearmOnce(e)
		}
		return // it is fetched again
	}
	messages, bytes := p.heldMessages, p.heldBytes
	for _, e := range list {
		p.addEntryLocked(e)
	}
	p.nextFetch = max(f.Next, from)
	p.fetchedTo = max(p.fetchedTo, p.nextFetch)
	p.finishLostLocked(from, p.nextFetch)
	p.s.countFinished(p.trimLocked())
	p.s.countHeld(int64(p.heldMessages-messages), int64(p.heldBytes-bytes))
	p.reportLagLocked(f.End)
}

// reportLagLocked tells the lag. The lock is held.
func (p *partition) reportLagLocked(end int64) {
	p.lagMeasured = time.Now()
	p.s.c.s.observer.Lag(p.tp.Topic, p.tp.Partition, max(0, end-p.finishedToLocked()))
}

// gaugeInterval is how often partitions are measured beside their fetches.
const gaugeInterval = 3 * time.Second

// reportGauges tells how old the oldest unfinished message of each partition is, and the lag of those that are not fetched: of a
// partition that stands still nobody would learn otherwise that it falls behind.
func (s *session) reportGauges() {
	for retry.Sleep(s.serveCtx, gaugeInterval) == nil {
		for tp, p := range s.partitions {
			p.mu.Lock()
			age := time.Duration(0)
			if len(p.entries) > 0 {
				age = max(0, time.Since(time.UnixMilli(p.entries[0].writtenAt)))
			}
			stale := time.Since(p.lagMeasured) > gaugeInterval
			p.mu.Unlock()

			s.c.s.observer.Oldest(tp.Topic, tp.Partition, age)
			if !stale {
				continue
			}
			if log, err := s.g.Log(s.serveCtx, tp); err == nil && log.End >= 0 {
				p.mu.Lock()
				p.reportLagLocked(log.End)
				p.mu.Unlock()
			}
		}
	}
}

// rearmOnce lets a handler for one message alone have another one.
func (p *partition) rearmOnce(e *entry) {
	for i := range e.shares {
		if r := e.shares[i].reg; r.once && e.shares[i].state != shareDone {
			r.fired.Store(false)
		}
	}
}

// addEntryLocked takes in one entry, new or fetched again. The lock is held.
func (p *partition) addEntryLocked(e *entry) {
	if i := sort.Search(len(p.entries), func(i int) bool { return p.entries[i].offset >= e.offset }); i < len(p.entries) {
		if p.entries[i].offset == e.offset && p.entries[i].openShares > 0 {
			p.rearmOnce(e)
			old := p.entries[i]
			if old.m == nil {
				old.rec, old.m = e.rec, e.m
				if old.shares[0].reg != p.s.c.poison || e.decodeErr != nil { // what could not be decoded stays that
					old.decodeErr = e.decodeErr
				}
				p.heldMessages++
				p.heldBytes += old.size
			}
			p.enqueueLocked(old)
		}
		return
	}
	if e.offset < p.fetchedTo {
		p.rearmOnce(e)
		return // finished before
	}
	p.entries = append(p.entries, e)
	if e.openShares == 0 {
		p.s.c.reg.notifyWatches(e.m)
		e.rec, e.m = Record{}, nil
		return
	}
	p.heldMessages++
	p.heldBytes += e.size
	p.enqueueLocked(e)
}

// enqueueLocked queues those parts that wait. The lock is held.
func (p *partition) enqueueLocked(e *entry) {
	for i := range e.shares {
		x := &e.shares[i]
		if x.state != shareWaiting {
			continue
		}
		x.state = shareQueued
		k := trackKey{e.lane, x.reg.name}
		t := p.tracks[k]
		if t == nil {
			t = &track{p: p, key: k, lane: e.lane}
			p.tracks[k] = t
		}
		t.queue = append(t.queue, task{e, x})
		if !t.running {
			t.running = true
			p.trackGroup.Go(t.handleQueue)
		}
	}
}

// dropUnstarted lets go of everything that was fetched and is not being handled.
func (p *partition) dropUnstarted() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, t := range p.tracks {
		for _, x := range t.queue {
			x.share.state = shareWaiting
		}
		t.queue = nil
	}
	for _, e := range p.entries {
		p.dropBodyLocked(e)
	}
	p.refetch = true
}

// dropBodyLocked lets go of the body of an entry that is not being handled. The lock is held.
func (p *partition) dropBodyLocked(e *entry) {
	if p.forgotten || e.m == nil || !p.isIdleLocked(e) {
		return
	}
	e.rec, e.m = Record{}, nil
	p.heldMessages--
	p.heldBytes -= e.size
	p.s.countHeld(-1, -int64(e.size))
}

// finishTasks marks tasks as done.
func (p *partition) finishTasks(list []task) {
	var through []*Message
	p.mu.Lock()
	for _, x := range list {
		x.share.state = shareDone
		if x.share.reg.once {
			reg := x.share.reg
			defer p.s.c.reg.removeIf(func(r *registration) bool { return r == reg })
		}
		if x.entry.openShares--; x.entry.openShares == 0 {
			through = append(through, x.entry.m)
		}
		p.dropBodyLocked(x.entry)
	}
	passed := p.trimLocked()
	p.wakeReader()
	p.mu.Unlock()
	for _, m := range through {
		p.s.c.reg.notifyWatches(m)
	}
	p.s.countFinished(passed)
}

// trimLocked forgets the finished entries at the front and says how many. The lock is held.
func (p *partition) trimLocked() int {
	n := 0
	for n < len(p.entries) && p.entries[n].openShares == 0 {
		n++
	}
	if n > 0 {
		p.entries = slices.Delete(p.entries, 0, n)
	}
	return n
}

// finishedToLocked is the offset up to which everything is finished. The lock is held.
//
// N29: contiguous is what was fetched, not the numbers: markers and compaction leave holes.
func (p *partition) finishedToLocked() int64 {
	if len(p.entries) > 0 {
		return p.entries[0].offset
	}
	return p.fetchedTo
}

func (p *partition) uncommittedOffset() (at int64, news bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	at = p.finishedToLocked()
	return at, at != p.committed
}

func (p *partition) setCommitted(at int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.committed = at
}

func (p *partition) wakeReader() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// stopStarting drops what did not begin; nothing begins any more.
func (p *partition) stopStarting() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, t := range p.tracks {
		t.queue = nil
	}
}

// releaseBuffers takes what is left out of the counts.
func (p *partition) releaseBuffers() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.entries {
		p.rearmOnce(e)
	}
	p.s.countHeld(-int64(p.heldMessages), -int64(p.heldBytes))
	p.heldMessages, p.heldBytes, p.entries, p.forgotten = 0, 0, nil, true
}
