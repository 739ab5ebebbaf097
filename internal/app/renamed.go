package app

import (
	"context"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/gap"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/retry"
)

// handleRename handles a rename that gives a collection a watched name, removes one, or both (N27).
// from and to report whether the old and the new name are watched. A collection keeps its UUID, so
// the registry can store up to where the collection was read: the stream contains all inserts under
// a watched name, and none under any other name.
func (r *recovery) handleRename(ctx context.Context, ev *changestream.Event, from, to bool) error {
	if !to {
		return r.collections.leaveCollection(ctx, ev)
	}

	defer r.calls.keepTicking(tickEvery)()
	o, listed, err := r.findRenamed(ctx, ev)
	if err != nil {
		return err
	}
	if !listed {
		// The stream contains the later rename as well. The registry still has the time up to which
		// the collection was read.
		r.log.Warn("a renamed collection has lost its watched name since; it is delivered when it gets one again",
			"collection", string(ev.ToDB)+"."+string(ev.ToColl))
		return nil
	}

	var before outboxes.Registration
	if ev.HasUUID {
		if before, err = r.collections.claimCollection(ctx, o, ev.ClusterTime); err != nil {
			return err
		}
	}
	if !from {
		return r.sweepRenamed(ctx, ev, o, before)
	}

	// Exceptions of the collection wait under the new name from here on.
	return r.dirty.markIfNonEmpty(ctx, o)
}

// tickEvery is the interval of signs of life during the sweep of a renamed collection.
const tickEvery = 5 * time.Second

// renameListedWithin bounds the time until a rename that the stream contains is visible in the list
// of collections. The server shows the oplog entry a moment before it lists the new name.
const renameListedWithin = 3 * time.Second

// findRenamed returns the collection of a rename under its current name, which may be the result of
// a later rename. listed is false if the collection has no watched name. It waits at most
// [renameListedWithin] for the server to list the collection.
func (r *recovery) findRenamed(ctx context.Context, ev *changestream.Event) (o outboxes.Outbox, listed bool, err error) {
	to := string(ev.ToDB) + "." + string(ev.ToColl)
	for began := time.Now(); time.Since(began) < renameListedWithin; {
		if err := r.collections.listCollections(ctx); err != nil {
			return o, false, err
		}

		for _, o := range r.collections.watchedOutboxes() {
			// Without the privilege to list collections, only names are known.
			if o.UUID == ev.UUID || !o.Identified() && o.NS() == to {
				return o, true, nil
			}
		}
		if err := retry.Sleep(ctx, 50*time.Millisecond); err != nil {
			return o, false, err
		}
	}
	return o, false, nil
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
func (r *recovery) sweepRenamed(
	ctx context.Context, ev *changestream.Event, o outboxes.Outbox, before outboxes.Registration,
) error {
	// The sweep overwrites the current event of the pump.
	at := ev.ClusterTime
	last := *ev

	// A time after the rename comes from another slot, which has read further.
	readUpTo := before.Left
	if readUpTo.After(at) {
		readUpTo = bson.Timestamp{}
	}

	r.log.Warn("a collection got a watched name; sweeping it", "collection", o.NS(),
		"from", string(ev.DB)+"."+string(ev.Coll), "behind", readUpTo.T)
	r.renamed.remember(o.NS(), rename{pos: string(ev.Data), at: at})
	s := &gap.Sweep{
		Client:      r.client,
		Collections: []outboxes.Outbox{o},
		ReadUpTo:    map[string]bson.Timestamp{o.NS(): readUpTo},
		To:          at,
		Memory:      int64(r.cfg.Limits.Memory) / 4,
		Skip:        gap.NewSkip(int64(r.cfg.Limits.Memory) / 8),
		Publisher:   renamePublisher{publisher{r}},
	}
	res, err := s.Run(ctx)
	r.pump.SetCurrent(last)
	if err != nil {
		return err
	}

	r.dispatcher.Flush()
	r.appendEvent(ctx, nodes.GapClosed, bson.D{
		{Key: "reason", Value: "renamed"},
		{Key: "collection", Value: o.NS()},
		{Key: "swept", Value: res.Swept},
	})

	// The collection must be on the dirty list before the position passes the rename: a later owner
	// looks only at collections on that list.
	return r.dirty.markIfNonEmpty(ctx, o)
}

// renamePublisher delivers the envelopes of a renamed collection. The position stays before the
// rename.
type renamePublisher struct{ publisher }

// Deliver implements gap.Publisher.
func (p renamePublisher) Deliver(ctx context.Context, e *outboxes.Envelope) error {
	p.calls.ticks.Add(1)
	p.metrics.Reconciled.WithLabelValues("swept").Inc()
	return p.pump.DeliverSwept(ctx, e, p.renamed.positionOf(string(e.DB)+"."+string(e.Coll), e.TS))
}

// rename is an event that gave a collection a watched name.
type rename struct {
	pos string // of the event in the stream
	at  bson.Timestamp
}

// renames holds the latest rename of each collection in a term. The pump and the goroutine that
// stores exceptions use it concurrently.
type renames struct {
	mu     sync.Mutex
	latest map[string]rename
}

// remember stores the latest rename of the collection ns.
func (r *renames) remember(ns string, latest rename) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.latest == nil {
		r.latest = map[string]rename{}
	}
	r.latest[ns] = latest
}

// positionOf returns the position of an envelope that no event of the stream contains (N15). If the
// envelope came with a rename, the position lies within the rename, ordered by the timestamp ts. So
// the envelope is due when the watermark has passed the rename, and a later owner that reads the
// rename again recognizes the envelope by its position. Otherwise the position is made of ts.
func (r *renames) positionOf(ns string, ts bson.Timestamp) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if latest, ok := r.latest[ns]; ok && !ts.After(latest.at) {
		return outboxes.PosWithin(latest.pos, ts)
	}
	return outboxes.PosAt(ts)
}
