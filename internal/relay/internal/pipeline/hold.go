package pipeline

import (
	"errors"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

var _ record.Holder = (*Resolver)(nil)

// rereadWindow is the part of a term in which the stream repeats events that a previous
// owner may have sent.
type rereadWindow struct {
	mu       sync.Mutex
	active   bool
	mustHold bool          // HoldOffsets holds all stored offsets
	end      record.Ticket // the first one after the reread
}

// BeginReread starts the reread: the topics may already contain records that the stream has
// not delivered yet.
//
// If all of these records were sent in the order of the stream, no record that is acked
// during the reread has a higher offset than one of them. The ack of a record that was
// sent outside of that order could have a higher offset, and would move the stored offset
// past them. Therefore all stored offsets stay until EndReread (N8): from now on if beside
// reports that a previous owner sent outside of the order, otherwise from the first such
// delivery on, or from the first event that the previous owner did not send although it sent later ones: Kafka had rejected its record.
func (r *Resolver) BeginReread(beside bool) {
	r.reread.mu.Lock()
	defer r.reread.mu.Unlock()

	r.reread.active = true
	r.reread.mustHold = !beside
	if beside {
		r.tracker.HoldAllOffsets()
	}
}

// EndReread ends the reread: the stream has passed the time of the takeover.
func (d *Dispatcher) EndReread() {
	d.sink.EndReread()

	d.reread.mu.Lock()
	defer d.reread.mu.Unlock()
	d.reread.active, d.reread.mustHold = false, false
	_, d.reread.end = d.tracker.Window()
	d.tracker.ReleaseAllOffsets()
}

// IsRereading reports whether the reread has begun and not ended.
func (r *Resolver) IsRereading() bool {
	r.reread.mu.Lock()
	defer r.reread.mu.Unlock()
	return r.reread.active
}

// isOfReread reports whether a previous owner may have sent the event of ticket.
func (r *Resolver) isOfReread(ticket record.Ticket) bool {
	r.reread.mu.Lock()
	defer r.reread.mu.Unlock()
	return r.reread.active || ticket < r.reread.end
}

// HoldOffsets implements record.Holder: it holds all stored offsets if a reread requires it. It is also called before a delivery outside of
// the stream's order.
func (r *Resolver) HoldOffsets() {
	r.reread.mu.Lock()
	defer r.reread.mu.Unlock()

	if r.reread.mustHold {
		r.reread.mustHold = false
		r.tracker.HoldAllOffsets()
	}
}

// CheckGate implements record.Holder.
func (r *Resolver) CheckGate(rec *record.Record, side bool) error {
	return r.gates.checkGate(rec, side)
}

// MemoryPressure implements record.Holder. More than three quarters count as most.
func (r *Resolver) MemoryPressure() (low record.Ticket, stream, side bool) {
	low, next := r.tracker.Window()
	// A caller may wait although a quarter is free: its envelope needs more.
	stream = isPressed(int64(next-low), r.maxTickets.Load()) ||
		isPressed(r.budget.inUse(), r.budget.currentShare()) ||
		r.budget.hasWaiters()
	side = isPressed(r.sideBudget.inUse(), r.sideBudget.currentShare()) || r.sideBudget.hasWaiters()
	return low, stream, side
}

// isPressed reports whether more than three quarters of limit are used.
func isPressed(used, limit int64) bool { return 4*used > 3*limit }

// Ready implements record.Holder.
func (r *Resolver) Ready(topic string) { r.cfg.Ready.Put(topic) }

// Withdrawn implements record.Holder. The gates close before any later record of these keys
// can be sent. A dead record closes no gate.
func (r *Resolver) Withdrawn(list []record.Withdrawn) {
	for i := range list {
		withdrawn := &list[i]
		dead := withdrawn.Rejection != nil && withdrawn.Rejection.Class.DeadAtOnce()

		if withdrawn.Ticket.IsSide() {
			r.giveBackSideTarget(withdrawn.Ticket, string(withdrawn.NS), string(withdrawn.Key), record.Result{
				Topic: withdrawn.Topic, Partition: record.AnyPartition, Offset: -1, Rejection: withdrawn.Rejection, Held: withdrawn.Held,
			})
			continue
		}

		outcome := &ledger.Outcome{
			End:       ledger.Waiting,
			Headers:   ledger.Headers{Event: r.tracker.EventOf(withdrawn.Ticket), ID: withdrawn.ID, StringID: withdrawn.StringID, NSHash: withdrawn.NS},
			Key:       string(withdrawn.Key),
			Topics:    []string{withdrawn.Topic},
			Reason:    waiting.Blocked,
			Partition: record.AnyPartition,
			MayBeSent: withdrawn.MayBeSent,
			StreamMS:  withdrawn.TimeMS,
		}
		if errors.Is(withdrawn.Held, record.ErrParked) {
			outcome.Reason = waiting.Parked
		}
		if withdrawn.Rejection != nil {
			outcome.End, outcome.Reason, outcome.Rejection, outcome.Topic = ledger.Retrying, waiting.Retry, *withdrawn.Rejection, withdrawn.Topic
		}

		unsent := unsent{ticket: withdrawn.Ticket, targets: 1, bytes: int64(withdrawn.Bytes)}
		if dead {
			outcome.End, outcome.Topics = ledger.Dead, nil
			r.addUnsent(outcome, unsent)
			continue
		}
		r.addUnsent(outcome, unsent, gate{string(withdrawn.NS), withdrawn.Topic, outcome.Key})
	}
}

// CloseGate counts a waiting envelope of a previous owner. ns is the value of the header `outrelay-ns`;
// it is empty if records carry none.
func (r *Resolver) CloseGate(ns, topic, key string) { r.gates.changeWaiting(ns, topic, key, 1) }

// OpenAllGates opens every gate, before the waiting envelopes are loaded again from the beginning.
// Nothing may be in flight during the load.
func (r *Resolver) OpenAllGates() { r.gates.openAll() }

// OpenGate removes one envelope of the stream from its gate: it was sent to topic,
// or it is dead.
func (r *Resolver) OpenGate(ns, topic, key string) { r.gates.changeWaiting(ns, topic, key, -1) }

// ResumeKey allows deliveries outside of the stream's order for a key again. It is called after
// all withdrawn records of the key have been handled.
func (r *Resolver) ResumeKey(ns, topic, key string) { r.gates.resumeKey(ns, topic, key) }

// holdTargets passes one outcome to the ledger for the targets of item whose indexes are in held, and
// closes their gates.
func (d *Dispatcher) holdTargets(item *Item, held []int, reason waiting.Reason, ticket record.Ticket) {
	first := &item.Records[held[0]]
	ns := string(first.Header(record.HeaderNamespace))

	outcome := item.newOutcome(ledger.Waiting)
	outcome.Reason, outcome.Key = reason, string(first.Key)
	unsent := unsent{ticket: ticket, targets: len(held)}

	gates := make([]gate, len(held))
	for k, i := range held {
		rec := &item.Records[i]
		outcome.Topics = append(outcome.Topics, rec.Topic)
		unsent.bytes += int64(d.sink.Size(rec))
		gates[k] = gate{ns, rec.Topic, outcome.Key}
	}
	d.addUnsent(outcome, unsent, gates...)
}
