package pipeline

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/resume"
)

// A batch of the change stream can hold thousands of events. Idle lanes are flushed and positions
// are set inside a batch as well, so that a large batch delays neither.
const (
	flushEvery    = 64  // events between two flushes of idle lanes
	positionEvery = 256 // events between two positions that the watermark can reach
)

// Pump is the hot path: it decodes the events of the change stream, routes them and delivers them
// to the dispatcher. A single goroutine runs it. All that an event needs is reused, so an event
// costs no allocation.
type Pump struct {
	recordBuilder

	BuildConfig
	PumpConfig

	// sweptEvents are sent by the sweep that precedes this stream (N22). It is nil once the stream
	// has passed them.
	sweptEvents *gap.Skip

	// State of the current event, and buffers reused for the next one.
	ev             changestream.Event
	item           Item
	nsBuf          []byte
	lastCollection [16]byte
	readAt         time.Time // when the current envelope was read
	swept          bool      // the current event comes from a sweep
	eventCount     int
	replaying      bool // the stream has not passed ReplayUntil
}

// Term is the term of ownership that the pump works for.
type Term interface {
	// HandleDDL handles an event that is not an insert.
	HandleDDL(ctx context.Context, ev *changestream.Event) error
	// AdoptCollection registers the collection of ev, which is new.
	AdoptCollection(ctx context.Context, ev *changestream.Event) error
	// NoteIrregularID returns once the registry has recorded that the ids of the collection with this UUID
	// must not be used as times.
	NoteIrregularID(ctx context.Context, uuid [16]byte) error
	// NoteScheduled notes a scheduled envelope. It returns once a later owner will look for scheduled envelopes in the collection.
	NoteScheduled(ctx context.Context, ns string, id bson.RawValue, dueAt time.Time) error
	// NoteProgress is called for each batch, also for an empty one.
	NoteProgress()
	// CountDropped is called for each envelope of the stream that is discarded, with the class of the reason.
	CountDropped(class record.Class)
}

// PumpConfig contains the parts and settings of a pump. All fields are required, except where the
// comment allows nil.
type PumpConfig struct {
	Dispatcher  *Dispatcher
	Term        Term
	Collections map[[16]byte]bool // registered for this watcher, by UUID (N25)
	Stored      StoredTopics      // finds the envelopes that a sweep must not send again

	DropExpired      bool   // drop expired envelopes instead of dead-lettering them
	RecordDeliveries bool   // record every delivery on its envelope
	StampMargin      uint32 // seconds by which a server timestamp may precede the commit

	// Events that the stream repeats although they were delivered or stored before. The pump sets
	// Previous and DrainedSlots to nil once the stream has passed the part that they cover.
	ReplayUntil  bson.Timestamp // end of the part whose records the read-back may have found
	Previous     *PreviousOwner // waiting envelopes and dead letters of the previous owner
	DrainedSlots []DrainedSlot  // slots of an earlier division of the watcher (N28)
}

// NewPump returns a pump that has not read any event.
func NewPump(b BuildConfig, c PumpConfig) *Pump {
	return &Pump{recordBuilder: b.newBuilder(), BuildConfig: b, PumpConfig: c, replaying: true}
}

// SkipSwept returns the set of events that the following stream may repeat after a sweep. It uses
// at most the given bytes.
func (p *Pump) SkipSwept(bytes int64) *gap.Skip {
	if p.sweptEvents == nil {
		p.sweptEvents = gap.NewSkip(bytes)
	}
	return p.sweptEvents
}

// Run pumps batches until the reader closes in, and then returns nil. It returns early with the
// first error, or with the cause of ctx when ctx ends.
func (p *Pump) Run(ctx context.Context, in <-chan *changestream.Batch) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)

		case b, open := <-in:
			if !open {
				return nil
			}

			p.Term.NoteProgress()
			if err := p.handleBatch(ctx, b); err != nil {
				return err
			}
		}
	}
}

// handleBatch delivers the events of b in order and then releases b. It blocks while the dispatcher
// has no room.
func (p *Pump) handleBatch(ctx context.Context, b *changestream.Batch) error {
	for _, raw := range b.Docs {
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
	p.Dispatcher.Position(b.Position)
	p.Dispatcher.Flush()

	if p.replaying && b.Position.ClusterTime.After(p.ReplayUntil) {
		p.Dispatcher.EndReplay()
		p.replaying = false
		p.Previous = nil
	}

	b.Release()
	// One large record must not keep its memory until the next event.
	p.filler.Release()
	return nil
}

// handleEvent parses one event of the stream into p.ev. It delivers the event unless the event is
// not an insert into a watched collection, or was delivered before.
func (p *Pump) handleEvent(ctx context.Context, raw []byte) error {
	if err := changestream.Parse(raw, &p.ev); err != nil {
		return err
	}
	if p.ev.Op != changestream.Insert {
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

	if p.DrainedSlots != nil && p.deliveredByOldSlot() {
		return nil
	}
	if p.sweptEvents != nil && p.deliveredBySweep() {
		return nil
	}

	return p.deliverInsert(ctx, p.ev.WallMS)
}

// deliverInsert delivers the insert in p.ev, which comes from the stream or from a sweep. It blocks
// while the dispatcher has no room.
func (p *Pump) deliverInsert(ctx context.Context, commitMS int64) error {
	item := &p.item
	*item = Item{
		CommitMS: commitMS,
		Raw:      p.ev.Document,
		DB:       p.ev.DB,
		Coll:     p.ev.Coll,
		Pos:      p.ev.Data,
		Records:  item.Records[:0],
	}
	fillErr := p.fillItem(item)

	// The stream and a sweep repeat envelopes of the previous owner. Topics for which it dead-lettered the
	// envelope, or left it waiting, are settled. It may have died before it sent the others, so
	// those are delivered here (N15).
	stored, err := p.storedTopics(ctx)
	if err != nil {
		return err
	}
	if stored.found {
		item.Records = dropTopics(item.Records, stored.topics)
		// Even if the envelope has expired since, the reconciler decides about it when its
		// turn comes.
		if len(item.Records) == 0 || fillErr != nil {
			return nil
		}
		return p.Dispatcher.Deliver(ctx, item)
	}

	if fillErr != nil {
		return p.rejectEnvelope(ctx, item, fillErr)
	}
	if p.view.HasDueAt {
		return p.Term.NoteScheduled(ctx, p.namespace(), p.documentID(), time.UnixMilli(p.view.DueAt))
	}

	if err := p.checkIDTime(ctx); err != nil {
		return err
	}
	p.recordDelivery(item)
	item.Follow = p.follow(p.readAt, &p.view, item.Records, p.ev.DB, p.ev.Coll, item.CommitMS)
	return p.Dispatcher.Deliver(ctx, item)
}

// stored has the topics of an envelope that was stored before.
type stored struct {
	found  bool     // it waits, is dead, or was sent since it waited
	topics []string // for which it waits or is dead; "" is for all
}

// storedTopics returns the topics for which the envelope in p.ev was stored before.
func (p *Pump) storedTopics(ctx context.Context) (stored, error) {
	switch {
	case !p.ev.HasDocument:
		return stored{}, nil
	case p.swept:
		topics, found, err := p.Stored.TopicsOf(ctx, p.namespace(), p.ev.Document)
		return stored{found, topics}, err
	case p.Previous != nil:
		topics, found := p.Previous.topicsOf(p.namespace(), p.documentID(), &p.ev)
		return stored{found, topics}, nil
	}
	return stored{}, nil
}

// fillItem parses the envelope in p.ev and appends one record per target to item. The records share
// key, value and headers. An envelope that the reconciler owns gets none. The error is a
// *record.Refusal.
func (p *Pump) fillItem(item *Item) error {
	if !p.ev.HasDocument {
		item.Raw = envelopeWithIDOnly(&p.ev)
		return &record.Refusal{Class: record.Malformed, Reason: string(p.ev.Note)}
	}

	if err := p.mapping.Parse(p.ev.Document, &p.view); err != nil {
		return err
	}
	item.Key = p.view.OrderingKey()
	// A scheduled envelope is sent when it is due.
	if p.view.HasDueAt {
		return nil
	}
	// In the replay, the previous owner may have sent it in time. Only its records show that.
	p.readAt = p.Now()
	expired := p.checkExpiry(p.readAt)
	if expired != nil && !p.replaying {
		return expired
	}

	p.meta.DB = p.ev.DB
	p.meta.Coll = p.ev.Coll
	p.meta.ClusterTime = p.ev.ClusterTime
	p.meta.CommitMS = p.ev.WallMS

	var err error
	item.Records, _, err = p.buildRecords(item.Records, nil)

	// If the previous owner sent a record of the envelope in time, the envelope has not expired.
	// That owner began all targets together, so the remaining targets get their records as well.
	if err == nil && expired != nil && !slices.ContainsFunc(item.Records, p.isInTopic) {
		item.Records = item.Records[:0]
		return expired
	}
	return err
}

// isInTopic reports whether the read-back has found the record in its topic.
func (p *Pump) isInTopic(r record.Record) bool {
	_, _, ok := p.Dispatcher.sink.FindHit(&r)
	return ok
}

// recordDelivery requests that the delivery of item is recorded on its envelope, if the configuration
// requires it.
func (p *Pump) recordDelivery(item *Item) {
	if !p.RecordDeliveries {
		return
	}

	// A timestamp far older than the commit was copied here with the document. It is unrelated to
	// this insert.
	stamp := p.view.TS
	if p.ev.ClusterTime.T > stamp.T+p.StampMargin {
		stamp = bson.Timestamp{}
	}

	id := p.documentID()
	// The delivery is recorded after the batch is released, so its fields must not alias the batch.
	item.Sent = &Delivery{Outcome: ledger.Outcome{
		NS:         p.namespace(),
		EnvelopeID: bson.RawValue{Type: id.Type, Value: slices.Clone(id.Value)},
		Stamp:      stamp,
	}}
}

// checkIDTime compares the time in the id of an envelope without a stamp with the commit of its event.
// If they differ by more than the margin, it returns once the registry has recorded that the ids of the
// collection are irregular (N25). That must happen before the watermark passes the event. A swept
// envelope has no commit time to compare with.
func (p *Pump) checkIDTime(ctx context.Context) error {
	if !p.view.TS.IsZero() || p.ev.ClusterTime.IsZero() || !p.ev.HasUUID {
		return nil
	}

	at, ok := outboxes.IDTime(p.ev.IDType, p.ev.ID)
	if !ok || time.Unix(int64(p.ev.ClusterTime.T), 0).Sub(at).Abs() <= outboxes.ClockMargin {
		return nil
	}
	return p.Term.NoteIrregularID(ctx, p.ev.UUID)
}

// documentID returns the _id of the envelope in p.ev. It aliases the batch.
func (p *Pump) documentID() bson.RawValue {
	return bson.Raw(p.ev.Document).Lookup("_id")
}

// namespace returns "database.collection" of p.ev.
func (p *Pump) namespace() string {
	p.nsBuf = append(p.nsBuf[:0], p.ev.DB...)
	p.nsBuf = append(p.nsBuf, '.')
	p.nsBuf = append(p.nsBuf, p.ev.Coll...)
	return string(p.nsBuf)
}

// rejectEnvelope dead-letters the envelope of item if err is a *record.Refusal, and returns any
// other err. An expired envelope is dropped instead if it is configured so.
func (p *Pump) rejectEnvelope(ctx context.Context, item *Item, err error) error {
	refusal, ok := errors.AsType[*record.Refusal](err)
	if !ok {
		return err
	}

	if refusal.Class == record.Dropped || refusal.Class == record.Expired && p.DropExpired {
		p.Term.CountDropped(refusal.Class)
		return nil
	}

	item.Dead = refusal
	item.Records = item.Records[:0]
	return p.Dispatcher.Deliver(ctx, item)
}

// envelopeWithIDOnly returns an envelope that contains only the id of ev. It is for an event that
// was too large for the stream, and whose document was gone when it was fetched (N24).
func envelopeWithIDOnly(ev *changestream.Event) []byte {
	raw, err := bson.Marshal(bson.D{{Key: "_id", Value: bson.RawValue{Type: bson.Type(ev.IDType), Value: ev.ID}}})
	if err != nil {
		return nil
	}
	return raw
}
