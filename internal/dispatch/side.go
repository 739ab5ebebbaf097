package dispatch

import (
	"context"
	"errors"

	"github.com/outrelay/outrelay/internal/record"
)

// side is a delivery outside of the stream's order: a retried, parked, scheduled or replayed envelope.
type side struct {
	targets []sideTarget
	targetsLeft    int
	bytes   int64
	answers []record.Answer
	onResolved    func(record.Published)
}

type sideTarget struct {
	topic string
	size  int
	resolved  bool
}

// Publish hands the records of one envelope, one for each topic, to the sink outside of the stream's order. It blocks while
// the reconciler's share of the budget is full (N13), and returns the cause of ctx's end, or the error that ended the sink;
// then tell is not called. Else tell is called once, when each target has its answer, maybe from within Publish; it must
// not block, nor call the dispatcher or the sink. The stored offsets wait for Settle.
func (d *Dispatcher) Publish(ctx context.Context, recs []record.Record, tell func(record.Published)) error {
	s := &side{targetsLeft: len(recs), onResolved: tell, targets: make([]sideTarget, len(recs))}
	for i := range recs {
		s.targets[i] = sideTarget{topic: recs[i].Topic, size: d.sink.Size(&recs[i])}
		s.bytes += int64(s.targets[i].size)
	}
	if err := d.sideBudget.reserve(ctx, s.bytes, alwaysReady, d.sink.Flush); err != nil {
		return err
	}
	d.holdOffsetsInReplay()
	t := d.tracker.BeginSide()
	if len(recs) == 0 {
		d.releaseBytes(d.sideBudget, s.bytes)
		tell(record.Published{Ticket: t})
		return nil
	}
	d.sideMu.Lock()
	d.sides[t] = s
	d.sideMu.Unlock()
	d.sidesInFlight.Add(1)
	for i := range recs {
		err := d.sink.Send(&recs[i], t)
		if err == nil {
			continue
		}
		a := record.Answer{Topic: recs[i].Topic, Partition: record.AnyPartition, Offset: -1}
		if errors.As(err, &a.Refused); a.Refused == nil {
			if !errors.Is(err, record.ErrParked) && !errors.Is(err, record.ErrBlocked) {
				d.dropSide(t)
				return err
			}
			a.Held = err
		}
		d.resolveSideTarget(t, a)
	}
	return nil
}

// Take acks those of recs, of one envelope outside of the stream's order, that a read-back has found, and sends none. It
// reports whether there is any; then tell is called once with the answers of those alone, from within Take. It does not
// block. The stored offsets wait for Settle.
func (d *Dispatcher) Take(recs []record.Record, tell func(record.Published)) bool {
	s := &side{targetsLeft: len(recs) + 1, targets: make([]sideTarget, len(recs))} // never whole: how many are found is known at the end
	for i := range recs {
		s.targets[i] = sideTarget{topic: recs[i].Topic, size: d.sink.Size(&recs[i])}
	}
	t := d.tracker.BeginSide()
	d.sideMu.Lock()
	d.sides[t] = s
	d.sideMu.Unlock()
	d.sidesInFlight.Add(1)
	for i := range recs {
		d.sink.Take(&recs[i], t)
	}
	d.dropSide(t)
	if len(s.answers) == 0 {
		d.tracker.Settle([]record.Ticket{t})
		return false
	}
	tell(record.Published{Ticket: t, Answers: s.answers})
	return true
}

func alwaysReady() bool { return true }

// Settle says that what became of deliveries outside of the stream's order is majority-committed (N8).
func (d *Dispatcher) Settle(tickets []record.Ticket) { d.tracker.Settle(tickets) }

// resolveSideTarget notes what became of one target.
func (d *Dispatcher) resolveSideTarget(t record.Ticket, a record.Answer) (bytes int) {
	d.sideMu.Lock()
	s := d.sides[t]
	if s == nil {
		d.sideMu.Unlock()
		return 0
	}
	for i := range s.targets {
		if x := &s.targets[i]; !x.resolved && x.topic == a.Topic {
			x.resolved, bytes = true, x.size
			break
		}
	}
	s.answers = append(s.answers, a)
	s.targetsLeft--
	over := s.targetsLeft == 0
	if over {
		delete(d.sides, t)
	}
	d.sideMu.Unlock()
	if over {
		d.sidesInFlight.Add(-1)
		d.releaseBytes(d.sideBudget, s.bytes)
		s.onResolved(record.Published{Ticket: t, Answers: s.answers})
	}
	return bytes
}

func (d *Dispatcher) dropSide(t record.Ticket) {
	d.sideMu.Lock()
	s := d.sides[t]
	delete(d.sides, t)
	d.sideMu.Unlock()
	if s != nil {
		d.sidesInFlight.Add(-1)
		d.releaseBytes(d.sideBudget, s.bytes)
	}
}

// sideAck is the offset of one delivery outside of the stream's order in an acked batch.
type sideAck struct {
	ticket record.Ticket
	offset int64
}

// collectSideAcks picks out of an acked batch what is not the stream's. It is nil, at the cost of a load, while there is nothing.
func (d *Dispatcher) collectSideAcks(base int64, tickets []record.Ticket) []sideAck {
	if d.sidesInFlight.Load() == 0 {
		return nil
	}
	var list []sideAck
	for i, t := range tickets {
		if t.IsSide() {
			list = append(list, sideAck{t, base + int64(i)})
		}
	}
	return list
}

// resolveSideAcks tells of the deliveries of list that tp has them, and returns the bytes that they had reserved.
func (d *Dispatcher) resolveSideAcks(tp record.TopicPartition, list []sideAck) (bytes int) {
	for _, p := range list {
		bytes += d.resolveSideTarget(p.ticket, record.Answer{Topic: tp.Topic, Partition: tp.Partition, Offset: p.offset})
	}
	return bytes
}
