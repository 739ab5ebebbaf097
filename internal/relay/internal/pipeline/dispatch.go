// Package pipeline hands the events of the change stream to the sink and tracks
// each of them until it is acked, or stored as waiting or dead.
//
// Order: events enter in the order of Deliver and reach each partition in that
// order. Publish delivers outside of that order, for the reconciler.
//
// An envelope that has to wait, or that cannot be sent at all, goes to the ledger with its stream position, and the stream goes
// on. If it waits, the gate of its key closes in the same step, so no later envelope can overtake it.
//
// Blocking: Deliver blocks while the byte budget or the window of tickets is full.
// Nothing else slows the reader down. The methods that the sink calls return at once.
//
// Cost: an event that is sent costs no allocation.
package pipeline

import (
	"context"
	"errors"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// Sink is the part of the Kafka sink that the dispatcher uses.
type Sink interface {
	// Size returns the bytes that rec reserves in the budget until it is acked.
	Size(rec *record.Record) int

	// Send queues rec and never blocks. If nothing was queued it returns
	// record.ErrParked, record.ErrBlocked or a *record.Rejection. Any other error
	// has ended the sink.
	Send(rec *record.Record, t record.Ticket) error

	// FindHit returns the place of rec if the read-back has found it in its topic.
	FindHit(rec *record.Record) (tp record.TopicPartition, offset int64, found bool)

	// MayHold reports whether the topic of rec may contain it, also because the read-back could not read all of it.
	MayHold(rec *record.Record) bool

	// TopicsWithHits returns the topics in which the read-back has found records.
	TopicsWithHits() []string

	// EndReread drops the read-back.
	EndReread()

	// Flush wakes the loops that have something to send.
	Flush()
}

// Item is one event of the stream. The slices Raw, DB, Coll and Pos, and those of its
// records, may alias the server's response.
type Item struct {
	CommitMS int64           // commit time in Unix milliseconds
	Records  []record.Record // one per target

	Dead   *record.Rejection // why the envelope can never be sent; nil if it can
	Hold   bool              // the envelope waits in all of its topics, and nothing is sent now
	Sent   *Delivery         // the delivery to record; nil if it is not recorded
	Follow Follower          // observes the outcome for a trace; usually nil

	Raw      []byte         // the envelope
	Whole    bool           // Raw is the envelope as it was inserted
	Stamp    bson.Timestamp // of its insert; see [ledger.Outcome]
	DB, Coll []byte         // its collection
	Pos      []byte         // position of its event, in hexadecimal
	Key      []byte         // its ordering key; nil if it is malformed
}

// newOutcome returns the outcome of an envelope that is not sent now. It copies every slice that may alias the server's response.
func (item *Item) newOutcome(end ledger.End) *ledger.Outcome {
	return &ledger.Outcome{
		End:       end,
		Raw:       slices.Clone(item.Raw),
		NS:        string(item.DB) + "." + string(item.Coll),
		Pos:       string(item.Pos),
		Key:       string(item.Key),
		Partition: record.AnyPartition,
		StreamMS:  item.timeMS(),
	}
}

// timeMS returns the time of the records, or 0 if there are none.
func (item *Item) timeMS() int64 {
	if len(item.Records) == 0 {
		return 0
	}
	return item.Records[0].TimeMS
}

// Dispatcher sends the events of one term of ownership to the sink. The [Resolver], which it extends, tracks them from then on.
//
// Deliver must not be called concurrently: the order of its calls is the order of
// the stream. No lock is held during a call to the sink.
type Dispatcher struct {
	*Resolver
	sink Sink

	heldScratch []int // used by Deliver only
}

// NewDispatcher returns a dispatcher that sends to sink. The sink reports to resolver.
func NewDispatcher(resolver *Resolver, sink Sink) *Dispatcher {
	return &Dispatcher{Resolver: resolver, sink: sink}
}

// Deliver sends one event to its targets. Calls must be made in stream order. It
// blocks while the budget or the window is full. It returns the cause of ctx if ctx
// ends, or the error that ended the sink. A target that rejects the event or makes it
// wait is no error: it goes to the ledger.
func (d *Dispatcher) Deliver(ctx context.Context, item *Item) error {
	if item.Dead != nil {
		return d.deliverDead(ctx, item)
	}

	// All targets are reserved together, so that no event reaches some of its targets
	// and then waits for room to reach the others (N13).
	size := 0
	for i := range item.Records {
		size += d.sink.Size(&item.Records[i])
	}

	// The sink is flushed before Deliver blocks: room comes only from acks.
	if err := d.budget.reserve(ctx, int64(size), d.hasRoom, d.sink.Flush); err != nil {
		return err
	}

	// From here on each target has to be resolved exactly once, by an ack or by a stored
	// outcome. The resolved position stops at this ticket until then.
	ticket := d.beginTicket(item)
	d.followers.trackEnvelope(ticket, item)

	d.heldScratch = d.heldScratch[:0]
	reason := waiting.Blocked
	for i := range item.Records {
		rec := &item.Records[i]
		err := record.ErrPartitionParked
		if !item.Hold {
			err = d.sink.Send(rec, ticket)
		}
		if err == nil {
			continue
		}

		// The target is parked (N11), or an earlier envelope of the key waits (N15).
		parked := errors.Is(err, record.ErrParked)
		if parked || errors.Is(err, record.ErrBlocked) {
			d.heldScratch = append(d.heldScratch, i)
			if parked {
				reason = waiting.Parked
			}
			continue
		}

		rejection, ok := errors.AsType[*record.Rejection](err)
		if !ok {
			return err
		}
		outcome := item.newOutcome(ledger.Dead)
		outcome.Topic, outcome.Rejection = rec.Topic, *rejection
		if !rejection.Class.DeadAtOnce() {
			outcome.End, outcome.Reason, outcome.Topics = ledger.Retrying, waiting.Retry, []string{rec.Topic}
		}
		d.addUnsent(outcome, unsent{ticket: ticket, targets: 1, bytes: int64(d.sink.Size(rec))})
	}

	// The targets that wait share one outcome, because they share one envelope.
	if len(d.heldScratch) > 0 {
		d.holdTargets(item, d.heldScratch, reason, ticket)
	}
	return nil
}

// letterCopies is how often the envelope of a dead letter is in memory until it is stored: in the outcome, in the letter, and in the message to
// the server. A record is encoded from its envelope and shares its bytes.
const letterCopies = 3

// deliverDead queues the envelope of item as a dead letter. It blocks as Deliver does.
func (d *Dispatcher) deliverDead(ctx context.Context, item *Item) error {
	size := letterCopies * int64(len(item.Raw))
	if err := d.budget.reserve(ctx, size, d.hasRoom, d.sink.Flush); err != nil {
		return err
	}

	ticket := d.tracker.Begin(item.CommitMS, 1, EventNumber(item.Pos))
	outcome := item.newOutcome(ledger.Dead)
	outcome.Rejection = *item.Dead
	outcome.Stamp, outcome.Recorded = item.Stamp, item.Whole
	d.addUnsent(outcome, unsent{ticket: ticket, targets: 1, bytes: size})
	return nil
}

// Flush wakes the idle loops of the sink.
func (d *Dispatcher) Flush() { d.sink.Flush() }
