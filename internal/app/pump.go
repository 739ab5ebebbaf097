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
	filling
	scope  *changestream.Scope
	disp   *dispatch.Dispatcher
	ddl    func(ctx context.Context, ev *changestream.Event) error
	now    func() time.Time // the server's time, for expiry
	replay replay
	// standing reports whether the read-back has found a record in its topic.
	standing func(record.Record) bool
	tick     func() // after each batch, empty ones too
	tap      *tracing.Tap

	passed      []passed          // of slots that are no more; nil when the stream is past them (N28)
	skip        *reconcile.Skip   // what a sweep has sent of the stream that follows it; nil when the stream is past that
	collections map[[16]byte]bool // registered as ours (N25)
	adopt       func(ctx context.Context, ev *changestream.Event) error
	dropExpired bool
	dropped     func()

	remember bool   // each delivery is to be written down
	margin   uint32 // seconds by which a stamp may be older than the commit of its envelope
	owned    *owned
	saw      func(ns string, id bson.RawValue, dueAt time.Time) // hears of scheduled envelopes

	ev    changestream.Event
	item  dispatch.Item
	ns    []byte
	known *dirty
	last  [16]byte // collection of the event before
	count int
}

// replay is the stretch of the stream that the read-back covers.
type replay struct {
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
			p.tick()
			if err := p.batch(ctx, b); err != nil {
				return err
			}
		}
	}
}

func (p *pump) batch(ctx context.Context, b *changestream.Batch) error {
	for _, raw := range b.Docs {
		if err := p.one(ctx, raw); err != nil {
			return err
		}
		p.count++
		if p.count%flushEvery == 0 {
			p.disp.Flush()
		}
		if p.count%positionEvery == 0 {
			p.disp.Position(resume.Position{Token: slices.Clone(resume.Token(p.ev.Token)), ClusterTime: p.ev.ClusterTime})
		}
	}
	p.disp.Position(b.Position)
	p.disp.Flush()
	if p.replay.end != nil && b.Position.ClusterTime.After(p.replay.until) {
		p.replay.end()
		p.replay.end, p.owned = nil, nil
	}
	b.Release()
	return nil
}

func (p *pump) one(ctx context.Context, raw []byte) error {
	if err := changestream.Parse(raw, &p.ev); err != nil {
		return err
	}
	if p.ev.Op != changestream.Insert {
		return p.ddl(ctx, &p.ev)
	}
	if !p.scope.Matches(p.ev.DB, p.ev.Coll) {
		return nil
	}
	if p.ev.UUID != p.last && p.ev.HasUUID {
		if !p.collections[p.ev.UUID] {
			if err := p.adopt(ctx, &p.ev); err != nil {
				return err
			}
		}
		p.last = p.ev.UUID
	}
	if p.passed != nil && p.hadPassed() {
		return nil
	}
	if p.skip != nil && p.wasSwept() {
		return nil
	}
	return p.hand(ctx, p.ev.WallMS)
}

// hand brings the present event to the dispatcher.
func (p *pump) hand(ctx context.Context, commitMS int64) error {
	it := &p.item
	*it = dispatch.Item{CommitMS: commitMS, Raw: p.ev.Document, DB: p.ev.DB, Coll: p.ev.Coll, Pos: p.ev.Data, Records: it.Records[:0]}
	err := p.fill(it)
	if p.ev.HasDocument { // before it can pass for an exception of an earlier owner
		if forged := p.refuseForged(); forged != nil {
			it.Records = it.Records[:0]
			return p.refused(ctx, it, forged)
		}
	}
	if p.owned != nil {
		id := bson.Raw(p.ev.Document).Lookup("_id")
		dead := false
		if it.Records, dead = p.owned.alive(p.namespace(), id, p.ev.Data, it.Records); dead && err == nil && len(it.Records) == 0 {
			return nil // an earlier owner moved it to the dead letters
		}
		rest, known := p.owned.leave(p.namespace(), id, it.Records)
		switch {
		case known && (err != nil || len(rest) == 0):
			return nil // an earlier owner made an exception of it (N15); whether it has expired since is judged when its turn comes
		case known:
			it.Records = rest
			return p.disp.Deliver(ctx, it)
		}
	}
	if err != nil {
		return p.refused(ctx, it, err)
	}
	if p.ownedByReconciler() {
		return p.leave(ctx)
	}
	p.remembered(it)
	p.followed(it)
	return p.disp.Deliver(ctx, it)
}

// ownedByReconciler: an insert that carries a state or a due time is never sent by the stream (N16, N19).
func (p *pump) ownedByReconciler() bool { return p.view.State != nil || p.view.HasDueAt }

// leave makes sure, before the watermark passes an envelope of the reconciler's, that its collection is looked at (N17).
func (p *pump) leave(ctx context.Context) error {
	ns := p.namespace()
	if err := p.known.mark(ctx, ns); err != nil {
		return err
	}
	if p.view.State == nil && p.saw != nil {
		p.saw(ns, bson.Raw(p.ev.Document).Lookup("_id"), time.UnixMilli(p.view.DueAt))
	}
	return nil
}

// fill makes one record per target; they share key, value and headers. Its error is a *record.Refusal.
func (p *pump) fill(it *dispatch.Item) error {
	if !p.ev.HasDocument {
		it.Raw = withoutDocument(&p.ev)
		return &record.Refusal{Class: record.Malformed, Reason: string(p.ev.Note)}
	}
	if err := event.Parse(p.ev.Document, &p.view); err != nil {
		return err
	}
	if p.ownedByReconciler() {
		return nil
	}
	expired := p.expired(p.now())
	if expired != nil && p.replay.end == nil {
		return expired
	}
	p.meta.DB, p.meta.Coll, p.meta.ClusterTime, p.meta.CommitMS = p.ev.DB, p.ev.Coll, p.ev.ClusterTime, p.ev.WallMS
	var err error
	it.Records, _, err = p.records(it.Records, nil)
	// What an earlier owner sent in time has not expired. It began all targets together, so the others get theirs as well.
	if err == nil && expired != nil && !slices.ContainsFunc(it.Records, p.standing) {
		it.Records, err = it.Records[:0], expired
	}
	return err
}

// remembered is what is written down of a delivery: where that is asked for, and where an envelope has no stamp of the
// server, so that neither sweep nor purge could tell it from one that was not sent (N25).
func (p *pump) remembered(it *dispatch.Item) {
	ts := p.view.TS
	if p.ev.ClusterTime.T > ts.T+p.margin {
		ts = bson.Timestamp{} // copied here with a stamp of its own, which says nothing about it
	}
	if !p.remember && !ts.IsZero() {
		return
	}
	id := bson.Raw(p.ev.Document).Lookup("_id")
	it.Sent = &dispatch.Sent{NS: p.namespace(), ID: bson.RawValue{Type: id.Type, Value: slices.Clone(id.Value)}, TS: ts}
}

func (p *pump) namespace() string {
	p.ns = append(append(append(p.ns[:0], p.ev.DB...), '.'), p.ev.Coll...)
	return string(p.ns)
}

// refused hands an envelope that cannot be sent to the dead letters; an expired one may be dropped by policy.
func (p *pump) refused(ctx context.Context, it *dispatch.Item, err error) error {
	why, ok := errors.AsType[*record.Refusal](err)
	if !ok {
		return err
	}
	if why.Class == record.Expired && p.dropExpired {
		p.dropped()
		return nil
	}
	it.Dead, it.Records = why, it.Records[:0]
	return p.disp.Deliver(ctx, it)
}
