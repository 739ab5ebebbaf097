package pipeline

import (
	"context"
	"errors"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// side is a delivery outside of the stream's order: a retried, parked, scheduled or
// replayed envelope.
type side struct {
	targets    []sideTarget
	bytes      int64
	results    []record.Result
	onResolved func(record.Published)
	unordered  bool // a later delivery of the key may overtake it

	// Nearly every envelope has one target, which needs no further allocation.
	oneTarget [1]sideTarget
	oneResult [1]record.Result
}

// sideTarget is a target of a side delivery.
type sideTarget struct {
	topic string
	bytes int
}

// newSide returns a delivery without targets.
func newSide(onResolved func(record.Published)) *side {
	side := &side{onResolved: onResolved}
	side.targets, side.results = side.oneTarget[:0], side.oneResult[:0]
	return side
}

// addTarget adds a target, and the bytes that it reserves.
func (s *side) addTarget(topic string, bytes int) {
	s.targets = append(s.targets, sideTarget{topic, bytes})
	s.bytes += int64(bytes)
}

// bytesOf returns the bytes that the target topic has reserved.
func (s *side) bytesOf(topic string) int {
	for i := range s.targets {
		if s.targets[i].topic == topic {
			return s.targets[i].bytes
		}
	}
	return 0
}

// Publish sends the records of one envelope, at least one and one for each topic, outside of the stream's
// order. It blocks while the reconciler's share of the budget is full (N13). It returns the
// cause of ctx if ctx ends, or the error that ended the sink. After an error, onResolved is
// not called.
//
// Otherwise onResolved is called once, when each target has its result, possibly from within
// Publish. It must not block, and must not call the dispatcher or the sink. The stored offsets
// wait for Settle.
func (d *Dispatcher) Publish(ctx context.Context, recs []record.Record, onResolved func(record.Published)) error {
	return d.publishSide(ctx, recs, newSide(onResolved))
}

// PublishUnordered is Publish for an envelope that has no place in the order of its key. If a target gives it back, later deliveries of
// the key do not wait, so no ResumeKey is necessary.
func (d *Dispatcher) PublishUnordered(ctx context.Context, recs []record.Record, onResolved func(record.Published)) error {
	side := newSide(onResolved)
	side.unordered = true
	return d.publishSide(ctx, recs, side)
}

// publishSide sends the records of side, as Publish.
func (d *Dispatcher) publishSide(ctx context.Context, recs []record.Record, side *side) error {
	for i := range recs {
		side.addTarget(recs[i].Topic, d.sink.Size(&recs[i]))
	}
	if err := d.sideBudget.reserve(ctx, side.bytes, alwaysReady, d.sink.Flush); err != nil {
		return err
	}

	// N8: the hold has to be in place before the record can be acked.
	d.HoldOffsets()
	ticket := d.tracker.BeginSide()
	// The delivery is registered first: the sink may ack a record from within Send.
	d.addSide(ticket, side)
	for i := range recs {
		err := d.sink.Send(&recs[i], ticket)
		if err == nil {
			continue
		}

		result := record.Result{Topic: recs[i].Topic, Partition: record.AnyPartition, Offset: -1}
		if errors.As(err, &result.Rejection); result.Rejection == nil {
			if !errors.Is(err, record.ErrParked) && !errors.Is(err, record.ErrBlocked) {
				d.dropSide(ticket)
				return err
			}
			result.Held = err
		}

		// N15: the caller gets this result with the last one. Until then, a later envelope of the key must not go to this topic, which may be
		// ready at any moment.
		if len(recs) > 1 {
			d.giveBackSideTarget(ticket, string(recs[i].Header(record.HeaderNamespace)), string(recs[i].Key), result)
			continue
		}
		d.resolveSideTarget(ticket, result)
	}
	return nil
}

// DrainSides blocks until all side deliveries are resolved, or ctx ends. Then it returns the cause of
// ctx.
func (d *Dispatcher) DrainSides(ctx context.Context) error {
	return d.sideBudget.reserve(ctx, 0, func() bool { return d.sidesInFlight.Load() == 0 }, d.sink.Flush)
}

// alwaysReady is the condition of a reservation that waits for bytes only.
func alwaysReady() bool { return true }

// Settle marks side deliveries as settled: their outcome is majority-committed (N8).
func (r *Resolver) Settle(tickets []record.Ticket) { r.tracker.Settle(tickets) }

// addSide registers the side delivery side under its ticket.
func (r *Resolver) addSide(ticket record.Ticket, side *side) {
	r.sideMu.Lock()
	r.sides[ticket] = side
	r.sideMu.Unlock()

	r.sidesInFlight.Add(1)
}

// giveBackSideTarget is resolveSideTarget for a target that was not sent. Unless it is dead or has no order, later deliveries of the key must
// not overtake it.
func (r *Resolver) giveBackSideTarget(ticket record.Ticket, ns, key string, result record.Result) {
	r.sideMu.Lock()
	side := r.sides[ticket]
	isUnordered := side != nil && side.unordered
	r.sideMu.Unlock()

	if !isUnordered && (result.Rejection == nil || !result.Rejection.Class.DeadAtOnce()) {
		r.gates.stopKey(ns, result.Topic, key)
	}
	r.resolveSideTarget(ticket, result)
}

// resolveSideTarget stores the result of one target, and returns the bytes that the target
// had reserved. The last result resolves the delivery and calls its onResolved.
func (r *Resolver) resolveSideTarget(ticket record.Ticket, result record.Result) (bytes int) {
	r.sideMu.Lock()
	side := r.sides[ticket]
	// The delivery was dropped after an error of the sink.
	if side == nil {
		r.sideMu.Unlock()
		return 0
	}

	side.results = append(side.results, result)
	last := len(side.results) == len(side.targets)
	if last {
		delete(r.sides, ticket)
	}
	r.sideMu.Unlock()

	// The callback takes other locks, so it runs without this lock.
	if last {
		r.sidesInFlight.Add(-1)
		r.releaseBytes(r.sideBudget, side.bytes)
		side.onResolved(record.Published{Ticket: ticket, Results: side.results})
	}
	return side.bytesOf(result.Topic)
}

// dropSide removes a side delivery without calling its onResolved, and releases its bytes.
func (r *Resolver) dropSide(ticket record.Ticket) {
	r.sideMu.Lock()
	side := r.sides[ticket]
	delete(r.sides, ticket)
	r.sideMu.Unlock()

	if side != nil {
		r.sidesInFlight.Add(-1)
		r.releaseBytes(r.sideBudget, side.bytes)
	}
}

// sideAck is the offset of one side delivery in an acked batch.
type sideAck struct {
	ticket record.Ticket
	offset int64
}

// collectSideAcks returns the side deliveries in an acked batch. If none is in flight, it
// returns nil at the cost of one atomic load.
func (r *Resolver) collectSideAcks(base int64, tickets []record.Ticket) []sideAck {
	if r.sidesInFlight.Load() == 0 {
		return nil
	}

	var acks []sideAck
	for i, t := range tickets {
		if t.IsSide() {
			acks = append(acks, sideAck{t, base + int64(i)})
		}
	}
	return acks
}

// resolveSideAcks resolves the targets of acks in tp, and returns the bytes that they had
// reserved.
func (r *Resolver) resolveSideAcks(tp record.TopicPartition, acks []sideAck) (bytes int) {
	for _, ack := range acks {
		result := record.Result{Topic: tp.Topic, Partition: tp.Partition, Offset: ack.offset}
		bytes += r.resolveSideTarget(ack.ticket, result)
	}
	return bytes
}
