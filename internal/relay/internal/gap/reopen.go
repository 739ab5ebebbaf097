package gap

import (
	"context"
	"crypto/sha256"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// FindNextStart returns where to start the stream again after it ended with err. If the stream
// cannot continue, it returns the error that ends the term.
func (r *Recovery) FindNextStart(ctx context.Context, err error) (changes.Start, error) {
	if ctx.Err() != nil {
		return changes.Start{}, err
	}
	if invalid, ok := errors.AsType[*changes.InvalidateError](err); ok {
		return r.resumeAfterInvalidate(ctx, invalid)
	}
	lost, ok := errors.AsType[*changes.GapError](err)
	if !ok {
		return changes.Start{}, err
	}

	// If the token cannot be resumed, the time may still work: as long as the oplog holds that
	// time, nothing is lost (design of the gap path, step 2). Each position gets one such attempt.
	at, hasTime := lost.Position.Time()
	if hasTime && !lost.Position.Token.IsZero() && lost.Position.Compare(r.reopenedAt) != 0 && !lost.Ahead {
		r.reopenedAt = lost.Position.Clone()
		r.Log.Warn("cannot resume the change stream from its token; reopening it by time", "error", lost)
		r.AppendEvent(ctx, nodes.GapFound, bson.D{
			{Key: "reason", Value: lost.Reason},
			{Key: "code", Value: lost.Code},
			{Key: "reopened", Value: "by time"},
		})
		return changes.Start{Position: lost.Position, At: &at}, nil
	}

	r.Metrics.Gaps.WithLabelValues(lost.Reason).Inc()
	if r.Config.LostHistory == "halt" {
		r.AppendEvent(ctx, nodes.GapFound, bson.D{
			{Key: "reason", Value: lost.Reason},
			{Key: "code", Value: lost.Code},
		})
		return changes.Start{}, &readiness.HaltError{
			What: "the change stream cannot continue",
			Err:  lost,
			Fix: "set lost_history: sweep, and the relay delivers the missing events from the outbox; " +
				"no envelope is lost",
		}
	}
	return r.openGap(ctx, lost)
}

// resumeAfterInvalidate returns the start after the drop or rename of the watched collection. It
// returns a *HaltError if it is configured so.
func (r *Recovery) resumeAfterInvalidate(
	ctx context.Context, invalidated *changes.InvalidateError,
) (changes.Start, error) {
	r.AppendEvent(ctx, nodes.Invalidated, bson.D{
		{Key: "collection", Value: invalidated.NS},
		{Key: "by", Value: invalidated.Op.String()},
	})
	if r.Config.Invalidate == "halt" {
		return changes.Start{}, &readiness.HaltError{
			What: "the watched collection is gone",
			Err:  invalidated,
			Fix:  "run `outrelay recover`, or set invalidate: resume",
		}
	}
	r.Log.Warn("the watched collection is gone; continuing with the next collection of its name",
		"collection", invalidated.NS, "by", invalidated.Op.String())

	r.Dispatcher.Position(invalidated.Position)
	return changes.Start{Position: invalidated.Position}, nil
}

// HandleDDL handles a drop or rename (N27). It appends an audit entry and registers or sweeps a
// renamed collection. The waiting events of a dropped collection are removed if it is configured so. renamed reports whether a collection has got
// or lost a watched name: the stream contains the renames of all collections.
func (r *Recovery) HandleDDL(ctx context.Context, ev *changes.Event) (renamed bool, err error) {
	from := r.Scope.Matches(ev.DB, ev.Coll)
	to := r.Scope.Matches(ev.ToDB, ev.ToColl)

	// On the stream of a single collection an invalidate event follows, which gets its own entry.
	if (from || to) && r.Scope.Kind() != changes.Collection {
		kind := nodes.Dropped
		if ev.Op == changes.Rename {
			kind = nodes.Renamed
		}
		r.AppendEvent(ctx, kind, bson.D{
			{Key: "db", Value: string(ev.DB)},
			{Key: "collection", Value: string(ev.Coll)},
			{Key: "by", Value: ev.Op.String()},
		})
	}

	switch {
	case ev.Op == changes.Rename && (from || to):
		return true, r.handleRename(ctx, ev, from, to)
	// Before the drop of a database, the stream contains those of its collections.
	case ev.Op == changes.Drop && from:
		if err := r.handleDrop(ctx, ev); err != nil {
			return false, err
		}
		return false, r.Collections.ForgetCollection(ctx, ev)
	}
	return false, nil
}

// dropDrain is how long a drop waits for the events before it. Those that have no result by then may be stored as waiting later, and
// are sent all the same.
const dropDrain = 2 * time.Second

// handleDrop removes the waiting events of a dropped collection, unless it is configured to keep them. It reports them with the
// scheduled events, which were in the collection itself. An event that another term stored after the drop, of a later collection of the
// name, has a later position and stays.
func (r *Recovery) handleDrop(ctx context.Context, ev *changes.Event) error {
	defer r.Calls.KeepTicking(ctx, tickEvery)()
	db, coll, before := string(ev.DB), string(ev.Coll), string(ev.Pos)
	discards := r.Config.OnDrop != "keep"

	// The events before the drop are still on their way, and some of them may have to wait.
	if discards {
		drain, cancel := context.WithTimeout(ctx, dropDrain)
		_ = r.Dispatcher.Drain(drain)
		cancel()
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
	}

	var dropped lease.Discarded
	err := r.Calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		if dropped.Scheduled, err = r.CountScheduled(ctx, db, coll); err == nil && discards {
			dropped.Events, err = r.CountWaiting(ctx, db, coll, before)
		}
		return err
	})
	if err != nil || dropped.Events+dropped.Scheduled == 0 {
		return err
	}

	// Another owner may have to continue, which finds fewer events. So the incident is stored first, and the drop identifies it.
	dropped.NS = db + "." + coll
	incident := lease.Incident{ID: incidentID(ev.Pos), At: r.Now(), Discarded: &dropped}
	if err := r.Calls.RetryFenced(ctx, func() error { return r.Held.Save(ctx, lease.Update{Incident: &incident}) }); err != nil {
		return err
	}
	if dropped.Events > 0 {
		err := r.Calls.RetryFenced(ctx, func() error {
			_, err := r.Discard(ctx, db, coll, before)
			return err
		})
		if err != nil {
			return err
		}
	}

	r.Log.Warn("events of a dropped collection are not sent", "db", db, "collection", coll, "waiting", dropped.Events, "scheduled", dropped.Scheduled,
		"fix", "on_drop: keep sends the waiting events; only a backup has the scheduled ones")
	r.AppendEvent(ctx, nodes.WaitingDiscarded, bson.D{
		{Key: "db", Value: db},
		{Key: "collection", Value: coll},
		{Key: "count", Value: dropped.Events},
		{Key: "scheduled", Value: dropped.Scheduled},
	})
	return nil
}

// incidentID returns the id of the incident of an event of the stream: each owner that handles the event has the same one.
func incidentID(position []byte) (id bson.ObjectID) {
	digest := sha256.Sum256(position)
	copy(id[:], digest[:])
	return id
}
