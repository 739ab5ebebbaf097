package app

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

// findNextStart decides what follows an end of the stream: another start, or none, and then the error to end the term with.
func (t *term) findNextStart(ctx context.Context, err error) (changestream.Start, error) {
	if ctx.Err() != nil {
		return changestream.Start{}, err
	}
	if invalid, ok := errors.AsType[*changestream.InvalidateError](err); ok {
		return t.resumeAfterInvalidate(ctx, invalid)
	}
	gap, ok := errors.AsType[*changestream.GapError](err)
	if !ok {
		return changestream.Start{}, err
	}
	at, hasTime := gap.Position.Time()
	if hasTime && !gap.Position.Token.IsZero() && gap.Position.Compare(t.reopenedAt) != 0 && !gap.Ahead {
		// What the token cannot do, the time may: if the oplog still holds it, nothing is lost (design of the gap path, step 2).
		t.reopenedAt = gap.Position.Clone()
		t.log.Warn("the stream does not go on from its token; reopening it by time", "reason", gap)
		t.appendEvent(ctx, store.GapFound, bson.D{{Key: "reason", Value: gap.Reason}, {Key: "code", Value: gap.Code}, {Key: "reopened", Value: "by time"}})
		return changestream.Start{Position: gap.Position, At: &at}, nil
	}
	t.metrics.Gaps.WithLabelValues(gap.Reason).Inc()
	if t.cfg.LostHistory == resume.HaltLostHistory {
		t.appendEvent(ctx, store.GapFound, bson.D{{Key: "reason", Value: gap.Reason}, {Key: "code", Value: gap.Code}})
		return changestream.Start{}, &HaltError{
			What: "the change stream cannot go on",
			Err:  gap,
			Fix:  "no envelope is lost: they are in the outbox; set lost_history: sweep, and the relay delivers what lies behind the gap",
		}
	}
	return t.openGap(ctx, gap)
}

// resumeAfterInvalidate goes on behind the drop or rename of the watched collection, or halts, by policy.
func (t *term) resumeAfterInvalidate(ctx context.Context, e *changestream.InvalidateError) (changestream.Start, error) {
	t.appendEvent(ctx, store.Invalidated, bson.D{{Key: "collection", Value: e.NS}, {Key: "by", Value: e.Op.String()}})
	if t.cfg.Invalidate == "halt" {
		return changestream.Start{}, &HaltError{What: "the watched collection is gone", Err: e, Fix: "run `outrelay recover`, or set invalidate: resume"}
	}
	t.log.Warn("the watched collection is gone; going on with the one that gets its name", "collection", e.NS, "by", e.Op.String())
	none := []lease.Collection{} // the identity of the collection to come is not known yet
	if err := t.retryFenced(ctx, func() error { return t.held.Save(ctx, lease.Update{Collections: &none}) }); err != nil {
		return changestream.Start{}, err
	}
	t.dispatcher.Position(e.Position)
	return changestream.Start{Position: e.Position}, nil
}

// handleDDL handles a drop or rename (N27): an audit entry, and for a rename the question of who has read the collection. What
// waited in a dropped one is gone with it; its gates open with the next audit.
func (t *term) handleDDL(ctx context.Context, ev *changestream.Event) error {
	from, to := t.scope.Matches(ev.DB, ev.Coll), t.scope.Matches(ev.ToDB, ev.ToColl)
	// On the stream of one collection an invalidate follows, which is announced.
	if (from || to || ev.Op == changestream.DropDatabase) && t.scope.Kind() != changestream.Collection {
		kind := store.Dropped
		if ev.Op == changestream.Rename {
			kind = store.Renamed
		}
		t.appendEvent(ctx, kind, bson.D{{Key: "db", Value: string(ev.DB)}, {Key: "collection", Value: string(ev.Coll)}, {Key: "by", Value: ev.Op.String()}})
	}
	if ev.Op == changestream.Rename && (from || to) {
		return t.handleRename(ctx, ev, from, to)
	}
	return nil
}
