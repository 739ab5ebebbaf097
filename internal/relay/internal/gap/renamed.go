package gap

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
)

// handleRename handles a rename that gives a collection a watched name, removes one, or both (N27).
// wasWatched and isWatched report whether the old and the new name are watched. A collection keeps its UUID, so
// the registry can store up to where the collection was read: the stream contains all inserts under
// a watched name, and none under any other name.
func (r *Recovery) handleRename(ctx context.Context, ev *changes.Event, wasWatched, isWatched bool) error {
	if !isWatched {
		return r.Collections.LeaveCollection(ctx, ev)
	}

	defer r.Calls.KeepTicking(ctx, tickEvery)()
	outbox, listed, err := r.findRenamed(ctx, ev)
	if err != nil {
		return err
	}
	if !listed {
		// The stream contains the later rename as well. The registry still has the time up to which
		// the collection was read.
		r.Log.Warn("a renamed collection has lost its watched name since; it is delivered when it gets one again",
			"collection", string(ev.ToDB)+"."+string(ev.ToColl))
		return nil
	}

	var before outboxes.Registration
	if ev.HasUUID {
		if before, err = r.Collections.ClaimCollection(ctx, outbox, ev.ClusterTime); err != nil {
			return err
		}
	}
	if !wasWatched {
		return r.sweepRenamed(ctx, ev, outbox, before)
	}

	// Its scheduled envelopes are looked for under the new name from here on.
	return r.Schedules.NoteExisting(ctx, []outboxes.Outbox{outbox})
}

// tickEvery is the interval of signs of life during the sweep of a renamed collection.
const tickEvery = 5 * time.Second

// renameListedWithin bounds the time until a rename that the stream contains is visible in the list
// of collections. The server shows the oplog entry a moment before it lists the new name.
const renameListedWithin = 3 * time.Second

// findRenamed returns the collection of a rename under its current name, which may be the result of
// a later rename. listed is false if the collection has no watched name. It waits at most
// [renameListedWithin] while the server lists the collection under its old name.
func (r *Recovery) findRenamed(ctx context.Context, ev *changes.Event) (outbox outboxes.Outbox, listed bool, err error) {
	to := string(ev.ToDB) + "." + string(ev.ToColl)
	for began := time.Now(); time.Since(began) < renameListedWithin; {
		if err := r.Collections.ListCollections(ctx); err != nil {
			return outbox, false, err
		}

		for _, o := range r.Collections.WatchedOutboxes() {
			// Without the privilege to list collections, only names are known.
			if o.UUID == ev.UUID || !o.Identified() && o.NS() == to {
				return o, true, nil
			}
		}

		may, err := r.mayBeListed(ctx, ev)
		if err != nil || !may {
			return outbox, false, err
		}
		if err := retry.Sleep(ctx, 50*time.Millisecond); err != nil {
			return outbox, false, err
		}
	}
	return outbox, false, nil
}

// mayBeListed reports whether a further list may have the collection of a rename under a watched name. It returns false if the
// collection was dropped or got a third name since: until the server lists the new name, it lists the old name. The stream may
// contain many such renames, and must not wait for each.
func (r *Recovery) mayBeListed(ctx context.Context, ev *changes.Event) (bool, error) {
	from, to := string(ev.Coll), string(ev.ToColl)
	// This user may not list the other database, and no list has a collection of the server.
	if !bytes.Equal(ev.DB, ev.ToDB) || strings.HasPrefix(from, "system.") {
		return true, nil
	}

	isNamed := func(db, coll []byte) bool { return string(coll) == from || r.Scope.Matches(db, coll) }
	found, err := outboxes.ListEach(ctx, r.Calls.Client, isNamed, r.Calls.RetryCall, string(ev.ToDB))
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(found.Outboxes, func(outbox outboxes.Outbox) bool {
		if outbox.Identified() {
			return outbox.UUID == ev.UUID
		}
		return outbox.Coll == from || outbox.Coll == to
	}), nil
}

// sweepRenamed delivers the envelopes that were in a collection when it got a watched name: the
// stream does not contain their inserts. It runs in stream order, so the position stays before the
// rename until all of them are resolved. A later owner that finds the rename again repeats the
// sweep.
//
// Envelopes that are inserted after the rename have later timestamps, because a rename waits for
// the transactions that write to the collection. They come from the stream. For the same reason,
// envelopes that were inserted before the collection lost its previous watched name have timestamps
// before that time, without a margin.
func (r *Recovery) sweepRenamed(
	ctx context.Context, ev *changes.Event, outbox outboxes.Outbox, before outboxes.Registration,
) error {
	at := ev.ClusterTime

	// A time after the rename comes from another slot, which has read further.
	readUpTo := before.Left
	if readUpTo.After(at) {
		readUpTo = bson.Timestamp{}
	}

	r.renames.Store(outbox.NS(), rename{pos: string(ev.Pos), at: at})

	return r.sweepEntering(ctx, "renamed", &sweep.Sweep{
		Collections: []outboxes.Outbox{outbox},
		ReadUpTo:    map[string]bson.Timestamp{outbox.NS(): readUpTo},
		Claims:      map[[16]byte]outboxes.Registration{outbox.UUID: before},
		To:          at,
		Skip:        sweep.NewSkip(int64(r.Config.Limits.Memory) / 8),
		Publisher:   enteringPublisher{sweptPublisher{r}},
	})
}

// enteringPublisher delivers the envelopes of a collection that got a watched name, by a rename or by the configuration. The
// position stays before that.
type enteringPublisher struct{ sweptPublisher }

// Deliver implements sweep.Publisher.
func (p enteringPublisher) Deliver(ctx context.Context, envelope *outboxes.Envelope) error {
	p.Calls.Ticks.Add(1)
	p.Metrics.Reconciled.WithLabelValues("swept").Inc()
	return p.Swept.DeliverSwept(ctx, envelope, p.PositionOf(string(envelope.DB)+"."+string(envelope.Coll), envelope.TS))
}

// rename is an event that gave a collection a watched name.
type rename struct {
	pos string // of the event in the stream
	at  bson.Timestamp
}

// PositionOf returns the position of an envelope that no event of the stream contains (N15). If the
// envelope came with a rename, the position lies within the rename, ordered by the timestamp ts. So
// the envelope is due when the resolved position has passed the rename, and a later owner that reads the
// rename again recognizes the envelope by its position. Otherwise the position is made of ts.
func (p *Plan) PositionOf(ns string, ts bson.Timestamp) string {
	known, _ := p.renames.Load(ns)
	if latest, ok := known.(rename); ok && !ts.After(latest.at) {
		return outboxes.PosWithin(latest.pos, ts)
	}
	return outboxes.PosAt(ts)
}
