package watermark

import "github.com/outrelay/outrelay/internal/record"

// N8: the stored offset of a partition is that of the first record of any target of an event above the watermark, acked or
// not, or of a delivery outside of the stream's order whose consequence is not written down. The watermark is the position that is stored beside the offsets, not the first unresolved ticket: a successor reads
// all that lies behind that position again, and has to find in the topic what of it was acked. Records go to a partition in
// order, so an unacked one stands at or above `next`, and the acked ones are the runs.
type partitionOffsets struct {
	next int64 // nothing of ours that is not acked yet can stand below
	runs []run // acked, at least one ticket may still be above the watermark
	// holds are offsets at or below which the stored one stays, by who holds it: it is at the lowest of them.
	holds map[OffsetHold]int64
}

// OffsetHold names who holds a stored offset, so that one who lets go takes nothing away from the others.
type OffsetHold uint64

// run is one acked batch: tickets[i] stands at offset base+i.
type run struct {
	base    int64
	tickets []record.Ticket
}

func (o *partitionOffsets) appendAcked(base int64, tickets []record.Ticket) {
	o.next = max(o.next, base+int64(len(tickets)))
	o.runs = append(o.runs, run{base, tickets})
}

// pruneLocked forgets what the watermark has passed and returns the stored offset.
func (t *Tracker[P]) pruneLocked(o *partitionOffsets) int64 {
	first, kept := o.next, o.runs[:0]
	for _, offset := range o.holds {
		first = min(first, offset)
	}
	for _, r := range o.runs {
		i := 0
		for i < len(r.tickets) && t.passedLocked(r.tickets[i]) {
			i++
		}
		if i == len(r.tickets) {
			t.recycle(r.tickets)
			continue
		}
		// A read-back hit may stand below an earlier run: the lowest decides, not the first.
		first = min(first, r.base+int64(i))
		kept = append(kept, r)
	}
	clear(o.runs[len(kept):])
	o.runs = kept
	return first
}

// passedLocked reports whether a successor need not find the record of k: the watermark covers it, or its delivery was settled.
func (t *Tracker[P]) passedLocked(k record.Ticket) bool {
	if k.IsSide() {
		_, open := t.unsettledSides[k]
		return !open
	}
	return k < t.reachedBelow
}

// BeginSide gives a delivery outside of the stream's order its ticket: it never holds the watermark, but its records hold the
// stored offsets of their partitions until it is settled.
func (t *Tracker[P]) BeginSide() record.Ticket {
	t.mu.Lock()
	defer t.mu.Unlock()
	k := record.Side | t.nextSide
	t.nextSide++
	t.unsettledSides[k] = struct{}{}
	return k
}

// Settle says that what became of these deliveries outside of the stream's order is written down.
func (t *Tracker[P]) Settle(tickets []record.Ticket) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, k := range tickets {
		delete(t.unsettledSides, k)
	}
	t.storedOffsets = nil
}

// HoldOffset keeps the stored offset of tp at or below offset until by has called Unhold. The lower one counts where by holds it
// already.
func (t *Tracker[P]) HoldOffset(tp record.TopicPartition, by OffsetHold, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	o := t.partitionToChangeLocked(tp)
	if at, again := o.holds[by]; again && at <= offset {
		return
	}
	if o.holds == nil {
		o.holds = map[OffsetHold]int64{}
	}
	o.holds[by] = offset
}

// HoldAllOffsets keeps the stored offset of every partition where it is now, or below, until by has called UnholdAll.
func (t *Tracker[P]) HoldAllOffsets(by OffsetHold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.storedOffsets = nil
	for _, o := range t.partitions {
		at := t.pruneLocked(o)
		if o.holds == nil {
			o.holds = map[OffsetHold]int64{}
		}
		o.holds[by] = at
	}
}

// ReleaseAllOffsets ends the HoldAll of by.
func (t *Tracker[P]) ReleaseAllOffsets(by OffsetHold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.storedOffsets = nil
	for _, o := range t.partitions {
		delete(o.holds, by)
	}
}

// ReleaseOffset ends the Hold of by.
func (t *Tracker[P]) ReleaseOffset(tp record.TopicPartition, by OffsetHold) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.partitionToChangeLocked(tp).holds, by)
}

// partitionToChangeLocked finds a partition whose stored offset is about to change.
func (t *Tracker[P]) partitionToChangeLocked(tp record.TopicPartition) *partitionOffsets {
	t.storedOffsets = nil
	o := t.partitions[tp]
	if o == nil {
		o = &partitionOffsets{}
		t.partitions[tp] = o
	}
	return o
}

// Restore sets the stored offset of a partition at a take-over, or when it is adopted.
func (t *Tracker[P]) Restore(tp record.TopicPartition, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.partitionToChangeLocked(tp).next = offset
}

// Idle moves the stored offset of a partition that nothing holds up to offset: the caller knows that nothing of ours was
// in flight to it when the offset was read, so that whatever follows stands at or above it.
func (t *Tracker[P]) Idle(tp record.TopicPartition, offset int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if o := t.partitions[tp]; o != nil && offset <= o.next {
		return
	}
	t.partitionToChangeLocked(tp).next = offset
}

// storedOffsetsLocked lists the stored offset of each partition by topic; −1 is a partition that has none yet.
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
