package app

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/tracing"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
)

const (
	flushEvery    = 64  // events after which idle lanes are woken inside a batch
	positionEvery = 256 // events after which the watermark can rest inside a batch
)

// pump is the hot path: decode → route → dispatch. One goroutine runs it; what it reuses lives in it, so that an event
// costs no allocation.
type pump struct {
	recordBuilder
	scope        *changestream.Scope
	dispatcher   *dispatch.Dispatcher
	handleDDL    func(ctx context.Context, ev *changestream.Event) error
	now          func() time.Time // the server's time, for expiry
	replayWindow replayWindow
	// foundByReadBack reports whether the read-back has found a record in its topic.
	foundByReadBack func(record.Record) bool
	reportProgress  func() // after each batch, empty ones too
	tap             *tracing.Tap

	drainedSlots    []drainedSlot     // of slots that are no more; nil when the stream is past them (N28)
	sweptEvents     *reconcile.Skip   // what a sweep has sent of the stream that follows it; nil when the stream is past that
	collections     map[[16]byte]bool // registered as ours (N25)
	adoptCollection func(ctx context.Context, ev *changestream.Event) error
	dropExpired     bool
	countDropped    func()

	recordDeliveries bool   // each delivery is to be written down
	stampMargin      uint32 // seconds by which a stamp may be older than the commit of its envelope
	previous         *previousOwner
	onScheduled      func(ns string, id bson.RawValue, dueAt time.Time) // hears of scheduled envelopes

	ev             changestream.Event
	item           dispatch.Item
	nsBuf          []byte
	dirty          *dirtyList
	lastCollection [16]byte // collection of the event before
	eventCount     int
}

// replayWindow is the stretch of the stream that the read-back covers.
type replayWindow struct {
	until bson.Timestamp
	end   func()
}

// run works until the reader ends, and returns nil then, or until ctx does, whose cause it returns.
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
			p.dispatcher.Position(resume.Position{Token: slices.Clone(resume.Token(p.ev.Token)), ClusterTime: p.ev.ClusterTime})
		}
	}
	p.dispatcher.Position(b.Position)
	p.dispatcher.Flush()
	if p.replayWindow.end != nil && b.Position.ClusterTime.After(p.replayWindow.until) {
		p.replayWindow.end()
		p.replayWindow.end, p.previous = nil, nil
	}
	b.Release()
	return nil
}

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

// deliverInsert brings the present event to the dispatcher.
func (p *pump) deliverInsert(ctx context.Context, commitMS int64) error {
	it := &p.item
	*it = dispatch.Item{CommitMS: commitMS, Raw: p.ev.Document, DB: p.ev.DB, Coll: p.ev.Coll, Pos: p.ev.Data, Records: it.Records[:0]}
	err := p.fillItem(it)
	if p.ev.HasDocument { // before it can pass for an exception of an earlier owner
		if forged := p.checkSeal(); forged != nil {
			it.Records = it.Records[:0]
			return p.rejectEnvelope(ctx, it, forged)
		}
	}
	if p.previous != nil {
		id := bson.Raw(p.ev.Document).Lookup("_id")
		dead := false
		if it.Records, dead = p.previous.removeDeadTopics(p.namespace(), id, p.ev.Data, it.Records); dead && err == nil && len(it.Records) == 0 {
			return nil // an earlier owner moved it to the dead letters
		}
		rest, known := p.previous.removeWaitingTopics(p.namespace(), id, it.Records)
		switch {
		case known && (err != nil || len(rest) == 0):
			return nil // an earlier owner made an exception of it (N15); whether it has expired since is judged when its turn comes
		case known:
			it.Records = rest
			return p.dispatcher.Deliver(ctx, it)
		}
	}
	if err != nil {
		return p.rejectEnvelope(ctx, it, err)
	}
	if p.ownedByReconciler() {
		return p.leaveToReconciler(ctx)
	}
	p.recordDelivery(it)
	p.traceDelivery(it)
	return p.dispatcher.Deliver(ctx, it)
}

// ownedByReconciler: an insert that carries a state or a due time is never sent by the stream (N16, N19).
func (p *pump) ownedByReconciler() bool { return p.view.State != nil || p.view.HasDueAt }

// leaveToReconciler makes sure, before the watermark passes an envelope of the reconciler's, that its collection is looked at (N17).
func (p *pump) leaveToReconciler(ctx context.Context) error {
	ns := p.namespace()
	if err := p.dirty.mark(ctx, ns); err != nil {
		return err
	}
	if p.view.State == nil && p.onScheduled != nil {
		p.onScheduled(ns, bson.Raw(p.ev.Document).Lookup("_id"), time.UnixMilli(p.view.DueAt))
	}
	return nil
}

// fillItem makes one record per target; they share key, value and headers. Its error is a *record.Refusal.
func (p *pump) fillItem(it *dispatch.Item) error {
	if !p.ev.HasDocument {
		it.Raw = envelopeWithIDOnly(&p.ev)
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
	p.meta.DB, p.meta.Coll, p.meta.ClusterTime, p.meta.CommitMS = p.ev.DB, p.ev.Coll, p.ev.ClusterTime, p.ev.WallMS
	var err error
	it.Records, _, err = p.buildRecords(it.Records, nil)
	// What an earlier owner sent in time has not expired. It began all targets together, so the others get theirs as well.
	if err == nil && expired != nil && !slices.ContainsFunc(it.Records, p.foundByReadBack) {
		it.Records, err = it.Records[:0], expired
	}
	return err
}

// recordDelivery is what is written down of a delivery: where that is asked for, and where an envelope has no stamp of the
// server, so that neither sweep nor purge could tell it from one that was not sent (N25).
func (p *pump) recordDelivery(it *dispatch.Item) {
	ts := p.view.TS
	if p.ev.ClusterTime.T > ts.T+p.stampMargin {
		ts = bson.Timestamp{} // copied here with a stamp of its own, which says nothing about it
	}
	if !p.recordDeliveries && !ts.IsZero() {
		return
	}
	id := bson.Raw(p.ev.Document).Lookup("_id")
	it.Sent = &dispatch.Sent{NS: p.namespace(), ID: bson.RawValue{Type: id.Type, Value: slices.Clone(id.Value)}, TS: ts}
}

func (p *pump) namespace() string {
	p.nsBuf = append(append(append(p.nsBuf[:0], p.ev.DB...), '.'), p.ev.Coll...)
	return string(p.nsBuf)
}

// rejectEnvelope hands an envelope that cannot be sent to the dead letters; an expired one may be dropped by policy.
func (p *pump) rejectEnvelope(ctx context.Context, it *dispatch.Item, err error) error {
	why, ok := errors.AsType[*record.Refusal](err)
	if !ok {
		return err
	}
	if why.Class == record.Expired && p.dropExpired {
		p.countDropped()
		return nil
	}
	it.Dead, it.Records = why, it.Records[:0]
	return p.dispatcher.Deliver(ctx, it)
}
