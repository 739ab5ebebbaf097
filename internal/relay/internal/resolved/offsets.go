package resolved

import "github.com/outrelay/outrelay/internal/contract/record"

// partitionOffsets are N8: the stored offset of a partition is the offset of the first record of
// an event above the resolved position, acked or not, or of a delivery outside of the stream's order
// whose outcome is not recorded.
//
// The resolved position is the position that is stored with the offsets, not the first unresolved
// ticket. A successor reads all events after that position again, and has to find in the topic
// the records of them that were acked. Records reach a partition in order, so a record that is
// not acked is at or above next, and the acked records are in runs.
type partitionOffsets struct {
	next int64 // lower bound of the offsets of our records that are not acked yet
	runs []run // acked, at least one ticket may still be above the resolved position

	held bool  // HoldAllOffsets applies
	hold int64 // the upper bound of the stored offset while held
}

// run is one acked batch: tickets[i] is at offset base+i.
type run struct {
	base    int64
	tickets []record.Ticket
}

// appendAcked adds an acked batch.
func (o *partitionOffsets) appendAcked(base int64, tickets []record.Ticket) {
	o.next = max(o.next, base+int64(len(tickets)))
	o.runs = append(o.runs, run{base, tickets})
}

// pruneLocked removes the runs that the resolved position has passed, and returns the stored offset.
func (t *Tracker[P]) pruneLocked(offsets *partitionOffsets) int64 {
	first := offsets.next
	if offsets.held {
		first = min(first, offsets.hold)
	}

	kept := offsets.runs[:0]
	for _, r := range offsets.runs {
		i := 0
		for i < len(r.tickets) && t.passedLocked(r.tickets[i]) {
			i++
		}
		if i == len(r.tickets) {
			t.recycle(r.tickets)
			continue
		}

		// A read-back hit may be below an earlier run: the lowest offset decides, not the first.
		first = min(first, r.base+int64(i))
		kept = append(kept, r)
	}
	clear(offsets.runs[len(kept):])
	offsets.runs = kept
	return first
}

// passedLocked reports whether a successor can do without the record of ticket: the resolved position covers
// it, or its delivery was settled.
func (t *Tracker[P]) passedLocked(ticket record.Ticket) bool {
	if ticket.IsSide() {
		_, unsettled := t.unsettledSides[ticket]
		return !unsettled
	}
	return ticket < t.reachedBelow
}

// BeginSide returns a ticket for a delivery outside of the stream's order. The ticket never holds
// the resolved position, but its records hold the stored offsets of their partitions until Settle.
func (t *Tracker[P]) BeginSide() record.Ticket {
	t.mu.Lock()
	defer t.mu.Unlock()
	ticket := record.Side | t.nextSide
	t.nextSide++
	t.unsettledSides[ticket] = struct{}{}
	return ticket
}

// Settle marks deliveries outside of the stream's order as settled: their outcome is recorded.
func (t *Tracker[P]) Settle(tickets []record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range tickets {
		delete(t.unsettledSides, k)
	}
	t.storedOffsets = nil
}

// HoldAllOffsets keeps the stored offset of every partition at or below its present value until
// ReleaseAllOffsets.
func (t *Tracker[P]) HoldAllOffsets() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.storedOffsets = nil
	for _, o := range t.partitions {
		o.hold, o.held = t.pruneLocked(o), true
	}
}

// ReleaseAllOffsets ends HoldAllOffsets, if it was called.
func (t *Tracker[P]) ReleaseAllOffsets() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.storedOffsets = nil
	for _, o := range t.partitions {
		o.held = false
	}
}

// partitionToChangeLocked returns the partition tp, whose stored offset is about to change. It
// adds the partition if it is new, and discards the cached offsets.
func (t *Tracker[P]) partitionToChangeLocked(tp record.TopicPartition) *partitionOffsets {
	t.storedOffsets = nil
	offsets := t.partitions[tp]
	if offsets == nil {
		offsets = &partitionOffsets{}
		t.partitions[tp] = offsets
	}
	return offsets
}

// Restore sets the stored offset of a partition at a takeover, or when the partition is opened.
func (t *Tracker[P]) Restore(tp record.TopicPartition, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partitionToChangeLocked(tp).next = offset
}

// Idle raises the stored offset of a partition to offset, unless a record or a hold keeps it lower.
// None of our records may have been in flight to the partition when the offset was read, so that
// every later record is at or above it.
func (t *Tracker[P]) Idle(tp record.TopicPartition, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()

	// The cached offsets stay valid if nothing changes.
	if offsets := t.partitions[tp]; offsets != nil && offset <= offsets.next {
		return
	}
	t.partitionToChangeLocked(tp).next = offset
}

// storedOffsetsLocked returns the stored offset of each partition by topic. It is −1 for a
// partition that has none yet. The map is rebuilt only after a change.
func (t *Tracker[P]) storedOffsetsLocked() map[string][]int64 {
	if t.storedOffsets != nil {
		return t.storedOffsets
	}

	all := make(map[string][]int64, len(t.partitions))
	for tp, o := range t.partitions {
		list := all[tp.Topic]
		for len(list) <= int(tp.Partition) {
			list = append(list, -1)
		}
		list[tp.Partition] = t.pruneLocked(o)
		all[tp.Topic] = list
	}
	t.storedOffsets = all
	return all
}
