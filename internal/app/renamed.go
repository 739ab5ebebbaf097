package app

import (
	"context"
	"sync"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/store"
)

// renamedHere delivers what a collection brought with it when it got a name that is watched (N27): no stream tells of that.
// It runs in the order of the stream, so the position stays before the rename until all of it is resolved, and a
// successor that finds the rename again repeats it. What is written to the collection later has later stamps, for a
// rename waits for the transactions that write to it; it comes by the stream.
func (t *term) renamedHere(ctx context.Context, ev *changestream.Event) error {
	o := store.Outbox{DB: string(ev.ToDB), Coll: string(ev.ToColl), Part: t.part}
	t.log.Warn("a collection was renamed into what is watched; sweeping what it holds", "collection", o.NS(), "from", string(ev.DB)+"."+string(ev.Coll))
	if err := t.listNew(ctx); err != nil {
		return err
	}
	at, last := ev.ClusterTime, *ev // the event is overwritten by what the sweep hands on
	t.renamed.note(o.NS(), rename{pos: string(ev.Data), at: at})
	s := &reconcile.Sweep{
		Client: t.mongo.stream, Collections: []store.Outbox{o}, To: at, Memory: int64(t.cfg.Limits.Memory) / 4,
		Skip: reconcile.NewSkip(int64(t.cfg.Limits.Memory) / 8), Publisher: arrived{t},
	}
	res, err := s.Run(ctx)
	t.pump.ev = last
	if err != nil {
		return err
	}
	t.disp.Flush()
	t.announce(ctx, store.GapClosed, bson.D{{Key: "reason", Value: "renamed"}, {Key: "collection", Value: o.NS()}, {Key: "swept", Value: res.Swept}})
	return t.dirty.look(ctx, o) // before the position passes the rename: behind it nobody would look any more
}

// arrived publishes what a renamed collection holds, by the way of stream events.
type arrived struct{ *term }

// Deliver implements reconcile.Publisher.
func (a arrived) Deliver(ctx context.Context, e *reconcile.Envelope) error {
	a.progress.ticks.Add(1)
	a.metrics.Reconciled.WithLabelValues("swept").Inc()
	return a.pump.swept(ctx, e, a.renamed.place(string(e.DB)+"."+string(e.Coll), e.TS))
}

// Reached implements reconcile.Publisher: the position stays where it is.
func (a arrived) Reached(context.Context, bson.Timestamp) error {
	a.disp.Flush()
	a.state.clear("sweep")
	return nil
}

// Trouble implements reconcile.Publisher.
func (a arrived) Trouble(err error) { a.report("sweep", err, false) }

// rename is an event that brought a collection into what is watched.
type rename struct {
	pos string
	at  bson.Timestamp
}

// renames are those of a term, the latest of each collection, for the goroutines of the pump and of the exceptions.
type renames struct {
	mu sync.Mutex
	by map[string]rename
}

func (r *renames) note(ns string, x rename) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by == nil {
		r.by = map[string]rename{}
	}
	r.by[ns] = x
}

// place is where an envelope stands that no event of the stream has brought: at the rename that brought its collection, in the
// order of the stamps, so that it goes when the watermark has passed the rename, and a successor that comes to the rename
// again knows it by that; else at its stamp (N15).
func (r *renames) place(ns string, ts bson.Timestamp) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if x, ok := r.by[ns]; ok && !ts.After(x.at) {
		return store.PosWithin(x.pos, ts)
	}
	return store.PosAt(ts)
}
