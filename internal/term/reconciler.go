package term

import (
	"context"
	"errors"
	"math"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/connect"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/letters"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/reconciler"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/scheduled"
	"github.com/outrelay/outrelay/internal/state"
	"github.com/outrelay/outrelay/internal/waiting"
)

// reconcilers send the envelopes that the stream cannot send: retried, parked, blocked, requeued
// and scheduled envelopes. They run concurrently with the stream.
type reconcilers struct {
	outlet    *pipeline.Outlet
	sender    *reconciler.Sender
	scheduled *scheduled.Scheduled
	purger    *purge.Purger

	stopPublishing  context.CancelFunc // ends the loops that publish
	publishingEnded chan struct{}      // closed when these loops have ended
}

func retryPolicy(cfg *config.Config) retry.Policy {
	return retry.Policy{Base: cfg.Retry.Base, Cap: cfg.Retry.Cap}
}

// newLedger returns the ledger of the term. It starts nothing.
func (t *term) newLedger() *ledger.Ledger {
	cfg := &t.slot.cfg
	return ledger.New(ledger.Config{
		Fencer:  t.held,
		Store:   t.store,
		Letters: t.letters,
		Source: letters.Source{
			Kind:    "relay",
			Watcher: cfg.Watcher,
			Node:    cfg.Node,
			Epoch:   t.held.Document().Epoch,
			Version: t.slot.shared.Version,
		},
		Mapping:      t.slot.shared.Mapping,
		MaxAttempts:  cfg.Retry.MaxAttempts,
		Backoff:      retryPolicy(cfg),
		DropExpired:  cfg.Expired == "drop",
		Recording:    cfg.Recording,
		LetterExpiry: cfg.DeadLetters.Expire,
		Restore:      t.restoreImages,
		Sweeping:     func() bool { return t.recovery.IsSweeping() },
		Entered:      func(list []*waiting.Entry) { t.entered.Put(list...) },
		Now:          t.slot.shared.Clock.Now,
		OnRetry:      func(err error) { t.slot.State.ReportProblem("ledger", err, false) },
		OnRecovered:  func() { t.slot.State.ClearProblems("ledger") },
		Count:        t.countOutcome,
		Log:          t.log,
	})
}

// countOutcome counts the outcome of an envelope that was sent outside of the order of the stream.
func (t *term) countOutcome(o *ledger.Outcome) {
	if o.Doc == nil {
		return
	}

	class := string(o.Refusal.Class)
	t.slot.metrics.Reconciled.WithLabelValues(o.End.String()).Inc()
	if o.End == ledger.Dropped {
		t.slot.metrics.Dropped.WithLabelValues(class).Inc()
	}
	if o.End == ledger.Dead {
		t.slot.metrics.DeadLetters.WithLabelValues(class).Inc()
	}
}

// newReconciler returns the reconcilers of the term. It starts nothing.
func (t *term) newReconciler() *reconcilers {
	out := pipeline.NewOutlet(t.buildConfig(), t.dispatcher)
	onRetry := func(err error) { t.slot.State.ReportProblem("reconciler", err, false) }
	onRecovered := func() { t.slot.State.ClearProblems("reconciler") }

	sender := reconciler.New(reconciler.Config{
		Store:       t.store,
		Ledger:      t.ledger,
		Outlet:      out,
		Mapping:     t.slot.shared.Mapping,
		Now:         t.slot.shared.Clock.Now,
		Log:         t.log,
		OnRetry:     onRetry,
		OnRecovered: onRecovered,
		Compacted:   t.sink.Compacted,
		Entered:     t.entered,
		Ready:       t.ready,
	})
	scheduled := scheduled.New(scheduled.Config{
		Client:      t.slot.shared.Mongo.State,
		Fencer:      t.held,
		Store:       t.store,
		Sender:      sender,
		Ledger:      t.ledger,
		Mapping:     t.slot.shared.Mapping,
		Now:         t.slot.shared.Clock.Now,
		Log:         t.log,
		OnRetry:     func(err error) { t.slot.State.ReportProblem("scheduled", err, false) },
		OnRecovered: func() { t.slot.State.ClearProblems("scheduled") },
		Collections: t.schedules.Outboxes,
		Slot:        t.slot.Slot,
		Mark:        t.slot.cfg.Recording == ledger.RecordMark,
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
	return &reconcilers{outlet: out, sender: sender, scheduled: scheduled, purger: purger}
}

// finishSent finishes deliveries that an earlier owner made outside of stream order and did
// not record (N8). It runs before the stored offsets can move. An envelope that still waits
// afterwards was not sent, so it may wait for any time.
func (t *term) finishSent(ctx context.Context) (finished int, err error) {
	err = t.calls.RetryRead(ctx, func(ctx context.Context) (err error) {
		finished, err = t.reconciler.sender.FinishSent(ctx)
		return err
	})
	if finished > 0 {
		t.log.Info("recorded deliveries of an earlier owner that were found in the topics", "envelopes", finished)
	}
	return finished, err
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

// loadStored sets the gates of keys that wait. It returns the events after the position that
// wait or are dead already (N15), or nil if there are none. It runs before the stream
// is opened.
func (t *term) loadStored(ctx context.Context) (*pipeline.PreviousOwner, error) {
	previous := pipeline.NewPreviousOwner()
	out := t.reconciler.outlet
	after := outboxes.PosOf(t.start.from)
	at, _ := t.start.from.Time()
	behind := func(pos string) bool { return pos > after || outboxes.PosSweptBehind(pos, at, t.stampMargin) }

	var n reconciler.Loaded
	err := t.calls.RetryRead(ctx, func(ctx context.Context) (err error) {
		// A failed attempt may have closed some gates already.
		t.dispatcher.OpenAllGates()
		previous.Reset()
		n, err = t.reconciler.sender.Load(ctx, behind,
			func(ns, topic, key string) { t.dispatcher.CloseGate(out.RecordNamespace(ns), topic, key) }, previous.AddWaiting)
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.Waiting > 0 {
		t.log.Info("loaded the waiting envelopes of an earlier owner",
			"waiting", n.Waiting, "gates", n.Gates, "behind_the_position", n.Known)
	}

	// Dead envelopes could be sent by now, if their problem is fixed, but later events of their keys were sent
	// without them.
	err = t.calls.RetryRead(ctx, func(ctx context.Context) error {
		return letters.Later(ctx, t.letters, t.slot.cfg.Watcher, t.slot.Slot, t.start.from, func(m letters.Mark) error {
			previous.AddDeadLetter(m)
			return nil
		})
	})
	if err != nil {
		return nil, err
	}
	if previous.IsEmpty() {
		return nil, nil
	}
	return previous, nil
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
		r.sender.Run,
		r.scheduled.Run,
		r.purger.Run,
		t.schedules.Run,
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
	if err := t.ledger.Drain(ctx); err != nil {
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

// countWaiting counts the waiting envelopes, for the metrics and the status.
func (t *term) countWaiting(ctx context.Context) error {
	counts, err := t.store.Counts(ctx)
	if err != nil {
		return err
	}

	total, byReason := int64(0), map[waiting.Reason]int64{}
	for _, c := range counts {
		byReason[c.Reason] += c.N
		total += c.N
	}
	scheduled := int64(0)
	for _, o := range t.schedules.Outboxes() {
		n, _, err := outboxes.CountDue(ctx, mongodb.Database(t.slot.shared.Mongo.State, o.DB).Collection(o.Coll), t.slot.Slot, math.MaxInt64)
		if errors.Is(err, outboxes.ErrNotIndexed) {
			continue
		}
		if err != nil {
			return err
		}
		scheduled += n
	}

	t.slot.metrics.Exceptions.Reset()
	for _, reason := range waiting.Reasons() {
		if n := byReason[reason]; n > 0 {
			t.slot.metrics.Exceptions.WithLabelValues(string(reason)).Set(float64(n))
		}
	}
	if scheduled > 0 {
		t.slot.metrics.Exceptions.WithLabelValues("scheduled").Set(float64(scheduled))
	}
	t.slot.WaitingCount.Store(total)
	return nil
}
