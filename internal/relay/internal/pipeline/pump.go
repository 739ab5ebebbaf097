package pipeline

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
	"github.com/outrelay/outrelay/resume"
)

// A batch of the change stream can hold thousands of events. Idle loops are flushed and positions
// are set inside a batch as well, so that a large batch delays neither.
const (
	flushEvery    = 64  // events between two flushes of idle loops
	positionEvery = 256 // events between two positions that the resolved position can reach
)

// Pump is the hot path: it decodes the events of the change stream, routes them and delivers them
// to the dispatcher. A single goroutine runs it. All that an event needs is reused, so an event
// costs no allocation.
type Pump struct {
	feed
	PumpConfig

	lastCollection [16]byte

	// Both are nil once the stream has passed the events that they cover.
	previous     *PreviousOwner
	drainedSlots []DrainedSlot
}

// Term is the term of ownership that the pump works for.
type Term interface {
	// HandleDDL handles an event that is not an insert.
	HandleDDL(ctx context.Context, ev *changes.Event) error
	// AdoptCollection registers the collection of ev, which is new.
	AdoptCollection(ctx context.Context, ev *changes.Event) error
	// NoteProgress is called for each batch, also for an empty one.
	NoteProgress()
}

// PumpConfig contains the parts of a pump except for its feed. All fields are required, except where the
// comment allows nil.
type PumpConfig struct {
	Term        Term
	Collections map[[16]byte]bool // registered for this watcher, by UUID (N25)

	// Events that the stream repeats although they were delivered or stored before.
	Swept        *sweep.Skip    // sent by the sweep that precedes the stream (N22)
	RereadUntil  bson.Timestamp // end of the part whose records the read-back may have found
	Previous     *PreviousOwner // waiting envelopes and dead letters of the previous owner; may be nil
	DrainedSlots []DrainedSlot  // slots of an earlier division of the watcher (N28); may be nil
}

// NewPump returns a pump that has not read any event.
func NewPump(build BuildConfig, feedConfig FeedConfig, pumpConfig PumpConfig) *Pump {
	pump := &Pump{feed: newFeed(build, feedConfig), PumpConfig: pumpConfig, previous: pumpConfig.Previous, drainedSlots: pumpConfig.DrainedSlots}
	// Until the stream has passed RereadUntil.
	pump.rereading = true
	return pump
}

// RepeatsPrevious reports whether the stream may still repeat envelopes of the previous owner.
func (p *Pump) RepeatsPrevious() bool { return p.previous != nil }

// ForgetDrainedSlots notes that a sweep has delivered everything that the slots of an earlier division had.
func (p *Pump) ForgetDrainedSlots() { p.drainedSlots = nil }

// Run delivers batches until the reader closes batches, and then returns nil. It returns early with the
// first error, or with the cause of ctx when ctx ends.
func (p *Pump) Run(ctx context.Context, batches <-chan *changes.Batch) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)

		case batch, open := <-batches:
			if !open {
				return nil
			}

			p.Term.NoteProgress()
			if err := p.handleBatch(ctx, batch); err != nil {
				return err
			}
		}
	}
}

// handleBatch delivers the events of batch in order and then releases batch. It blocks while the dispatcher
// has no room.
func (p *Pump) handleBatch(ctx context.Context, batch *changes.Batch) error {
	p.readAt = p.Now()
	for _, raw := range batch.Docs {
		if err := p.handleEvent(ctx, raw); err != nil {
			return err
		}

		p.eventCount++
		if p.eventCount%flushEvery == 0 {
			p.Dispatcher.Flush()
		}
		if p.eventCount%positionEvery == 0 {
			// The token aliases the batch, and the dispatcher keeps it for longer.
			token := slices.Clone(resume.Token(p.ev.Token))
			p.Dispatcher.Position(resume.Position{Token: token, ClusterTime: p.ev.ClusterTime})
		}
	}

	// The position of the batch can be later than its last event: the server also advances past
	// events that the pipeline filters out.
	p.Dispatcher.Position(batch.Position)
	p.Dispatcher.Flush()

	if p.rereading && batch.Position.ClusterTime.After(p.RereadUntil) {
		p.Dispatcher.EndReread()
		p.rereading = false
		p.previous = nil
	}

	batch.Release()
	// One large record must not keep its memory until the next event.
	p.filler.Release()
	return nil
}

// handleEvent parses one event of the stream into p.ev. It delivers the event unless the event is
// not an insert into a watched collection, or was delivered before.
func (p *Pump) handleEvent(ctx context.Context, raw []byte) error {
	if err := changes.Parse(raw, &p.ev); err != nil {
		return err
	}
	if p.ev.Op != changes.Insert {
		return p.Term.HandleDDL(ctx, &p.ev)
	}
	if !p.Scope.Matches(p.ev.DB, p.ev.Coll) {
		return nil
	}

	// A collection must be registered for this watcher before an event of it is sent (N25).
	// Consecutive events mostly share a collection, so the lookup is rare.
	if p.ev.UUID != p.lastCollection && p.ev.HasUUID {
		if !p.Collections[p.ev.UUID] {
			if err := p.Term.AdoptCollection(ctx, &p.ev); err != nil {
				return err
			}
		}
		p.lastCollection = p.ev.UUID
	}

	if p.drainedSlots != nil && p.deliveredByOldSlot() {
		return nil
	}
	if !p.Swept.IsEmpty() && p.deliveredBySweep() {
		return nil
	}

	var before stored
	if p.previous != nil && p.ev.HasDocument {
		before.topics, before.found = p.previous.topicsOf(p.namespace(), p.documentID(), &p.ev)
	}
	return p.deliverInsert(ctx, p.ev.WallMS, before)
}

// deliveredBySweep reports whether the sweep before this stream has delivered p.ev. If the sweep
// may have delivered it, p.ev is flagged as redelivered.
func (p *Pump) deliveredBySweep() bool {
	p.meta.Redelivered = false
	if p.Swept.IsPast(p.ev.ClusterTime) {
		p.Swept.Clear()
		return false
	}

	known, doubtful := p.Swept.WasSwept(p.ev.DB, p.ev.Coll, p.ev.IDType, p.ev.ID, p.ev.Document)
	p.meta.Redelivered = doubtful
	return known
}
