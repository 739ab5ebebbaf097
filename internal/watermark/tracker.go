// Package watermark finds the highest position of the stream below which every event is resolved, and from it the
// offsets at which a successor has to begin its read-back.
//
// Order: tickets are numbered in the order of Begin; they resolve in any order. Blocking: never; every call holds one
// mutex for a time that does not depend on the backlog, but for Offsets, which walks what was acked since it was last
// called. Cost: no allocation per event; nine bytes of memory for each ticket above the watermark, plus eight for each
// record acked above it. Not promised: that positions are kept for each event. Between two marks the watermark waits.
package watermark

import (
	"sync"

	"github.com/outrelay/outrelay/internal/record"
)

const (
	initialRing = 1 << 12
	maxMarks    = 1 << 11
	// pruneRuns bounds what a partition remembers when nobody asks for Offsets.
	pruneRuns = 64
)

// mark says that position p is reached once every ticket below upTo is resolved.
type mark[P any] struct {
	upTo     record.Ticket
	position P
}

// Tracker follows the events of one term of ownership. P is the position that a checkpoint stores.
type Tracker[P any] struct {
	recycle func([]record.Ticket)

	mu             sync.Mutex
	low, next      record.Ticket // low: first unresolved; next: next to be given out
	targetsLeft    []uint16      // ring: targets of a ticket that are not resolved yet
	commitTimes    []int64       // ring: commit time in Unix milliseconds
	marks          []mark[P]     // ascending upTo, at most maxMarks
	reached        P
	reachedBelow   record.Ticket // every ticket below stands at or before reached; those from there to low are resolved, but above it
	hasReached     bool
	partitions     map[record.TopicPartition]*partitionOffsets
	storedOffsets  map[string][]int64         // what offsets returned; nil after anything that may change it
	nextSide       record.Ticket              // next of the deliveries outside of the stream's order
	unsettledSides map[record.Ticket]struct{} // those that are not settled
}

// New makes an empty tracker. recycle, if not nil, gets the ticket slices back that Acked took over.
func New[P any](recycle func([]record.Ticket)) *Tracker[P] {
	if recycle == nil {
		recycle = func([]record.Ticket) {}
	}
	return &Tracker[P]{
		recycle:        recycle,
		targetsLeft:    make([]uint16, initialRing),
		commitTimes:    make([]int64, initialRing),
		partitions:     map[record.TopicPartition]*partitionOffsets{},
		unsettledSides: map[record.Ticket]struct{}{},
	}
}

// Begin gives the next event its ticket. The event is resolved after targets calls of Resolve or Acked; with no target at
// once. commitMS is its commit time in Unix milliseconds.
func (t *Tracker[P]) Begin(commitMS int64, targets int) record.Ticket {
	t.mu.Lock()
	defer t.mu.Unlock()
	if int(t.next-t.low) == len(t.targetsLeft) {
		t.growRingLocked()
	}
	k := t.next
	i := int(k) & (len(t.targetsLeft) - 1)
	t.targetsLeft[i], t.commitTimes[i] = uint16(targets), commitMS
	t.next++
	if targets == 0 && k == t.low {
		t.advanceLocked()
	}
	return k
}

func (t *Tracker[P]) growRingLocked() {
	n := len(t.targetsLeft)
	left, commit := make([]uint16, 2*n), make([]int64, 2*n)
	for k := t.low; k < t.next; k++ {
		from, to := int(k)&(n-1), int(k)&(2*n-1)
		left[to], commit[to] = t.targetsLeft[from], t.commitTimes[from]
	}
	t.targetsLeft, t.commitTimes = left, commit
}

// Position says that p is reached when all tickets given out so far are resolved. p belongs to the tracker from now on.
// When more than 2,048 positions wait, a newer one replaces the newest, so that memory stays bounded.
func (t *Tracker[P]) Position(p P) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.low == t.next {
		t.reached, t.reachedBelow, t.hasReached, t.storedOffsets = p, t.next, true, nil
		return
	}
	if n := len(t.marks); n > 0 && (t.marks[n-1].upTo == t.next || n == maxMarks) {
		t.marks[n-1] = mark[P]{t.next, p}
		return
	}
	t.marks = append(t.marks, mark[P]{t.next, p})
}

// Resolve takes one target off a ticket whose fate was recorded without a record in Kafka.
func (t *Tracker[P]) Resolve(k record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.resolveTargetLocked(k)
	t.advanceLocked()
}

// Acked takes one target off each ticket: tickets[i] stands at offset base+i of tp. The slice belongs to the tracker. A
// ticket of Side is only remembered for its offset.
func (t *Tracker[P]) Acked(tp record.TopicPartition, base int64, tickets []record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range tickets {
		if !k.IsSide() {
			t.resolveTargetLocked(k)
		}
	}
	t.partitionToChangeLocked(tp).appendAcked(base, tickets)
	t.advanceLocked()
	if o := t.partitions[tp]; len(o.runs) > pruneRuns {
		t.pruneLocked(o)
	}
}

func (t *Tracker[P]) resolveTargetLocked(k record.Ticket) {
	if k < t.low || k >= t.next {
		panic("watermark: a ticket was resolved twice or never given out")
	}
	i := int(k) & (len(t.targetsLeft) - 1)
	if t.targetsLeft[i] == 0 {
		panic("watermark: a ticket has more answers than targets")
	}
	t.targetsLeft[i]--
}

func (t *Tracker[P]) advanceLocked() {
	m := len(t.targetsLeft) - 1
	for t.low < t.next && t.targetsLeft[int(t.low)&m] == 0 {
		t.low++
	}
	n := 0
	for n < len(t.marks) && t.marks[n].upTo <= t.low {
		t.reached, t.reachedBelow, t.hasReached = t.marks[n].position, t.marks[n].upTo, true
		n++
	}
	if n > 0 {
		rest := copy(t.marks, t.marks[n:])
		clear(t.marks[rest:])
		t.marks = t.marks[:rest]
		t.storedOffsets = nil
	}
}

// Window is the first event that is not resolved, and the next one to begin.
func (t *Tracker[P]) Window() (low, next record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.low, t.next
}

// Reached is the watermark: everything up to it is acked by Kafka, recorded as an exception, or deleted by an operator.
// It is false until the first position is reached.
func (t *Tracker[P]) Reached() (P, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reached, t.hasReached
}

// Snapshot is the watermark and the stored offsets that belong to it, taken at one moment. The offsets are shared with later calls, as
// long as nothing changes: do not modify them.
func (t *Tracker[P]) Snapshot() (P, bool, map[string][]int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.reached, t.hasReached, t.storedOffsetsLocked()
}

// Unresolved is the number of tickets above the watermark.
func (t *Tracker[P]) Unresolved() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return int(t.next - t.low)
}

// OldestCommitMS is the commit time, in Unix milliseconds, of the oldest unresolved event; false if there is none.
func (t *Tracker[P]) OldestCommitMS() (int64, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.low == t.next {
		return 0, false
	}
	return t.commitTimes[int(t.low)&(len(t.commitTimes)-1)], true
}

// AppendCommitMS appends the commit times of unresolved tickets to dst, but for those of Side, which have none.
func (t *Tracker[P]) AppendCommitMS(dst []int64, tickets []record.Ticket) []int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	m := len(t.commitTimes) - 1
	for _, k := range tickets {
		if !k.IsSide() {
			dst = append(dst, t.commitTimes[int(k)&m])
		}
	}
	return dst
}
