package term

import (
	"context"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/reconciler"
	"github.com/outrelay/outrelay/internal/relay/internal/scheduled"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// sides are the parts that send the envelopes that the stream cannot send: retried, parked, blocked, requeued
// and scheduled envelopes. They run concurrently with the stream.
type sides struct {
	outlet    *pipeline.Outlet
	sender    *reconciler.Sender
	scheduled *scheduled.Scheduled
	purger    *purge.Purger
}

// publishing has the loops of a term that publish.
type publishing struct {
	stop  context.CancelFunc
	ended chan struct{} // closed when these loops have ended
}

func retryPolicy(cfg *config.Config) retry.Policy {
	return retry.Policy{Base: cfg.Retry.Base, Cap: cfg.Retry.Cap}
}

// newLedger returns the ledger that stores the outcomes of queue. It starts nothing.
func newLedger(inputs *sources, outputs *stores, queue *ledger.Queue, meter *meter, images *images) *ledger.Ledger {
	cfg, shared, state := &inputs.slot.cfg, inputs.slot.shared, inputs.slot.State
	source := letters.Source{
		Kind:    "relay",
		Watcher: cfg.Watcher,
		Node:    cfg.Node,
		Epoch:   inputs.held.Document().Epoch,
		Version: shared.Version,
	}

	return ledger.New(ledger.Config{
		Queue:   queue,
		Fencer:  inputs.held,
		Store:   outputs.store,
		Letters: outputs.letters,
		Claims:  outputs.claims,
		Source:  source,
		Mapping: shared.Mapping,

		// These decide what becomes of an envelope.
		MaxAttempts:  cfg.Retry.MaxAttempts,
		Backoff:      retryPolicy(cfg),
		DropExpired:  cfg.Expired == "drop",
		Recording:    cfg.Recording,
		LetterExpiry: cfg.DeadLetters.Expire,

		// These learn what happens.
		Entered:     func(list []*waiting.Entry) { outputs.entered.Put(list...) },
		OnRetry:     func(err error) { state.ReportProblem("ledger", err) },
		OnRecovered: func() { state.ClearProblems("ledger") },
		Count:       meter.countOutcome,
		GivenUp:     shared.Hooks.GivenUp,

		Restore: images.restore,
		Now:     shared.Clock.Now,
		Log:     inputs.log,
	})
}

// newSides returns the sides of the term, which send through dispatcher to sink. It starts nothing.
func (t *term) newSides(sink *sink.Sink, dispatcher *pipeline.Dispatcher) *sides {
	out := pipeline.NewOutlet(t.buildConfig(), dispatcher)
	onRetry := func(err error) { t.slot.State.ReportProblem("reconciler", err) }
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
		Compacted:   sink.Compacted,
		Entered:     t.entered,
		Ready:       t.ready,
	})
	scheduled := scheduled.New(scheduled.Config{
		Client:      t.slot.shared.Mongo.State,
		Fencer:      t.held,
		Claims:      t.claims,
		Watchers:    state.Open(t.slot.shared.Mongo.State, t.slot.cfg.State).Collection("watchers"),
		WatcherID:   t.slot.Slot.ID(t.slot.cfg.Watcher),
		Outlet:      out,
		Ledger:      t.ledger,
		Mapping:     t.slot.shared.Mapping,
		Now:         t.slot.shared.Clock.Now,
		Log:         t.log,
		OnRetry:     func(err error) { t.slot.State.ReportProblem("scheduled", err) },
		OnRecovered: func() { t.slot.State.ClearProblems("scheduled") },
		Collections: t.schedules.Outboxes,
		Slot:        t.slot.Slot,
		Mark:        t.slot.cfg.Recording == ledger.RecordMark,
		OnSent:      func(duration time.Duration) { t.slot.metrics.DueError.Observe(duration, 1) },
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
		OnFailing:   func(object, cause string) { t.slot.State.SetObjectProblem("purge", object, cause) },
	})
	return &sides{outlet: out, sender: sender, scheduled: scheduled, purger: purger}
}

// finishSent finishes deliveries that an earlier owner made outside of stream order and did
// not record (N8). It runs before the stored offsets can move. An envelope that still waits
// afterwards was not sent, so it may wait for any time.
func (t *term) finishSent(ctx context.Context, sides *sides) (finished int, err error) {
	err = t.calls.RetryRead(ctx, func(ctx context.Context) error {
		// An envelope of a claim that was sent to some of its topics waits for the others, so the claims come last.
		stored, err := sides.sender.FinishSent(ctx)
		if err != nil {
			return err
		}
		claimed, err := sides.scheduled.Recover(ctx)
		finished = stored + claimed
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
	return MayPurgeAsOwner(t.slot.cfg) && t.held.Valid() && !t.plan.IsSweeping() && t.stream.State().Ready()
}

// loadStored sets the gates of keys that wait. It returns the events after the position that
// wait or are dead already (N15), or nil if there are none. It runs before the stream
// is opened.
func (t *term) loadStored(ctx context.Context, sides *sides, margin time.Duration) (*pipeline.PreviousOwner, error) {
	previous := pipeline.NewPreviousOwner()
	after := outboxes.PosOf(t.start.from)
	at, _ := t.start.from.Time()
	sweptAfter := outboxes.PosSweptAfter(at, margin)
	isAfter := func(pos string) bool { return pos > after || sweptAfter(pos) }

	var n reconciler.Loaded
	err := t.calls.RetryRead(ctx, func(ctx context.Context) (err error) {
		// A failed attempt may have closed some gates already.
		t.resolver.OpenAllGates()
		previous.Reset()
		n, err = sides.sender.Load(ctx, isAfter,
			func(ns, topic, key string) { t.resolver.CloseGate(sides.outlet.RecordNamespace(ns), topic, key) }, previous.AddWaiting)
		return err
	})
	if err != nil {
		return nil, err
	}
	if n.Waiting > 0 {
		t.log.Info("loaded the waiting envelopes of an earlier owner",
			"waiting", n.Waiting, "gates", n.Gates, "after_the_position", n.Known)
	}

	// Dead envelopes could be sent by now, if their problem is fixed, but later events of their keys were sent
	// without them.
	err = t.calls.RetryRead(ctx, func(ctx context.Context) error {
		return letters.Later(ctx, t.letters, t.slot.cfg.Watcher, t.slot.Slot, t.start.from, func(mark letters.Mark) error {
			previous.AddDeadLetter(mark)
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
