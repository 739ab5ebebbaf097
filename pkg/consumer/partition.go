package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/service/transport"
)

const (
	// fetchBytes is the most bytes that one fetch requests.
	fetchBytes = 1 << 20
	// maxUnwatched is how long a partition may be without a fetch before the id of its topic is checked. Nobody deletes,
	// creates and fills a topic in a shorter time.
	maxUnwatched = time.Second
)

// entry is one fetched record. The entry stays until all earlier entries of the partition are
// finished. Its body stays only until the entry itself is finished.
type entry struct {
	offset     int64
	lane       int32
	shares     []share
	openShares int // shares that are not done

	rec       transport.Record
	m         *Message // nil while the body is not in memory
	decodeErr error    // of a record that cannot be decoded
	givenUp   *verdict // on that record
	size      int
	writtenAt int64 // Unix milliseconds

	orphan atomic.Bool // the topic was recreated, or the record was removed by an unclean election, since it was read
}

// share is one handler's share of an entry.
type share struct {
	reg      *registration
	state    shareState
	attempts failures

	generation int64 // of the topic in the inbox at the last attempt
}

// hasShareLocked reports whether some share of e is in the given state. The partition's lock guards
// only the states: the other fields of a share belong to its track.
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

// partition is one partition of this member. It fetches records, queues them for its tracks, and
// keeps the offset up to which everything is finished.
type partition struct {
	s  *session
	tp transport.TopicPartition
	tenure
	position

	mu          sync.Mutex
	entries     []*entry // by offset; the first is not finished
	nextFetch   int64
	fetchedTo   int64 // every offset below was fetched or is a hole
	epochRead   int32 // the highest leader epoch of the records below fetchedTo, or -1
	held        heldCount
	measured    heldCount // of held, what countHeld has got
	refetch     bool      // an entry below nextFetch has to be fetched again
	closed      bool      // no track starts another task
	forgotten   bool      // the partition is no longer counted
	isStray     bool      // no member reads the partition: only its messages that are set aside are handled
	tracks      map[trackKey]*track
	attached    map[string]*attachment
	lagMeasured time.Time // when the lag was last reported
	logEnd      int64     // at that time
	gauges      gauges
	progressAt  time.Time // when a message was finished, or the first one after none was read

	fetchEnded chan struct{} // closed when fetchLoop has ended
	wake       chan struct{} // there is room, or a record to fetch again
	trackGroup sync.WaitGroup
	stopped    atomic.Bool // all tracks have ended after stopStarting
	isDoubtful atomic.Bool // a handler has found another topic: its id has to be checked before the next fetch
}

// tenure is how long this member has a partition.
type tenure struct {
	serveCtx context.Context // ends when the partition has to be given back
	endServe context.CancelFunc
	drainCtx context.Context // ends when the time to drain is over
	abandon  context.CancelCauseFunc
}

// trackKey is a lane and the name of a handler. A handler that is registered again under the same
// name has the same place in the inbox. So the started messages of the old registration are
// finished before messages of the new registration begin.
type trackKey struct {
	lane    int32
	handler string
}

func newPartition(session *session, tp transport.TopicPartition) *partition {
	partition := &partition{
		s: session, tp: tp,
		tracks: map[trackKey]*track{}, attached: map[string]*attachment{}, wake: make(chan struct{}, 1),
		fetchEnded: make(chan struct{}), epochRead: -1,
	}
	partition.serveCtx, partition.endServe = context.WithCancel(session.serveCtx)
	partition.drainCtx, partition.abandon = context.WithCancelCause(session.drainCtx)
	return partition
}

// fetchLoop fetches records until the partition has to be given back. It blocks while the consumer is paused,
// while the database is away, and while the partition has no room.
func (p *partition) fetchLoop() {
	defer close(p.fetchEnded)
	ctx := p.serveCtx
	backoff := retry.Reopen.Start()
	watched := time.Time{} // when a fetch last succeeded; zero if the last one failed

	for err := p.locateStart(ctx); err != nil; err = p.locateStart(ctx) {
		if ctx.Err() != nil {
			return
		}
		p.reportTrouble("cannot find the position of the group; the partition waits", err)
		_ = backoff.Wait(ctx)
	}

	for ctx.Err() == nil {
		if p.s.c.gate.isPaused() {
			// No record is held in memory for the time of the pause: they are fetched again after it.
			p.dropUnstarted()
			if p.s.c.gate.waitOpen(ctx) != nil {
				return
			}
			watched = time.Time{}
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

		// A broker ends a fetch when the topic is deleted. Between two fetches, a broker before Kafka 3.1 does not show that.
		if time.Since(watched) > maxUnwatched || p.isDoubtful.Load() {
			restarted, err := p.restartIfRecreated(ctx)
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				p.reportTrouble("cannot read the topic; the partition waits", fmt.Errorf("reading the topic of partition %s: %w", p.tp, err))
				_ = backoff.Wait(ctx)
			}
			if restarted || err != nil {
				continue
			}
		}

		fetched, err := p.s.g.Fetch(ctx, p.tp, transport.FetchFrom{Offset: from, TopicID: p.topicID}, min(fetchBytes, p.s.c.s.bufferBytes))
		watched = time.Time{}
		var gap *transport.RangeError
		switch {
		case err == nil:
			watched = time.Now()
			backoff.Reset()
			if replaced, found := p.findReplaced(fetched); found {
				p.skipGap(ctx, replaced)
				continue
			}
			p.acceptFetched(from, fetched)

			// Only a fetch that moved on proves that the topic has these offsets.
			p.idProved = p.idProved || fetched.Next > from

		case ctx.Err() != nil:
			return

		case errors.As(err, &gap):
			p.skipGap(ctx, gap)

		default:
			p.reportTrouble("cannot fetch; the partition waits", fmt.Errorf("fetching partition %s: %w", p.tp, err))
			_ = backoff.Wait(ctx)
		}
	}
}

// pauseChanged returns a channel that is closed when the consumer is paused or resumed.
func (p *partition) pauseChanged() <-chan struct{} {
	_, changed := p.s.c.gate.currentState()
	return changed
}

// finishLostLocked finishes the entries in [first, end) that had to be fetched again and are no
// longer in the log. Compaction or retention removed them while they were not in memory.
func (p *partition) finishLostLocked(first, end int64) {
	for _, e := range p.entries {
		if e.offset < first || e.offset >= end {
			continue
		}

		// Another handler still keeps the body in memory.
		if e.m != nil {
			p.enqueueLocked(e)
			continue
		}

		for i := range e.shares {
			sh := &e.shares[i]
			if sh.state != shareWaiting {
				continue
			}
			sh.state = shareDone
			e.openShares--
		}
	}
}

// isIdleLocked reports whether no share of entry is queued or started.
func (p *partition) isIdleLocked(entry *entry) bool {
	return !entry.hasShareLocked(shareStarted) && !entry.hasShareLocked(shareQueued)
}

// nextOffset returns the offset to fetch from. It returns false if the partition has no room.
func (p *partition) nextOffset() (offset int64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()

	if p.refetch {
		// The first entry without a body is the first one to fetch again.
		p.refetch = false
		p.nextFetch = p.fetchedTo
		for _, e := range p.entries {
			if e.hasShareLocked(shareWaiting) {
				p.nextFetch = e.offset
				break
			}
		}
	}

	settings := &p.s.c.s
	room := p.held.messages < settings.bufferRecords && p.held.bytes < settings.bufferBytes

	// An entry that is fetched again was counted the first time.
	if p.nextFetch >= p.fetchedTo {
		room = room && len(p.entries) < settings.maxAhead
	}
	return p.nextFetch, room
}

// acceptFetched adds the records of a fetch that began at from, and queues them for their handlers.
// It ignores the fetch if the partition was closed, rewound or paused in the meantime. The records
// are then fetched again. It blocks while a decoder cannot reach what it needs.
func (p *partition) acceptFetched(from int64, fetched transport.Fetched) {
	list := make([]*entry, 0, len(fetched.Records))
	for i := range fetched.Records {
		record := &fetched.Records[i]
		// A transport may return a batch whole, which begins before the offset.
		if record.Offset < from {
			continue
		}
		entry := p.newEntry(record)
		if entry == nil {
			return
		}
		list = append(list, entry)
	}

	var passed []*Message
	var lag int64
	accepted := false
	p.update(func() {
		if p.closed || p.refetch || p.s.c.gate.isPaused() {
			return
		}

		for _, e := range list {
			p.epochRead = max(p.epochRead, e.rec.LeaderEpoch)
			if message := p.addEntryLocked(e); message != nil {
				passed = append(passed, message)
			}
		}
		// A response may be empty although the log has moved on, for example after compaction.
		p.nextFetch = max(fetched.Next, from)
		p.fetchedTo = max(p.fetchedTo, p.nextFetch)

		p.finishLostLocked(from, p.nextFetch)
		p.s.countFinished(p.trimLocked())
		lag, accepted = p.setLogEndLocked(fetched.End), true
	})

	for _, m := range passed {
		p.s.c.reg.notifyWatches(m)
	}
	if accepted {
		p.measureLag(lag)
	}
}

// addEntryLocked adds an entry that is new, or gives its body back to one that was fetched again. It returns the message if no
// handler takes it.
func (p *partition) addEntryLocked(entry *entry) (passed *Message) {
	i := sort.Search(len(p.entries), func(i int) bool { return p.entries[i].offset >= entry.offset })
	if i < len(p.entries) {
		if old := p.entries[i]; old.offset == entry.offset && old.openShares > 0 {
			p.restoreBodyLocked(old, entry)
			p.enqueueLocked(old)
		}
		return nil
	}

	// The entry is finished already.
	if entry.offset < p.fetchedTo {
		return nil
	}

	// An idle partition makes no progress, so the time begins with its first entry.
	if len(p.entries) == 0 {
		p.progressAt = time.Now()
	}
	p.entries = append(p.entries, entry)
	// No handler takes the message, so it is finished.
	if entry.openShares == 0 {
		passed = entry.m
		entry.rec, entry.m = transport.Record{}, nil
		return passed
	}

	p.held.messages++
	p.held.bytes += entry.size
	p.enqueueLocked(entry)
	return nil
}

// restoreBodyLocked gives old the body of fetched, which is the same record. It does nothing if old
// still has its body.
func (p *partition) restoreBodyLocked(old, fetched *entry) {
	if old.m != nil {
		return
	}
	old.rec, old.m = fetched.rec, fetched.m

	// A record that could not be decoded the first time keeps that error.
	if old.shares[0].reg != p.s.c.poison || fetched.decodeErr != nil {
		old.decodeErr, old.givenUp = fetched.decodeErr, fetched.givenUp
	}

	p.held.messages++
	p.held.bytes += old.size
}

// enqueueLocked queues the waiting shares of entry on their tracks, and starts tracks that do not run.
func (p *partition) enqueueLocked(entry *entry) {
	for i := range entry.shares {
		sh := &entry.shares[i]
		if sh.state != shareWaiting {
			continue
		}
		sh.state = shareQueued

		key := trackKey{entry.lane, sh.reg.name}
		existing := p.tracks[key]
		if existing == nil {
			existing = &track{p: p, key: key, lane: entry.lane}
			p.tracks[key] = existing
		}

		existing.queue = append(existing.queue, task{entry, sh})
		if !existing.running {
			existing.running = true
			p.trackGroup.Go(existing.handleQueue)
		}
	}
}

// finishTasks marks tasks as done, frees their bodies and wakes the fetch loop.
func (p *partition) finishTasks(list []task) {
	var finished []*Message
	trimmed := 0
	p.update(func() {
		for _, x := range list {
			x.share.state = shareDone
			if x.entry.openShares--; x.entry.openShares == 0 {
				finished = append(finished, x.entry.m)
			}
			p.dropBodyLocked(x.entry)
		}
		p.progressAt = time.Now()
		trimmed = p.trimLocked()
		p.wakeReader()
	})

	// A watch runs a condition of the user, so it is called without the lock.
	for _, m := range finished {
		p.s.c.reg.notifyWatches(m)
	}
	p.s.countFinished(trimmed)
}

// trimLocked removes the finished entries at the front and returns their number.
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

// finishedToLocked returns the offset below which everything is finished.
//
// N29: "contiguous" refers to the fetched records, not to their offsets. Transaction markers and
// compaction leave holes.
func (p *partition) finishedToLocked() int64 {
	if len(p.entries) > 0 {
		return p.entries[0].offset
	}
	return p.fetchedTo
}

// wakeReader wakes the fetch loop. It does not block.
func (p *partition) wakeReader() {
	retry.Signal(p.wake)
}

// goWorker runs callback in the group of the tracks. It returns false if the partition is closed.
func (p *partition) goWorker(callback func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.trackGroup.Go(callback)
	return true
}

// stopStarting drops the queued tasks. No track starts another task after it.
func (p *partition) stopStarting() {
	p.mu.Lock()
	defer p.mu.Unlock()

	p.closed = true
	for _, t := range p.tracks {
		t.queue = nil
	}
}
