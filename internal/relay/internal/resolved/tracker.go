// Package resolved finds the highest position of the stream below which every event is
// resolved, and from it the offsets at which a successor starts its read-back.
//
// Order: tickets are numbered in the order of Begin. They may resolve in any order.
//
// Blocking: none. Every call holds one mutex for a time that does not depend on the backlog,
// except Snapshot, which walks the records that were acked since its last call.
//
// Cost: no allocation per event. Memory is 18 bytes for each ticket above the resolved position, and
// eight more for each record acked above it.
//
// Not promised: a position for each event. Between two positions the resolved position waits.
package resolved

import (
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
)

const (
	initialRing = 1 << 12
	maxMarks    = 1 << 11
	// pruneRuns bounds the runs of a partition if Snapshot is not called.
	pruneRuns = 64
)

// mark means that position is reached once every ticket below upTo is resolved.
type mark[P any] struct {
	upTo     record.Ticket
	position P
}

// Tracker tracks the events of one term of ownership. P is the position that a checkpoint stores.
type Tracker[P any] struct {
	recycle func([]record.Ticket)

	mu          sync.Mutex
	low, next   record.Ticket // low: first unresolved; next: next to be assigned
	targetsLeft []uint16      // ring: targets of a ticket that are not resolved yet
	commitTimes []int64       // ring: commit time in Unix milliseconds
	events      []uint64      // ring: number of the event
	marks       []mark[P]     // ascending upTo, at most maxMarks

	// Every ticket below reachedBelow is at or before reached. The tickets from reachedBelow to
	// low are resolved, but after it.
	reached      P
	reachedBelow record.Ticket
	hasReached   bool

	partitions     map[record.TopicPartition]*partitionOffsets
	storedOffsets  map[string][]int64         // cache of storedOffsetsLocked; nil after a change
	nextSide       record.Ticket              // next delivery outside of the stream's order
	unsettledSides map[record.Ticket]struct{} // deliveries that are not settled
}

// New returns an empty tracker. If recycle is not nil, it receives the ticket slices that Acked
// took over. It is called under the tracker's lock.
func New[P any](recycle func([]record.Ticket)) *Tracker[P] {
	if recycle == nil {
		recycle = func([]record.Ticket) {}
	}
	return &Tracker[P]{
		recycle:        recycle,
		targetsLeft:    make([]uint16, initialRing),
		commitTimes:    make([]int64, initialRing),
		events:         make([]uint64, initialRing),
		partitions:     map[record.TopicPartition]*partitionOffsets{},
		unsettledSides: map[record.Ticket]struct{}{},
	}
}

// Begin assigns the next ticket to an event. The event is resolved when Resolve and Acked have
// resolved as many targets; without targets, at once. commitMS is its commit time in Unix
// milliseconds, and event a number that identifies it for [Tracker.EventOf].
func (t *Tracker[P]) Begin(commitMS int64, targets int, event uint64) record.Ticket {
	t.mu.Lock()
	defer t.mu.Unlock()
	if int(t.next-t.low) == len(t.targetsLeft) {
		t.growRingLocked()
	}

	ticket := t.next
	i := int(ticket) & (len(t.targetsLeft) - 1)
	t.targetsLeft[i] = uint16(targets)
	t.commitTimes[i] = commitMS
	t.events[i] = event
	t.next++

	// An earlier ticket that is not resolved would stop the resolved position anyway.
	if targets == 0 && ticket == t.low {
		t.advanceLocked()
	}
	return ticket
}

// growRingLocked doubles the rings.
func (t *Tracker[P]) growRingLocked() {
	n := len(t.targetsLeft)
	targetsLeft := make([]uint16, 2*n)
	commitTimes := make([]int64, 2*n)
	events := make([]uint64, 2*n)
	for k := t.low; k < t.next; k++ {
		from, to := int(k)&(n-1), int(k)&(2*n-1)
		targetsLeft[to] = t.targetsLeft[from]
		commitTimes[to] = t.commitTimes[from]
		events[to] = t.events[from]
	}
	t.targetsLeft, t.commitTimes, t.events = targetsLeft, commitTimes, events
}

// EventOf returns the number of the event of an unresolved ticket.
func (t *Tracker[P]) EventOf(ticket record.Ticket) uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.events[int(ticket)&(len(t.events)-1)]
}

// Position marks dst as reached when all tickets assigned so far are resolved. dst belongs to the
// tracker after the call. If more than 2,048 positions wait, dst replaces the newest of them, so
// that memory stays bounded.
func (t *Tracker[P]) Position(dst P) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.low == t.next {
		t.reached, t.reachedBelow, t.hasReached = dst, t.next, true
		t.storedOffsets = nil
		return
	}

	n := len(t.marks)
	if n > 0 && (t.marks[n-1].upTo == t.next || n == maxMarks) {
		t.marks[n-1] = mark[P]{t.next, dst}
		return
	}
	t.marks = append(t.marks, mark[P]{t.next, dst})
}

// Resolve resolves one target of a ticket whose outcome was recorded without a record in Kafka.
func (t *Tracker[P]) Resolve(ticket record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resolveTargetLocked(ticket)
	t.advanceLocked()
}

// Acked resolves one target of each ticket: tickets[i] is at offset base+i of tp. The slice
// belongs to the tracker after the call. For a ticket of BeginSide, only the offset is kept.
func (t *Tracker[P]) Acked(tp record.TopicPartition, base int64, tickets []record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range tickets {
		if !k.IsSide() {
			t.resolveTargetLocked(k)
		}
	}
	offsets := t.partitionToChangeLocked(tp)
	offsets.appendAcked(base, tickets)

	// The resolved position advances first, so that the runs that it has passed can be removed.
	t.advanceLocked()
	if len(offsets.runs) > pruneRuns {
		t.pruneLocked(offsets)
	}
}

// resolveTargetLocked resolves one target of ticket. It panics if ticket has none left.
func (t *Tracker[P]) resolveTargetLocked(ticket record.Ticket) {
	if ticket < t.low || ticket >= t.next {
		panic("resolved: a ticket was resolved twice or never assigned")
	}

	i := int(ticket) & (len(t.targetsLeft) - 1)
	if t.targetsLeft[i] == 0 {
		panic("resolved: a ticket was resolved more often than it has targets")
	}
	t.targetsLeft[i]--
}

// advanceLocked moves low to the first unresolved ticket, and reached to the last position
// before it.
func (t *Tracker[P]) advanceLocked() {
	mask := len(t.targetsLeft) - 1
	for t.low < t.next && t.targetsLeft[int(t.low)&mask] == 0 {
		t.low++
	}

	n := 0
	for n < len(t.marks) && t.marks[n].upTo <= t.low {
		t.reached, t.reachedBelow, t.hasReached = t.marks[n].position, t.marks[n].upTo, true
		n++
	}
	if n == 0 {
		return
	}

	// The marks move to the front, so that the slice keeps its capacity.
	rest := copy(t.marks, t.marks[n:])
	clear(t.marks[rest:])
	t.marks = t.marks[:rest]
	t.storedOffsets = nil
}

// Window returns the first event that is not resolved, and the next one to begin.
func (t *Tracker[P]) Window() (low, next record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.low, t.next
}

// Reached returns the resolved position: every event up to it is acked by Kafka, stored as a
// waiting envelope, or deleted by an operator. The result is false until the first position is reached.
func (t *Tracker[P]) Reached() (P, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reached, t.hasReached
}

// Snapshot returns the resolved position and the stored offsets that belong to it, at one moment. Calls
// share the offsets as long as nothing changes, so the caller must not modify them.
func (t *Tracker[P]) Snapshot() (P, bool, map[string][]int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reached, t.hasReached, t.storedOffsetsLocked()
}

// Unresolved returns the number of tickets above the resolved position.
func (t *Tracker[P]) Unresolved() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int(t.next - t.low)
}

// OldestCommitMS returns the commit time, in Unix milliseconds, of the oldest unresolved event.
// The result is false if there is none.
func (t *Tracker[P]) OldestCommitMS() (int64, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.low == t.next {
		return 0, false
	}
	return t.commitTimes[int(t.low)&(len(t.commitTimes)-1)], true
}

// AppendCommitMS appends the commit times of unresolved tickets to dst. It leaves out tickets of
// BeginSide, which have none.
func (t *Tracker[P]) AppendCommitMS(dst []int64, tickets []record.Ticket) []int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	mask := len(t.commitTimes) - 1
	for _, k := range tickets {
		if !k.IsSide() {
			dst = append(dst, t.commitTimes[int(k)&mask])
		}
	}
	return dst
}
