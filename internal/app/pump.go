package app

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/tracing"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

// A batch of the change stream can hold thousands of events. Idle lanes are flushed and positions
// are set inside a batch as well, so that a large batch delays neither.
const (
	flushEvery    = 64  // events between two flushes of idle lanes
	positionEvery = 256 // events between two positions that the watermark can reach
)

// pump is the hot path: it decodes the events of the change stream, routes them and delivers them
// to the dispatcher. A single goroutine runs it. All that an event needs is reused, so an event
// costs no allocation.
type pump struct {
	recordBuilder

	scope           *changestream.Scope
	dispatcher      *pipeline.Dispatcher
	handleDDL       func(ctx context.Context, ev *changestream.Event) error
	adoptCollection func(ctx context.Context, ev *changestream.Event) error
	collections     map[[16]byte]bool // registered for this watcher, by UUID (N25)
	dirty           *dirtyList
	onScheduled     func(ns string, id bson.RawValue, dueAt time.Time)
	now             func() time.Time // server time, for expiry
	tap             *tracing.Tap
	reportProgress  func() // called for each batch, also for an empty one
	countDropped    func() // called for each expired envelope that is dropped

	dropExpired      bool   // drop expired envelopes instead of dead-lettering them
	recordDeliveries bool   // record every delivery on its envelope
	stampMargin      uint32 // seconds by which a server timestamp may precede the commit

	// Events that the stream repeats although they were dealt with before. Each field is nil once
	// the stream has passed the part that it covers.
	replayWindow replayWindow
	previous     *previousOwner // exceptions and dead letters of the previous owner
	drainedSlots []drainedSlot  // slots of an earlier division of the watcher (N28)
	sweptEvents  *gap.Skip      // sent by the sweep that precedes this stream (N22)

	// foundByReadBack reports whether the read-back has found the record in its topic.
	foundByReadBack func(record.Record) bool

	// State of the current event, and buffers reused for the next one.
	ev             changestream.Event
	item           pipeline.Item
	nsBuf          []byte
	lastCollection [16]byte
	eventCount     int
}

// replayWindow is the part of the stream that repeats events whose records the read-back may have
// found.
type replayWindow struct {
	until bson.Timestamp
	end   func() // nil once the stream has passed the window
}

// run pumps batches until the reader closes in, and then returns nil. It returns early with the
// first error, or with the cause of ctx when ctx ends.
func (p *pump) run(ctx context.Context, in <-chan *changestream.Batch) error {
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)

		case b, open := <-in:
			if !open {
				return nil
			}

			p.reportProgress()
			if err := p.handleBatch(ctx, b); err != nil {
				return err
			}
		}
	}
}

// handleBatch delivers the events of b in order and then releases b. It blocks while the dispatcher
// has no room.
func (p *pump) handleBatch(ctx context.Context, b *changestream.Batch) error {
	for _, raw := range b.Docs {
		if err := p.handleEvent(ctx, raw); err != nil {
			return err
		}

		p.eventCount++
		if p.eventCount%flushEvery == 0 {
			p.dispatcher.Flush()
		}
		if p.eventCount%positionEvery == 0 {
			// The token aliases the batch, and the dispatcher keeps it for longer.
			token := slices.Clone(resume.Token(p.ev.Token))
			p.dispatcher.Position(resume.Position{Token: token, ClusterTime: p.ev.ClusterTime})
		}
	}

	// The position of the batch can be later than its last event: the server also advances past
	// events that the pipeline filters out.
	p.dispatcher.Position(b.Position)
	p.dispatcher.Flush()

	if p.replayWindow.end != nil && b.Position.ClusterTime.After(p.replayWindow.until) {
		p.replayWindow.end()
		p.replayWindow.end = nil
		p.previous = nil
	}

	b.Release()
	return nil
}

// handleEvent parses one event of the stream into p.ev. It delivers the event unless the event is
// not an insert into a watched collection, or was delivered before.
func (p *pump) handleEvent(ctx context.Context, raw []byte) error {
	if err := changestream.Parse(raw, &p.ev); err != nil {
		return err
	}
	if p.ev.Op != changestream.Insert {
		return p.handleDDL(ctx, &p.ev)
	}
	if !p.scope.Matches(p.ev.DB, p.ev.Coll) {
		return nil
	}

	// A collection must be registered for this watcher before an event of it is sent (N25).
	// Consecutive events mostly share a collection, so the lookup is rare.
	if p.ev.UUID != p.lastCollection && p.ev.HasUUID {
		if !p.collections[p.ev.UUID] {
			if err := p.adoptCollection(ctx, &p.ev); err != nil {
				return err
			}
		}
		p.lastCollection = p.ev.UUID
	}

	if p.drainedSlots != nil && p.deliveredByOldSlot() {
		return nil
	}
	if p.sweptEvents != nil && p.deliveredBySweep() {
		return nil
	}

	return p.deliverInsert(ctx, p.ev.WallMS)
}

// deliverInsert delivers the insert in p.ev, which comes from the stream or from a sweep. It blocks
// while the dispatcher has no room.
func (p *pump) deliverInsert(ctx context.Context, commitMS int64) error {
	item := &p.item
	*item = pipeline.Item{
		CommitMS: commitMS,
		Raw:      p.ev.Document,
		DB:       p.ev.DB,
		Coll:     p.ev.Coll,
		Pos:      p.ev.Data,
		Records:  item.Records[:0],
	}
	fillErr := p.fillItem(item)

	// The seal is checked first. Otherwise a forged envelope could pass for an exception of the
	// previous owner.
	if p.ev.HasDocument {
		if forged := p.checkSeal(); forged != nil {
			item.Records = item.Records[:0]
			return p.rejectEnvelope(ctx, item, forged)
		}
	}

	// The stream repeats envelopes of the previous owner. Topics for which it dead-lettered the
	// envelope, or left it waiting, are settled. It may have died before it sent the others, so
	// those are delivered here (N15).
	if p.previous != nil {
		id := p.documentID()

		var dead, waiting bool
		item.Records, dead = p.previous.removeDeadTopics(p.namespace(), id, p.ev.Data, item.Records)
		if dead && fillErr == nil && len(item.Records) == 0 {
			return nil
		}

		item.Records, waiting = p.previous.removeWaitingTopics(p.namespace(), id, item.Records)
		if waiting && (fillErr != nil || len(item.Records) == 0) {
			// Not rejected, even if it has expired since: the reconciler decides that when the
			// envelope's turn comes.
			return nil
		}
		if waiting {
			return p.dispatcher.Deliver(ctx, item)
		}
	}

	if fillErr != nil {
		return p.rejectEnvelope(ctx, item, fillErr)
	}
	if p.ownedByReconciler() {
		return p.leaveToReconciler(ctx)
	}

	p.recordDelivery(item)
	p.traceDelivery(item)
	return p.dispatcher.Deliver(ctx, item)
}

// ownedByReconciler reports whether only the reconciler may send the envelope in p.view: it is an
// exception (N16), or it is scheduled (N19).
func (p *pump) ownedByReconciler() bool { return p.view.State != nil || p.view.HasDueAt }

// leaveToReconciler makes sure that the reconciler will find the envelope in p.ev. It returns once
// the collection is on the dirty list: after the watermark has passed the envelope, a later owner
// looks only at collections on that list (N17).
func (p *pump) leaveToReconciler(ctx context.Context) error {
	ns := p.namespace()
	if err := p.dirty.mark(ctx, ns); err != nil {
		return err
	}

	if p.view.State == nil && p.onScheduled != nil {
		p.onScheduled(ns, p.documentID(), time.UnixMilli(p.view.DueAt))
	}
	return nil
}

// fillItem parses the envelope in p.ev and appends one record per target to item. The records share
// key, value and headers. An envelope that the reconciler owns gets none. The error is a
// *record.Refusal.
func (p *pump) fillItem(item *pipeline.Item) error {
	if !p.ev.HasDocument {
		item.Raw = envelopeWithIDOnly(&p.ev)
		return &record.Refusal{Class: record.Malformed, Reason: string(p.ev.Note)}
	}

	if err := event.Parse(p.ev.Document, &p.view); err != nil {
		return err
	}
	if p.ownedByReconciler() {
		return nil
	}
	expired := p.checkExpiry(p.now())
	if expired != nil && p.replayWindow.end == nil {
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
	if err == nil && expired != nil && !slices.ContainsFunc(item.Records, p.foundByReadBack) {
		item.Records = item.Records[:0]
		return expired
	}
	return err
}

// recordDelivery requests that the delivery of item is recorded on its envelope. The configuration
// may require that. An envelope without a server timestamp always requires it: otherwise neither
// sweep nor purge could determine that it was sent (N25).
func (p *pump) recordDelivery(item *pipeline.Item) {
	// A timestamp far older than the commit was copied here with the document. It is unrelated to
	// this insert.
	stamp := p.view.TS
	if p.ev.ClusterTime.T > stamp.T+p.stampMargin {
		stamp = bson.Timestamp{}
	}
	if !p.recordDeliveries && !stamp.IsZero() {
		return
	}

	id := p.documentID()
	item.Sent = &pipeline.Sent{
		NS: p.namespace(),
		ID: bson.RawValue{Type: id.Type, Value: slices.Clone(id.Value)},
		TS: stamp,
	}
}

// documentID returns the _id of the envelope in p.ev. It aliases the batch.
func (p *pump) documentID() bson.RawValue {
	return bson.Raw(p.ev.Document).Lookup("_id")
}

// namespace returns "database.collection" of p.ev.
func (p *pump) namespace() string {
	p.nsBuf = append(p.nsBuf[:0], p.ev.DB...)
	p.nsBuf = append(p.nsBuf, '.')
	p.nsBuf = append(p.nsBuf, p.ev.Coll...)
	return string(p.nsBuf)
}

// rejectEnvelope dead-letters the envelope of item if err is a *record.Refusal, and returns any
// other err. An expired envelope is dropped instead if it is configured so.
func (p *pump) rejectEnvelope(ctx context.Context, item *pipeline.Item, err error) error {
	refusal, ok := errors.AsType[*record.Refusal](err)
	if !ok {
		return err
	}

	if refusal.Class == record.Expired && p.dropExpired {
		p.countDropped()
		return nil
	}

	item.Dead = refusal
	item.Records = item.Records[:0]
	return p.dispatcher.Deliver(ctx, item)
}
