package app

import (
	"context"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

// handleRename handles a rename that gives a collection a watched name, takes one away, or both (N27). The UUID survives it, so the
// registry knows what of the collection was read: under a watched name the stream brings everything, and under another
// nothing. from and to say whether the old and the new name are watched.
func (t *term) handleRename(ctx context.Context, ev *changestream.Event, from, to bool) error {
	if !to {
		return t.retryCall(ctx, "mongodb", func(ctx context.Context) error {
			return t.registry.Leave(ctx, ev.UUID, t.cfg.Watcher, ev.ClusterTime)
		})
	}
	defer t.progress.keepTicking(stalledAfter / 6)()
	o, there, err := t.findRenamed(ctx, ev)
	if err != nil {
		return err
	}
	if !there {
		// The rename that took it away again comes next. The registry says still up to where the collection was read.
		t.log.Warn("a collection got a watched name and has lost it since; what it holds is delivered when it gets one again", "collection", string(ev.ToDB)+"."+string(ev.ToColl))
		return nil
	}
	var before store.Claim
	if ev.HasUUID {
		if before, err = t.claimCollection(ctx, o, ev.ClusterTime); err != nil {
			return err
		}
	}
	if !from {
		return t.sweepRenamed(ctx, ev, o, before)
	}
	return t.dirty.markIfNonEmpty(ctx, o) // what waits in it waits under its new name
}

// renameListedWithin is how long a rename may take that the stream has told of already: the server shows the oplog a moment before it
// lists the new name.
const renameListedWithin = 3 * time.Second

// findRenamed finds the collection of a rename under the watched name that it has now, which may be a later one.
func (t *term) findRenamed(ctx context.Context, ev *changestream.Event) (o store.Outbox, there bool, err error) {
	to := string(ev.ToDB) + "." + string(ev.ToColl)
	for began := time.Now(); time.Since(began) < renameListedWithin; {
		if err := t.listCollections(ctx); err != nil {
			return o, false, err
		}
		for _, o := range t.watchedOutboxes() {
			// Who may not list collections sees names alone.
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

// sweepRenamed delivers what a collection brought with it when it got a name that is watched: no stream tells of that. It
// runs in the order of the stream, so the position stays before the rename until all of it is resolved, and a successor
// that finds the rename again repeats it. What is written to the collection later has later stamps, for a rename waits for
// the transactions that write to it; it comes by the stream. For the same reason what was written before the collection
// was last taken away has stamps from before that, without a margin.
func (t *term) sweepRenamed(ctx context.Context, ev *changestream.Event, o store.Outbox, before store.Claim) error {
	at, last := ev.ClusterTime, *ev // the event is overwritten by what the sweep hands on
	upTo := before.Left
	if upTo.After(at) { // of a later time, noted by another slot that is further
		upTo = bson.Timestamp{}
	}
	t.log.Warn("a collection was renamed into what is watched; sweeping what it holds", "collection", o.NS(), "from", string(ev.DB)+"."+string(ev.Coll), "behind", upTo.T)
	t.renamed.remember(o.NS(), rename{pos: string(ev.Data), at: at})
	s := &reconcile.Sweep{
		Client: t.mongo.stream, Collections: []store.Outbox{o}, ReadUpTo: map[string]bson.Timestamp{o.NS(): upTo}, To: at,
		Memory: int64(t.cfg.Limits.Memory) / 4, Skip: reconcile.NewSkip(int64(t.cfg.Limits.Memory) / 8), Publisher: renamePublisher{t},
	}
	res, err := s.Run(ctx)
	t.pump.ev = last
	if err != nil {
		return err
	}
	t.dispatcher.Flush()
	t.appendEvent(ctx, store.GapClosed, bson.D{{Key: "reason", Value: "renamed"}, {Key: "collection", Value: o.NS()}, {Key: "swept", Value: res.Swept}})
	return t.dirty.markIfNonEmpty(ctx, o) // before the position passes the rename: behind it nobody would look any more
}

// keepTicking gives signs of life until stop is called, for work whose single steps may take longer than a stage may stand still, and
// which have deadlines of their own.
func (p *progress) keepTicking(every time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var beating sync.WaitGroup
	beating.Go(func() {
		for retry.Sleep(ctx, every) == nil {
			p.ticks.Add(1)
		}
	})
	return func() { cancel(); beating.Wait() }
}

// renamePublisher publishes what a renamed collection holds, by the way of stream events.
type renamePublisher struct{ *term }

// Deliver implements reconcile.Publisher.
func (a renamePublisher) Deliver(ctx context.Context, e *reconcile.Envelope) error {
	a.progress.ticks.Add(1)
	a.metrics.Reconciled.WithLabelValues("swept").Inc()
	return a.pump.deliverSwept(ctx, e, a.renamed.positionOf(string(e.DB)+"."+string(e.Coll), e.TS))
}

// Reached implements reconcile.Publisher: the position stays where it is.
func (a renamePublisher) Reached(context.Context, bson.Timestamp) error {
	a.dispatcher.Flush()
	a.state.clearProblems("sweep")
	return nil
}

// Trouble implements reconcile.Publisher.
func (a renamePublisher) Trouble(err error) { a.reportProblem("sweep", err, false) }

// rename is an event that brought a collection into what is watched.
type rename struct {
	pos string
	at  bson.Timestamp
}

// renames are those of a term, the latest of each collection, for the goroutines of the pump and of the exceptions.
type renames struct {
	mu     sync.Mutex
	latest map[string]rename
}

func (r *renames) remember(ns string, x rename) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.latest == nil {
		r.latest = map[string]rename{}
	}
	r.latest[ns] = x
}

// positionOf is where an envelope stands that no event of the stream has brought: at the rename that brought its collection, in the
// order of the stamps, so that it goes when the watermark has passed the rename, and a successor that comes to the rename
// again knows it by that; else at its stamp (N15).
func (r *renames) positionOf(ns string, ts bson.Timestamp) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if x, ok := r.latest[ns]; ok && !ts.After(x.at) {
		return store.PosWithin(x.pos, ts)
	}
	return store.PosAt(ts)
}
