package app

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/reconcile"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retention"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/store"
)

// reconciler is what brings to Kafka, beside the stream, the envelopes that the stream cannot: retried, held, requeued and
// scheduled ones. It costs nothing while no collection is on the dirty list.
type reconciler struct {
	outlet     *outlet
	finisher   *reconcile.Finisher
	exceptions *reconcile.Exceptions
	scheduled  *reconcile.Scheduled
	purger     *retention.Purger

	stop  context.CancelFunc // ends the loops that publish
	ended chan struct{}      // closed when they have
}

func (t *term) retryPolicy() retry.Policy {
	return retry.Policy{Base: t.cfg.Retry.Base, Cap: t.cfg.Retry.Cap}
}

func (t *term) newReconciler(doc *lease.Document) *reconciler {
	out := newOutlet(t)
	trouble := func(err error) { t.report("reconciler", err, false) }
	well := func() { t.state.clear("reconciler") }
	f := reconcile.NewFinisher(reconcile.Finishing{
		Client: t.mongo.state, Fencer: t.held, Outlet: out, Retry: t.retryPolicy(), MaxAttempts: t.cfg.Retry.MaxAttempts,
		Recording: t.cfg.Recording, DropExpired: t.cfg.Expired == "drop", Watcher: t.cfg.Watcher, Node: t.cfg.Node, Version: t.version,
		Epoch: doc.Epoch, Seal: t.seal, Now: t.clock.now, Log: t.log, Trouble: trouble, Well: well,
		Count: func(end reconcile.End, class record.Class, n int) {
			t.metrics.Reconciled.WithLabelValues(end.String()).Add(float64(n))
			if end == reconcile.Dead {
				t.metrics.DeadLetters.WithLabelValues(string(class)).Add(float64(n))
			}
		},
	})
	return &reconciler{
		outlet:   out,
		finisher: f,
		exceptions: &reconcile.Exceptions{
			Client: t.mongo.state, Collections: t.dirty.collections, Outlet: out, Finisher: f, Route: out.route, Check: out.check,
			Standing: out.standing, Take: out.take, Compacted: t.sink.Compacted, Now: t.clock.now, Log: t.log, Trouble: trouble, Well: well,
		},
		scheduled: reconcile.NewScheduled(reconcile.ScheduledConfig{
			Client: t.mongo.state, Fencer: t.held, Epoch: doc.Epoch, Collections: t.dirty.collections, Part: t.part, Outlet: out, Finisher: f,
			Now: t.clock.now, Log: t.log, Trouble: trouble,
			Late: func(d time.Duration) { t.metrics.DueError.Observe(d, 1) },
		}),
		purger: &retention.Purger{
			Client: t.mongo.state, State: t.mongo.state.Database(t.cfg.MongoDB.State), Collections: t.outboxes, Retention: t.cfg.Retention,
			Interval: t.cfg.Purge.Interval, Rate: t.cfg.Purge.Rate, Batch: t.cfg.Purge.Batch, Valid: t.mayPurge, Log: t.log,
			Slot:   t.part.I, // N25
			Purged: func(n int) { t.metrics.Purged.Add(float64(n)) },
		},
	}
}

// recoverSent writes down what an earlier owner had sent outside of the stream's order, before anything else can move the
// stored offsets (N8, N19): what is not written down then was not sent, so that it may wait for as long as it has to.
func (t *term) recoverSent(ctx context.Context) error {
	out := newOutlet(t)
	return t.untilRead(ctx, func(ctx context.Context) error {
		if err := t.rec.exceptions.Disown(ctx); err != nil {
			return err
		}
		after, unsure := t.unsure() // the stream brings all others again, and the other topics with them
		if _, err := t.rec.exceptions.Widen(ctx, after, unsure); err != nil {
			return err
		}
		hits, err := t.rec.exceptions.Find(ctx, out.standing)
		if err != nil || len(hits) == 0 {
			return err
		}
		n, err := t.rec.exceptions.Recover(ctx, hits)
		if err == nil {
			t.log.Info("an earlier owner had sent envelopes that were not written down", "envelopes", n)
		}
		return err
	})
}

// unsure tells of which exceptions, by their position, an earlier owner may have died before their other topics had them,
// where no stream brings them again: in a gap those behind the checkpoint, and those that a sweep found behind its cursor,
// whose positions are mere stamps, or none where they have no stamp; else those of a collection that was renamed into what is
// watched, where the rename stands behind the checkpoint.
func (t *term) unsure() (after string, unsure func(pos string) bool) {
	from := position(t.from)
	if t.gap == nil {
		return from, func(pos string) bool { return pos > from && store.PosIsWithin(pos) }
	}
	cursor := store.PosAt(t.gap.Cursor)
	if t.gap.Cursor.IsZero() {
		cursor = "" // nothing of the sweep is delivered for certain
	}
	stamp := len(store.PosAt(bson.Timestamp{}))
	swept := func(pos string) bool {
		return len(pos) == stamp || strings.HasPrefix(pos, store.PosAt(bson.Timestamp{}))
	}
	return min(from, cursor), func(pos string) bool { return pos > from || pos > cursor && swept(pos) }
}

// mayPurge reports whether this process is to purge, and the position can be trusted to tell what was delivered: the lease is
// confirmed (N2), and the stream goes on from it. A position that the server does not accept says nothing.
func (t *term) mayPurge() bool {
	return cleans(t.cfg) && t.held.Valid() && t.sweeping.Load() == nil && t.stream.State().Ready()
}

// loadExceptions finds, before the stream is opened, which keys wait, and which events behind the position are exceptions or dead
// letters already (N15).
func (t *term) loadExceptions(ctx context.Context) (*owned, error) {
	own := newOwned()
	out := newOutlet(t)
	after := position(t.from)
	at, _ := t.from.Time()
	behind := func(pos string) bool { return pos > after || store.PosSweptBehind(pos, at, t.margin) }
	var n reconcile.Loaded
	err := t.untilRead(ctx, func(ctx context.Context) (err error) {
		t.disp.ForgetGates()
		own.clear()
		n, err = t.rec.exceptions.Load(ctx, behind,
			func(ns, topic, key string) { t.disp.Gate(out.ns(ns), topic, key) },
			func(ns string, idType byte, id []byte, topics []string) {
				own.add(ns, bson.RawValue{Type: bson.Type(idType), Value: id}, topics)
			})
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.Exceptions > 0 {
		t.log.Info("envelopes wait from before", "exceptions", n.Exceptions, "gates", n.Gates, "behind_the_position", n.Known)
	}
	for _, o := range t.dirty.collections() {
		if err := t.loadLetters(ctx, o, own); err != nil {
			return nil, err
		}
	}
	if own.none() {
		return nil, nil
	}
	return own, nil
}

// loadLetters finds which events of a collection behind the position are dead letters already: whatever was amiss with them may be
// no more, but their keys went on without them.
func (t *term) loadLetters(ctx context.Context, o store.Outbox, own *owned) error {
	letters := t.mongo.stream.Database(o.DB).Collection(deadletter.Collection(o.Coll))
	return t.untilRead(ctx, func(ctx context.Context) error {
		return deadletter.EachBehind(ctx, letters, position(t.from), func(l deadletter.Behind) error {
			own.bury(o.NS(), l)
			return nil
		})
	})
}

// reconcile starts what goes on beside the stream. Publishing ends with ctx or with stopReconciling; what writes down what
// became of it goes on until work ends.
func (t *term) reconcile(ctx, work context.Context, g *errgroup.Group) {
	r := t.rec
	pub, cancel := context.WithCancel(ctx)
	r.stop, r.ended = cancel, make(chan struct{})
	loops, pub := errgroup.WithContext(pub)
	for _, run := range []func(context.Context) error{r.exceptions.Run, r.scheduled.Run, r.purger.Run, t.dirty.run, t.audit} {
		loops.Go(func() error { return endOf(pub, run(pub)) })
	}
	g.Go(func() error {
		defer close(r.ended)
		err := loops.Wait()
		if errors.Is(err, context.Canceled) || ctx.Err() != nil {
			return nil
		}
		return err
	})
	g.Go(func() error { return endOf(work, r.finisher.Run(work)) })
	g.Go(func() error { return endOf(work, t.disp.RunRecorder(work)) })
}

// drainBesides ends publishing beside the stream and waits, for as long as a drain may take, until what became of it is
// written down. The rest the next owner finds in its read-back.
func (t *term) drainBesides(work context.Context) {
	r := t.rec
	if r == nil || r.stop == nil {
		return
	}
	ctx, cancel := context.WithTimeout(work, t.cfg.Drain)
	defer cancel()
	r.stop()
	select {
	case <-r.ended:
	case <-ctx.Done():
		return
	}
	if t.disp.Besides() > 0 && !t.blocked() {
		_ = t.sink.Drain(ctx) // what is not answered in time the next owner finds in its read-back
	}
	if err := r.finisher.Drain(ctx); err != nil {
		t.log.Warn("not everything that was sent beside the stream could be written down; the next owner finds it in the topics", "reason", err)
	}
}

// Sent implements dispatch.Recorder.
func (x *exceptions) Sent(ctx context.Context, batch []*dispatch.Sent) error {
	list := make([]store.Sent, len(batch))
	for i, s := range batch {
		list[i] = store.Sent{NS: s.NS, ID: s.ID, TS: s.TS}
		for _, a := range s.Answers {
			list[i].Positions = append(list[i].Positions, store.Position{Topic: a.Topic, Partition: a.Partition, Offset: a.Offset})
		}
	}
	return x.recordSent(ctx, list)
}

// recordable leaves out what is of a collection that has just refused it.
func (x *exceptions) recordable(list []store.Sent) []store.Sent {
	return slices.DeleteFunc(list, func(s store.Sent) bool {
		at, refused := x.t.unrecorded[s.NS]
		return refused && time.Since(at) < unrecordedFor
	})
}

// recordSent writes deliveries down. One that the server does not take, because a validator of the collection knows nothing
// of such fields, stays without: it was delivered, and to wait for the impossible would hold up the watermark for ever.
func (x *exceptions) recordSent(ctx context.Context, list []store.Sent) error {
	return store.WriteHalves(list, func(part []store.Sent) error {
		if part = x.recordable(slices.Clone(part)); len(part) == 0 {
			return nil
		}
		return store.RecordSent(ctx, x.t.held, x.t.cfg.Recording, part)
	}, func(s store.Sent, why error) error {
		x.t.unrecorded[s.NS] = time.Now()
		x.t.log.Error("deliveries cannot be written down in a collection; they count as delivered all the same; does a validator know nothing of sentAt?",
			"collection", s.NS, "again_in", unrecordedFor, "error", why)
		return nil
	})
}

// unrecordedFor is how long nothing is written down in a collection that has refused it, so that it does not cost a
// transaction for each envelope.
const unrecordedFor = time.Minute
