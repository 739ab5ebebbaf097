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

// followers are the few envelopes above the watermark that somebody follows, or whose delivery is to be written down.
type followers struct {
	count    atomic.Int64 // of the map, so that an ack costs a load while nobody follows
	mu       sync.Mutex
	byTicket map[record.Ticket]trackedEnvelope
}

type trackedEnvelope struct {
	follower    Follower // nil: nobody
	sent        *Sent    // nil: nothing is written down
	targetsLeft int
}

func (f *followers) trackEnvelope(t record.Ticket, it *Item) {
	if it.Follow == nil && it.Sent == nil || len(it.Records) == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byTicket == nil {
		f.byTicket = map[record.Ticket]trackedEnvelope{}
	}
	f.byTicket[t] = trackedEnvelope{it.Follow, it.Sent, len(it.Records)}
	f.count.Add(1)
}

// countResolvedLocked finds what follows t, n records of which have their fate now, and whether these were the last. The lock is held.
func (f *followers) countResolvedLocked(t record.Ticket, n int) (x trackedEnvelope, last bool) {
	x, found := f.byTicket[t]
	if !found {
		return x, false
	}
	if x.targetsLeft -= n; x.targetsLeft > 0 {
		f.byTicket[t] = x
		return x, false
	}
	delete(f.byTicket, t)
	f.count.Add(-1)
	return x, true
}

// notifyAcked tells of records that stand in tp, and returns those envelopes that are whole and to be written down. The list is nil
// in the usual case that nothing is followed.
func (f *followers) notifyAcked(tp record.TopicPartition, base int64, tickets []record.Ticket) (whole []*Sent) {
	if f.count.Load() == 0 {
		return nil
	}
	for i, t := range tickets {
		offset := base + int64(i)
		f.mu.Lock()
		x, last := f.countResolvedLocked(t, 1)
		if x.sent != nil {
			x.sent.Answers = append(x.sent.Answers, record.Answer{Topic: tp.Topic, Partition: tp.Partition, Offset: offset})
			if last {
				whole = append(whole, x.sent)
			}
		}
		f.mu.Unlock()
		if x.follower != nil {
			x.follower.Acked(tp, offset)
		}
	}
	return whole
}

// notifyLeft tells of records that became an exception. It returns the envelope if these were its last, and it was to be written down.
func (f *followers) notifyLeft(e *Exception) (whole []*Sent) {
	if f.count.Load() == 0 {
		return nil
	}
	f.mu.Lock()
	x, last := f.countResolvedLocked(e.ticket, e.targets)
	if x.sent != nil {
		x.sent.void = true
		if last {
			whole = []*Sent{x.sent}
		}
	}
	f.mu.Unlock()
	if x.follower == nil {
		return whole
	}

	fate, refused := e.State, e.Why.Class != ""
	if refused {
		fate = string(e.Why.Class)
	}
	if len(e.Pending) == 0 {
		x.follower.Left(e.Topic, fate, refused)
	}
	for _, topic := range e.Pending {
		x.follower.Left(topic, fate, refused)
	}
	return whole
}
