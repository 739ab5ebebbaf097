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
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/scheduled"
	"github.com/outrelay/outrelay/internal/waiting"
)

// reconciler sends the envelopes that the stream cannot send: retried, parked, blocked, requeued
// and scheduled envelopes. It runs concurrently with the stream, and costs nothing while no
// collection is on the dirty list.
type reconciler struct {
	outlet     *pipeline.Outlet
	finisher   *waiting.Finisher
	exceptions *waiting.Exceptions
	scheduled  *scheduled.Scheduled
	purger     *purge.Purger

	stopPublishing  context.CancelFunc // ends the loops that publish
	publishingEnded chan struct{}      // closed when these loops have ended
}

func (t *term) retryPolicy() retry.Policy {
	return retry.Policy{Base: t.slot.cfg.Retry.Base, Cap: t.slot.cfg.Retry.Cap}
}

// newReconciler returns the reconciler of the term. It starts nothing.
func (t *term) newReconciler(doc *lease.Document) *reconciler {
	out := pipeline.NewOutlet(t.buildConfig(), t.dispatcher)
	trouble := func(err error) { t.slot.reportProblem("reconciler", err, false) }
	well := func() { t.slot.state.clearProblems("reconciler") }

	f := waiting.NewFinisher(waiting.FinisherConfig{
		Client:      t.slot.relay.mongo.state,
		Fencer:      t.held,
		Outlet:      out,
		Retry:       t.retryPolicy(),
		MaxAttempts: t.slot.cfg.Retry.MaxAttempts,
		Recording:   t.slot.cfg.Recording,
		DropExpired: t.slot.cfg.Expired == "drop",
		Watcher:     t.slot.cfg.Watcher,
		Node:        t.slot.cfg.Node,
		Version:     t.slot.relay.version,
		Epoch:       doc.Epoch,
		Seal:        t.seal,
		Now:         t.slot.relay.clock.now,
		Log:         t.log,
		OnRetry:     trouble,
		OnRecovered: well,
		Count: func(end waiting.End, class record.Class, n int) {
			t.slot.metrics.Reconciled.WithLabelValues(end.String()).Add(float64(n))
			if end == waiting.Dead {
				t.slot.metrics.DeadLetters.WithLabelValues(string(class)).Add(float64(n))
			}
		},
	})
	exceptions := waiting.New(waiting.Config{
		Client:      t.slot.relay.mongo.state,
		Collections: t.dirty.dirtyOutboxes,
		Outlet:      out,
		Finisher:    f,
		Route:       out.RouteTopics,
		Check:       out.CheckEnvelope,
		FindRecords: out.FindHits,
		AckIfFound:  out.AckFound,
		Compacted:   t.sink.Compacted,
		Now:         t.slot.relay.clock.now,
		Log:         t.log,
		OnRetry:     trouble,
		OnRecovered: well,
	})
	scheduled := scheduled.NewScheduled(scheduled.ScheduledConfig{
		Client:      t.slot.relay.mongo.state,
		Fencer:      t.held,
		Epoch:       doc.Epoch,
		Collections: t.dirty.dirtyOutboxes,
		Part:        t.slot.part,
		Outlet:      out,
		Finisher:    f,
		Now:         t.slot.relay.clock.now,
		Log:         t.log,
		OnRetry:     trouble,
		OnSent:      func(d time.Duration) { t.slot.metrics.DueError.Observe(d, 1) },
	})
	purger := purge.New(purge.Config{
		Client:      t.slot.relay.mongo.state,
		State:       t.slot.relay.mongo.state.Database(t.slot.cfg.MongoDB.State),
		Collections: t.watchedOutboxes,
		Retention:   t.slot.cfg.Retention,
		Interval:    t.slot.cfg.Purge.Interval,
		Rate:        t.slot.cfg.Purge.Rate,
		Batch:       t.slot.cfg.Purge.Batch,
		Valid:       t.mayPurge,
		Log:         t.log,
		Slot:        t.slot.part.I, // N25
		OnPurged:    func(n int) { t.slot.metrics.Purged.Add(float64(n)) },
	})
	return &reconciler{outlet: out, finisher: f, exceptions: exceptions, scheduled: scheduled, purger: purger}
}

// recoverUnrecorded records deliveries that an earlier owner made outside of stream order and did
// not record (N8, N19). It runs before the stored offsets can move. An envelope that is unrecorded
// afterwards was not sent, so it may wait for any time.
func (t *term) recoverUnrecorded(ctx context.Context) error {
	out := t.reconciler.outlet
	return t.retryRead(ctx, func(ctx context.Context) error {
		if err := t.reconciler.exceptions.DisownStrayClaims(ctx); err != nil {
			return err
		}

		// The stream repeats all other exceptions, and sends them to their other topics.
		after, incomplete := t.incompleteAfterCrash()
		if _, err := t.reconciler.exceptions.WidenIncomplete(ctx, after, incomplete); err != nil {
			return err
		}

		hits, err := t.reconciler.exceptions.FindHits(ctx, out.FindHits)
		if err != nil || len(hits) == 0 {
			return err
		}
		n, err := t.reconciler.exceptions.FinishHits(ctx, hits)
		if err == nil {
			t.log.Info("recorded deliveries of an earlier owner that were found in the topics", "envelopes", n)
		}
		return err
	})
}

// incompleteAfterCrash returns a function that reports, by their positions, the exceptions whose
// other topics may never have been sent, because an earlier owner died before. The stream does not
// repeat them in two cases:
//
//   - In a gap: all exceptions after the checkpoint, and swept exceptions after the cursor of the
//     sweep. The positions of swept exceptions are timestamps, or the zero timestamp with a suffix if
//     the envelope has no timestamp.
//   - Otherwise: exceptions of a collection that got a watched name by a rename after the
//     checkpoint.
//
// All these exceptions have positions after the returned position.
func (t *term) incompleteAfterCrash() (after string, incomplete func(pos string) bool) {
	from := outboxes.PosOf(t.from)
	if t.gap == nil {
		return from, func(pos string) bool { return pos > from && outboxes.PosIsWithin(pos) }
	}

	// Without a cursor, no swept envelope is known to be delivered.
	cursor := ""
	if !t.gap.Cursor.IsZero() {
		cursor = outboxes.PosAt(t.gap.Cursor)
	}

	zero := outboxes.PosAt(bson.Timestamp{})
	swept := func(pos string) bool {
		return len(pos) == len(zero) || strings.HasPrefix(pos, zero)
	}
	return min(from, cursor), func(pos string) bool { return pos > from || pos > cursor && swept(pos) }
}

// mayPurge reports whether this process has to purge and may trust its position: the lease is
// confirmed (N2), and the stream continues from the position. A position that the server does not
// accept proves nothing about delivered envelopes.
func (t *term) mayPurge() bool {
	return mayPurgeAsOwner(t.slot.cfg) && t.held.Valid() && t.sweeping.Load() == nil && t.stream.State().Ready()
}

// loadExceptions sets the gates of keys that wait. It returns the events after the position that
// are exceptions or dead letters already (N15), or nil if there are none. It runs before the stream
// is opened.
func (t *term) loadExceptions(ctx context.Context) (*pipeline.PreviousOwner, error) {
	previous := pipeline.NewPreviousOwner()
	out := t.reconciler.outlet
	after := outboxes.PosOf(t.from)
	at, _ := t.from.Time()
	behind := func(pos string) bool { return pos > after || outboxes.PosSweptBehind(pos, at, t.stampMargin) }

	var n waiting.Loaded
	err := t.retryRead(ctx, func(ctx context.Context) (err error) {
		t.dispatcher.OpenAllGates()
		previous.Reset()
		n, err = t.reconciler.exceptions.Load(ctx, behind,
			func(ns, topic, key string) { t.dispatcher.CloseGate(out.RecordNamespace(ns), topic, key) },
			func(ns string, idType byte, id []byte, topics []string) {
				previous.AddWaiting(ns, bson.RawValue{Type: bson.Type(idType), Value: id}, topics)
			})
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.Exceptions > 0 {
		t.log.Info("loaded the exceptions of an earlier owner",
			"exceptions", n.Exceptions, "gates", n.Gates, "behind_the_position", n.Known)
	}

	for _, o := range t.dirty.dirtyOutboxes() {
		if err := t.loadLetters(ctx, o, previous); err != nil {
			return nil, err
		}
	}
	if previous.IsEmpty() {
		return nil, nil
	}
	return previous, nil
}

// loadLetters adds to previous the events of a collection after the position that are dead letters.
// They could be sent by now, if their problem is fixed, but later events of their keys were sent
// without them.
func (t *term) loadLetters(ctx context.Context, o outboxes.Outbox, previous *pipeline.PreviousOwner) error {
	letters := t.slot.relay.mongo.stream.Database(o.DB).Collection(deadletter.Collection(o.Coll))
	return t.retryRead(ctx, func(ctx context.Context) error {
		return deadletter.EachLater(ctx, letters, outboxes.PosOf(t.from), func(l deadletter.LaterLetter) error {
			previous.AddDeadLetter(o.NS(), l)
			return nil
		})
	})
}

// startReconciler starts the loops of the reconciler in g. Publishing ends with ctx or with
// stopPublishing. The loops that store the outcomes continue until work ends.
func (t *term) startReconciler(ctx, work context.Context, g *errgroup.Group) {
	r := t.reconciler
	pub, cancel := context.WithCancel(ctx)
	r.stopPublishing = cancel
	r.publishingEnded = make(chan struct{})

	loops, pub := errgroup.WithContext(pub)
	for _, run := range []func(context.Context) error{
		r.exceptions.Run,
		r.scheduled.Run,
		r.purger.Run,
		t.dirty.cleanPeriodically,
		t.auditPeriodically,
	} {
		loops.Go(func() error { return ignoreStop(pub, run(pub)) })
	}

	g.Go(func() error {
		defer close(r.publishingEnded)
		err := loops.Wait()
		if errors.Is(err, context.Canceled) || ctx.Err() != nil {
			return nil
		}
		return err
	})
	g.Go(func() error { return ignoreStop(work, r.finisher.Run(work)) })
	g.Go(func() error { return ignoreStop(work, t.dispatcher.RunRecorder(work)) })
}

// drainReconciler stops publishing and waits until the outcomes are stored, for at most the
// configured drain time. The next owner finds the rest in its read-back.
func (t *term) drainReconciler(work context.Context) {
	r := t.reconciler
	if r == nil || r.stopPublishing == nil {
		return
	}

	ctx, cancel := context.WithTimeout(work, t.slot.cfg.Drain)
	defer cancel()
	r.stopPublishing()
	select {
	case <-r.publishingEnded:
	case <-ctx.Done():
		return
	}

	// The next owner finds records that are not acked in time in its read-back.
	if !t.hasBlockedTargets() {
		_ = t.dispatcher.DrainSides(ctx)
	}
	if err := r.finisher.Drain(ctx); err != nil {
		t.log.Warn("cannot record all deliveries outside of the stream; the next owner finds them in the topics",
			"reason", err)
	}
}

// Sent implements pipeline.Recorder.
func (x *exceptionWriter) Sent(ctx context.Context, batch []*pipeline.Sent) error {
	list := make([]purge.Sent, len(batch))
	for i, s := range batch {
		list[i] = purge.Sent{NS: s.NS, ID: s.ID, TS: s.TS}
		for _, a := range s.Answers {
			p := purge.Position{Topic: a.Topic, Partition: a.Partition, Offset: a.Offset}
			list[i].Positions = append(list[i].Positions, p)
		}
	}
	return x.writeDeliveries(ctx, list)
}

// removeRefusing removes the deliveries of collections that have recently rejected a recorded
// delivery.
func (x *exceptionWriter) removeRefusing(list []purge.Sent) []purge.Sent {
	return slices.DeleteFunc(list, func(s purge.Sent) bool {
		at, refused := x.t.recordingRefused[s.NS]
		return refused && time.Since(at) < recordingPause
	})
}

// writeDeliveries records deliveries on their envelopes. If MongoDB rejects one, because a
// validator of the collection does not allow the fields, it stays unrecorded: the envelope was
// delivered, and the watermark must not wait for a write that cannot succeed.
func (x *exceptionWriter) writeDeliveries(ctx context.Context, list []purge.Sent) error {
	write := func(part []purge.Sent) error {
		part = x.removeRefusing(slices.Clone(part))
		if len(part) == 0 {
			return nil
		}
		return purge.RecordSent(ctx, x.t.held, x.t.slot.cfg.Recording, part)
	}

	reject := func(s purge.Sent, err error) error {
		x.t.recordingRefused[s.NS] = time.Now()
		x.t.log.Error("a collection rejects recorded deliveries; allow the field sentAt in its validator",
			"collection", s.NS, "again_in", recordingPause, "error", err)
		return nil
	}

	return waiting.WriteHalves(list, write, reject)
}

// recordingPause is the time without recorded deliveries after a collection has rejected one.
// Without the pause, each envelope would cost a transaction.
const recordingPause = time.Minute
