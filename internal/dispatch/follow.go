package dispatch

import (
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/record"
)

// Follower hears what becomes of the records of one envelope of the stream, for a trace of it. Each record is told of once,
// unless the term ends before. Its methods are called by the sink's lanes, some under the sink's lock, and may be called at
// once for different records; they must not block and call nothing of the dispatcher or the sink.
type Follower interface {
	// Acked says that the record for the topic stands in its partition at offset.
	Acked(tp record.TopicPartition, offset int64)
	// Left says that the record was not sent now: fate is the state in which its envelope waits, or the class of its refusal
	// if it was refused. topic is empty if it concerns all that are left.
	Left(topic, fate string, refused bool)
}

// followed are the few envelopes above the watermark that somebody follows, or whose delivery is to be written down.
type followed struct {
	n    atomic.Int64 // of the map, so that an ack costs a load while nobody follows
	mu   sync.Mutex
	byID map[record.Ticket]following
}

type following struct {
	to   Follower // nil: nobody
	sent *Sent    // nil: nothing is written down
	left int
}

func (f *followed) add(t record.Ticket, it *Item) {
	if it.Follow == nil && it.Sent == nil || len(it.Records) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byID == nil {
		f.byID = map[record.Ticket]following{}
	}
	f.byID[t] = following{it.Follow, it.Sent, len(it.Records)}
	f.n.Add(1)
}

// take finds what follows t, n records of which have their fate now, and whether these were the last. The lock is held.
func (f *followed) take(t record.Ticket, n int) (x following, last bool) {
	x, found := f.byID[t]
	if !found {
		return x, false
	}
	if x.left -= n; x.left > 0 {
		f.byID[t] = x
		return x, false
	}
	delete(f.byID, t)
	f.n.Add(-1)
	return x, true
}

// acked tells of records that stand in tp, and returns those envelopes that are whole and to be written down. The list is nil
// in the usual case that nothing is followed.
func (f *followed) acked(tp record.TopicPartition, base int64, tickets []record.Ticket) (whole []*Sent) {
	if f.n.Load() == 0 {
		return nil
	}
	for i, t := range tickets {
		offset := base + int64(i)
		f.mu.Lock()
		x, last := f.take(t, 1)
		if x.sent != nil {
			x.sent.Answers = append(x.sent.Answers, record.Answer{Topic: tp.Topic, Partition: tp.Partition, Offset: offset})
			if last {
				whole = append(whole, x.sent)
			}
		}
		f.mu.Unlock()
		if x.to != nil {
			x.to.Acked(tp, offset)
		}
	}
	return whole
}

// left tells of records that became an exception. It returns the envelope if these were its last, and it was to be written down.
func (f *followed) left(e *Exception) (whole []*Sent) {
	if f.n.Load() == 0 {
		return nil
	}
	f.mu.Lock()
	x, last := f.take(e.ticket, e.targets)
	if x.sent != nil {
		x.sent.void = true
		if last {
			whole = []*Sent{x.sent}
		}
	}
	f.mu.Unlock()
	if x.to == nil {
		return whole
	}

	fate, refused := e.State, e.Why.Class != ""
	if refused {
		fate = string(e.Why.Class)
	}
	if len(e.Pending) == 0 {
		x.to.Left(e.Topic, fate, refused)
	}
	for _, topic := range e.Pending {
		x.to.Left(topic, fate, refused)
	}
	return whole
}
