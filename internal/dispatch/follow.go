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

// followed are the few envelopes above the watermark that somebody follows.
type followed struct {
	n    atomic.Int64 // of the map, so that an ack costs a load while nobody follows
	mu   sync.Mutex
	byID map[record.Ticket]*following
}

type following struct {
	to   Follower
	left int
}

func (f *followed) add(t record.Ticket, to Follower, targets int) {
	if targets == 0 {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.byID == nil {
		f.byID = map[record.Ticket]*following{}
	}
	f.byID[t] = &following{to, targets}
	f.n.Add(1)
}

// of is who follows t, of whose records n are told of now.
func (f *followed) of(t record.Ticket, n int) Follower {
	f.mu.Lock()
	defer f.mu.Unlock()
	x := f.byID[t]
	if x == nil {
		return nil
	}
	if x.left -= n; x.left <= 0 {
		delete(f.byID, t)
		f.n.Add(-1)
	}
	return x.to
}

func (f *followed) acked(tp record.TopicPartition, base int64, tickets []record.Ticket) {
	if f.n.Load() == 0 {
		return
	}
	for i, t := range tickets {
		if to := f.of(t, 1); to != nil {
			to.Acked(tp, base+int64(i))
		}
	}
}

// left tells of records that became an exception.
func (f *followed) left(e *Exception) {
	if f.n.Load() == 0 {
		return
	}
	to := f.of(e.ticket, e.targets)
	if to == nil {
		return
	}
	fate, refused := e.State, e.Why.Class != ""
	if refused {
		fate = string(e.Why.Class)
	}
	if len(e.Pending) == 0 {
		to.Left(e.Topic, fate, refused)
	}
	for _, topic := range e.Pending {
		to.Left(topic, fate, refused)
	}
}
