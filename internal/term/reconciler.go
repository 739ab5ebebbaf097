package term

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/connect"
	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/scheduled"
	"github.com/outrelay/outrelay/internal/state"
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

func retryPolicy(cfg *config.Config) retry.Policy {
	return retry.Policy{Base: cfg.Retry.Base, Cap: cfg.Retry.Cap}
}

// newReconciler returns the reconciler of the term. It starts nothing.
func (t *term) newReconciler(doc *lease.Document) *reconciler {
	out := pipeline.NewOutlet(t.buildConfig(), t.dispatcher)
	shared := waiting.Shared{
		Client:      t.slot.shared.Mongo.State,
		Fencer:      t.held,
		Epoch:       doc.Epoch,
		Outlet:      out,
		Mapping:     t.slot.shared.Mapping,
		Now:         t.slot.shared.Clock.Now,
		Log:         t.log,
		OnRetry:     func(err error) { t.slot.State.ReportProblem("reconciler", err, false) },
		OnRecovered: func() { t.slot.State.ClearProblems("reconciler") },
	}

	f := waiting.NewFinisher(waiting.FinisherConfig{
		Shared:      shared,
		Retry:       retryPolicy(&t.slot.cfg),
		MaxAttempts: t.slot.cfg.Retry.MaxAttempts,
		Recording:   t.slot.cfg.Recording,
		DropExpired: t.slot.cfg.Expired == "drop",
		Source:      t.exceptions.source,
		Seal:        t.seal,
		Count: func(end waiting.End, class record.Class) {
			t.slot.metrics.Reconciled.WithLabelValues(end.String()).Inc()
			if end == waiting.Dropped {
				t.slot.metrics.Dropped.WithLabelValues(string(class)).Inc()
			}
			if end == waiting.Dead {
				t.slot.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
			}
		},
	})
	exceptions := waiting.New(waiting.Config{
		Shared:      shared,
		Collections: t.dirty.DirtyOutboxes,
		Finisher:    f,
		Route:       out.RouteTopics,
		Check:       out.CheckEnvelope,
		Compacted:   t.sink.Compacted,
	})
	scheduled := scheduled.New(scheduled.Config{
		Shared:      shared,
		Collections: t.dirty.DirtyOutboxes,
		Slot:        t.slot.Slot,
		Finisher:    f,
		OnSent:      func(d time.Duration) { t.slot.metrics.DueError.Observe(d, 1) },
	})
	purger := purge.New(purge.Config{
		Client:      t.slot.shared.Mongo.State,
		State:       state.Open(t.slot.shared.Mongo.State, t.slot.cfg.State),
		Watcher:     t.slot.cfg.Watcher,
		Collections: t.collections.WatchedOutboxes,
		Retention:   t.slot.cfg.Retention,
		Interval:    t.slot.cfg.Purge.Interval,
		Rate:        t.slot.cfg.Purge.Rate,
		Batch:       t.slot.cfg.Purge.Batch,
		Valid:       t.mayPurge,
		Log:         t.log,
		Slot:        t.slot.Slot.I, // N25
		OnPurged:    func(n int) { t.slot.metrics.Purged.Add(float64(n)) },
	})
	return &reconciler{outlet: out, finisher: f, exceptions: exceptions, scheduled: scheduled, purger: purger}
}

// recoverUnrecorded records deliveries that an earlier owner made outside of stream order and did
// not record (N8, N19). It runs before the stored offsets can move. An envelope that is unrecorded
// afterwards was not sent, so it may wait for any time.
func (t *term) recoverUnrecorded(ctx context.Context) error {
	return t.calls.RetryRead(ctx, func(ctx context.Context) error {
		if err := t.reconciler.scheduled.DisownStrayClaims(ctx); err != nil {
			return err
		}

		// The stream repeats all other exceptions, and sends them to their other topics.
		after, incomplete := t.recovery.IncompleteAfterCrash(t.start.from)
		if _, err := t.reconciler.exceptions.WidenIncomplete(ctx, after, incomplete); err != nil {
			return err
		}

		n, err := t.reconciler.exceptions.FinishSent(ctx, t.reconciler.outlet.FindHits)
		if n > 0 {
			t.log.Info("recorded deliveries of an earlier owner that were found in the topics", "envelopes", n)
		}
		return err
	})
}

// MayPurgeAsOwner reports whether this process purges while it owns the watcher.
func MayPurgeAsOwner(cfg config.Config) bool {
	return connect.WantedIndexes(cfg).Purge
}

// mayPurge reports whether this process has to purge and may trust its position: the lease is
// confirmed (N2), and the stream continues from the position. A position that the server does not
// accept proves nothing about delivered envelopes.
func (t *term) mayPurge() bool {
	return MayPurgeAsOwner(t.slot.cfg) && t.held.Valid() && !t.recovery.IsSweeping() && t.stream.State().Ready()
}

// loadExceptions sets the gates of keys that wait. It returns the events after the position that
// are exceptions or dead letters already (N15), or nil if there are none. It runs before the stream
// is opened.
func (t *term) loadExceptions(ctx context.Context) (*pipeline.PreviousOwner, error) {
	previous := pipeline.NewPreviousOwner()
	out := t.reconciler.outlet
	after := outboxes.PosOf(t.start.from)
	at, _ := t.start.from.Time()
	behind := func(pos string) bool { return pos > after || outboxes.PosSweptBehind(pos, at, t.stampMargin) }

	var n waiting.Loaded
	err := t.calls.RetryRead(ctx, func(ctx context.Context) (err error) {
		// A failed attempt may have closed some gates already.
		t.dispatcher.OpenAllGates()
		previous.Reset()
		n, err = t.reconciler.exceptions.Load(ctx, behind,
			func(ns, topic, key string) { t.dispatcher.CloseGate(out.RecordNamespace(ns), topic, key) }, previous.AddWaiting)
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.Exceptions > 0 {
		t.log.Info("loaded the exceptions of an earlier owner",
			"exceptions", n.Exceptions, "gates", n.Gates, "behind_the_position", n.Known)
	}

	for _, o := range t.dirty.DirtyOutboxes() {
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
	letters := mongodb.Database(t.slot.shared.Mongo.Stream, o.DB).Collection(deadletter.Collection(o.Coll))
	return t.calls.RetryRead(ctx, func(ctx context.Context) error {
		return deadletter.EachLater(ctx, letters, t.start.from, func(l deadletter.LaterLetter) error {
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
		t.dirty.CleanPeriodically,
		t.countPeriodically,
	} {
		loops.Go(func() error { return ignoreStop(pub, run(pub)) })
	}

	g.Go(func() error {
		defer close(r.publishingEnded)
		err := loops.Wait()
		// The end of ctx or of publishing is no error.
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

	ctx, cancel := context.WithTimeout(work, t.slot.cfg.Lease.Drain)
	defer cancel()
	// A loop that still publishes would prolong the drain of its own records.
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

const (
	// countEvery is the interval at which the waiting envelopes are counted.
	countEvery = 10 * time.Second
	// countShare bounds the cost of counts: after a count, the pause is at least this many times
	// as long as it took.
	countShare = 50
)

// countPeriodically counts the waiting envelopes until ctx ends.
func (t *term) countPeriodically(ctx context.Context) error {
	for wait := countEvery; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		if err := t.countWaiting(ctx); err != nil && ctx.Err() == nil {
			t.log.Debug("cannot count the waiting envelopes", "reason", err)
		}
		wait = max(countEvery, countShare*time.Since(began))
	}
	return nil
}

// countWaiting counts the waiting envelopes of the dirty collections, for the metrics and the status.
func (t *term) countWaiting(ctx context.Context) error {
	counts, err := t.reconciler.exceptions.Counts(ctx)
	if err != nil {
		return err
	}

	t.slot.metrics.Exceptions.Reset()
	waiting := int64(0)
	for _, c := range counts {
		t.slot.metrics.Exceptions.WithLabelValues(c.State).Add(float64(c.N))
		if c.State != "scheduled" {
			waiting += c.N
		}
	}
	t.slot.WaitingCount.Store(waiting)
	return nil
}
