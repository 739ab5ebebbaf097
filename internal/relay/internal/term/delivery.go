package term

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/internal/gap"
	"github.com/outrelay/outrelay/internal/relay/internal/ledger"
	"github.com/outrelay/outrelay/internal/relay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/relay/internal/scheduled"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/internal/watched"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/sweep"
)

// delivery has the parts of a term that exist once earlier senders are fenced. They send.
type delivery struct {
	*term
	sink       *sink.Sink
	dispatcher *pipeline.Dispatcher
	sides      *sides
	recovery   *gap.Recovery
	pump       *pipeline.Pump
}

// buildConfig returns the parts that build the records of envelopes.
func (t *term) buildConfig() pipeline.BuildConfig {
	return pipeline.BuildConfig{
		Mapping:  t.slot.shared.Mapping,
		Router:   t.slot.shared.Router,
		Preset:   t.slot.shared.Preset,
		Scope:    t.slot.scope,
		Now:      t.slot.shared.Clock.Now,
		Tap:      t.slot.tap,
		Activity: t.meter.activity,
	}
}

// prepareDelivery returns the delivery of the term, which sends to sink. It finishes what an earlier owner has sent outside of the
// order of the stream, and loads what it has stored. until is the end of the reread window.
func (t *term) prepareDelivery(ctx context.Context, sink *sink.Sink, doc *lease.Document, until bson.Timestamp) (*delivery, error) {
	margin := mongodb.Margin(ctx, t.slot.shared.Mongo.Stream)
	dispatcher := pipeline.NewDispatcher(t.resolver, sink)
	sides := t.newSides(sink, dispatcher)

	// After this, envelopes that were delivered no longer wait when the store is loaded.
	finished, err := t.finishSent(ctx, sides)
	if err != nil {
		return nil, err
	}
	previous, err := t.loadStored(ctx, sides, margin)
	if err != nil {
		return nil, err
	}

	// The stream repeats the events of envelopes that were sent outside of its order since the position. So it does after the sweep of added
	// collections, whose records follow those that the read-back has found.
	sweepsAdded := len(t.start.added.Outboxes) > 0
	t.resolver.BeginReread(finished > 0 || previous != nil || sweepsAdded || doc.Beside > outboxes.PosOf(t.start.from))

	build, cfg := t.buildConfig(), &t.slot.cfg
	feed := pipeline.FeedConfig{
		Dispatcher:       dispatcher,
		Notes:            &insertNotes{collections: t.collections, schedules: t.schedules, scheduled: sides.scheduled, meter: t.meter},
		DropExpired:      cfg.Expired == "drop",
		RecordDeliveries: cfg.Recording != ledger.RecordPosition,
		StampMargin:      uint32(margin / time.Second),
	}
	skip := sweep.NewSkip(int64(cfg.Limits.Memory) / 4)
	// The stream may repeat what an earlier owner swept right before its end.
	if doc.Swept != nil && !t.plan.IsGapOpen() {
		skip.Doubt(doc.Swept.To, doc.Swept.Until)
	}
	known := &storedTopics{calls: t.calls, store: t.store, letters: t.letters, claims: t.claims, watcher: cfg.Watcher}
	recovery := &gap.Recovery{
		Plan:       t.plan,
		Scope:      t.slot.scope,
		Schedules:  t.schedules,
		Dispatcher: dispatcher,
		Swept:      pipeline.NewSwept(build, feed, known),
		Skip:       skip,
		Metrics:    t.slot.metrics,
		Checkpoint: t.progress.checkpoint,
		Closed:     t.start.setStart,
		Lost:       t.slot.shared.Hooks.LostHistory,
		Slot:       t.slot.Slot.String(),
		CountWaiting: func(ctx context.Context, db, coll, before string) (int64, error) {
			stored, err := t.store.CountOfOutbox(ctx, db, coll, before)
			return sides.scheduled.CountOfOutbox(db, coll, before) + stored, err
		},
		Discard: func(ctx context.Context, db, coll, before string) (int64, error) {
			// A claimed envelope that cannot be sent becomes a waiting one, so the claims come first.
			claimed, err := sides.scheduled.Discard(ctx, db, coll, before)
			if err != nil {
				return claimed, err
			}
			stored, err := sides.sender.Discard(ctx, t.held, db, coll, before)
			return claimed + stored, err
		},
		CountScheduled: func(ctx context.Context, db, coll string) (int64, error) {
			// Each slot gets the event of the drop, and the count is of all slots.
			if t.slot.Slot.I > 0 {
				return 0, nil
			}
			stored, err := figures.Read(ctx, state.Open(t.slot.shared.Mongo.State, cfg.State), cfg.Watcher)
			return stored.Figures.CountScheduledOf(db, coll), err
		},
	}
	pump := pipeline.NewPump(build, feed, pipeline.PumpConfig{
		Term: &streamEvents{
			recovery: recovery, collections: t.collections, indexes: t.indexes, held: t.held, progress: t.progress, calls: t.calls,
		},
		Collections:  t.collections.Claimed,
		Swept:        skip,
		RereadUntil:  until,
		Previous:     previous,
		DrainedSlots: t.start.drainedSlots,
	})

	return &delivery{term: t, sink: sink, dispatcher: dispatcher, sides: sides, recovery: recovery, pump: pump}, nil
}

// readStream tails the stream and pumps it until ctx ends or the stream cannot continue.
func (d *delivery) readStream(ctx context.Context, start changes.Start) error {
	for {
		err := d.readStreamOnce(ctx, start)
		if start, err = d.recovery.FindNextStart(ctx, err); err != nil {
			return err
		}

		// The stream was expected to repeat the waiting envelopes of the previous owner, for their other
		// topics. It no longer can. That has to be known before these are loaded, so a new
		// takeover finds the gap in the document. Any other gap is swept in this term, because its sweep
		// leaves out the envelopes that an earlier sweep of the term has delivered (sweep.Skip).
		if d.recovery.IsGapOpen() && d.pump.RepeatsPrevious() {
			return errGapTooLate
		}
	}
}

// readStreamOnce opens the stream at start, sweeps the gap if there is one, and pumps the stream
// until it ends.
func (d *delivery) readStreamOnce(ctx context.Context, start changes.Start) error {
	batches := make(chan *changes.Batch)
	ended := make(chan error, 1)
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	d.inBackground(func(context.Context) {
		defer close(batches)
		ended <- d.stream.Run(inner, start, batches)
	})

	// The stream is open during the sweep, but held: the reader blocks with its first batch.
	closed, err := d.recovery.SweepGap(ctx, d.start.from)
	if err != nil {
		return err
	}
	if closed {
		d.pump.ForgetDrainedSlots()
	} else {
		if err := d.recovery.SweepAdded(ctx, d.start.added); err != nil {
			return err
		}
		d.dispatcher.ReleaseSwept()
		d.start.noteSwept(d.recovery.Skip.Bounds())
	}
	d.start.added = gap.Added{}

	// After an error the reader is not awaited, and it delivers nothing more. A server may respond
	// its last request only at the next write, and the lease must be released before. serveTerm
	// joins the reader.
	if err := d.pump.Run(ctx, batches); err != nil {
		return err
	}
	return <-ended
}

// drainStream waits until all events that were read are acked or stored. It gives up
// after the configured time, or when only unwritable targets are left. The next owner reads the rest
// back.
func (d *delivery) drainStream(work context.Context) {
	ctx, cancel := context.WithTimeout(work, d.slot.cfg.Lease.Drain)
	defer cancel()

	// One long drain would wait for an unwritable target until its end. Between short drains, the acks show
	// whether other targets still make progress.
	for acked := int64(-1); d.drainBriefly(ctx) != nil; {
		if ctx.Err() != nil || acked == d.meter.acked.Load() && d.hasUnwritableTargets() {
			n, _ := d.dispatcher.Unresolved()
			d.log.Warn("stopping with undelivered events; the next owner delivers them", "unresolved", n)
			break
		}
		acked = d.meter.acked.Load()
	}

	if err := d.recovery.SaveCursor(ctx); err != nil {
		d.log.Warn("cannot save the cursor of the sweep; the next owner repeats a part of it", "error", err)
	}
}

// drainCheckEvery is the interval at which a drain checks whether records are still acked.
const drainCheckEvery = 250 * time.Millisecond

// begin starts the loops of the delivery in group, and announces the takeover. Publishing ends with ctx or with publishing.stop. The loops
// that store the outcomes continue until work ends.
func (d *delivery) begin(ctx, work context.Context, group *errgroup.Group) *publishing {
	group.Go(func() error { return ignoreStop(work, d.sink.Run(work)) })
	group.Go(func() error { return ignoreStop(work, d.ledger.Run(work)) })

	pub, cancel := context.WithCancel(ctx)
	publishing := &publishing{stop: cancel, ended: make(chan struct{})}
	loops, pub := errgroup.WithContext(pub)
	for _, run := range []func(context.Context) error{
		d.sides.sender.Run,
		d.sides.scheduled.Run,
		d.sides.purger.Run,
		d.schedules.Run,
	} {
		loops.Go(func() error { return ignoreStop(pub, run(pub)) })
	}

	group.Go(func() error {
		defer close(publishing.ended)
		err := loops.Wait()
		// The end of ctx or of publishing is no error.
		if errors.Is(err, context.Canceled) || ctx.Err() != nil {
			return nil
		}
		return err
	})
	d.progress.delivering.Store(true)
	d.slot.current.Store(d.term)

	from := d.start.from
	d.log.Info("took over", "watcher", d.slot.cfg.Watcher, "node", d.slot.cfg.Node,
		"position", from.Token.String(), "cluster_time", from.ClusterTime.T)
	d.journal.appendEvent(ctx, nodes.TookOver, bson.D{{Key: "position", Value: from.Token.String()}})
	return publishing
}

// drainSides stops publishing and waits until the outcomes are stored, for at most the
// configured drain time. The next owner finds the rest in its read-back.
func (d *delivery) drainSides(work context.Context, publishing *publishing) {
	ctx, cancel := context.WithTimeout(work, d.slot.cfg.Lease.Drain)
	defer cancel()
	// A loop that still publishes would prolong the drain of its own records.
	publishing.stop()
	select {
	case <-publishing.ended:
	case <-ctx.Done():
		return
	}

	// The next owner finds records that are not acked in time in its read-back.
	if !d.hasUnwritableTargets() {
		_ = d.dispatcher.DrainSides(ctx)
	}
	if err := d.ledger.Drain(ctx); err != nil {
		d.log.Warn("cannot record all deliveries outside of the stream; the next owner finds them in the topics",
			"error", err)
	}
}

// drainBriefly drains for at most [drainCheckEvery]. It returns nil when the dispatcher is drained.
func (d *delivery) drainBriefly(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, drainCheckEvery)
	defer cancel()
	return d.dispatcher.Drain(ctx)
}

// hasUnwritableTargets reports whether envelopes wait for a target that cannot be written and is not
// parked.
func (d *delivery) hasUnwritableTargets() bool {
	return slices.ContainsFunc(d.sink.State(), func(target sink.Unwritable) bool { return target.Records > 0 && !target.Parked })
}

// insertNotes implements pipeline.Notes.
type insertNotes struct {
	collections *watched.Collections
	schedules   *watched.Schedules
	scheduled   *scheduled.Scheduled
	meter       *meter
}

var _ pipeline.Notes = (*insertNotes)(nil)

// NoteIrregularID implements pipeline.Notes.
func (n *insertNotes) NoteIrregularID(ctx context.Context, uuid [16]byte) error {
	return n.collections.MarkIrregularIDs(ctx, uuid)
}

// NoteScheduled implements pipeline.Notes. After the position has passed the envelope, a later owner looks for it only in the
// outboxes on the list (N19).
func (n *insertNotes) NoteScheduled(ctx context.Context, ns string, dueAt time.Time) error {
	if err := n.schedules.Note(ctx, ns); err != nil {
		return err
	}
	n.scheduled.NoteScheduled(ns, dueAt)
	return nil
}

// CountDropped implements pipeline.Notes.
func (n *insertNotes) CountDropped(class record.Class) { n.meter.countDropped(class) }

// streamEvents implements pipeline.Term.
type streamEvents struct {
	recovery    *gap.Recovery
	collections *watched.Collections
	indexes     *indexKeeper
	held        *lease.Held
	progress    *progress
	calls       *readiness.Calls
}

var _ pipeline.Term = (*streamEvents)(nil)

// HandleDDL implements pipeline.Term.
func (e *streamEvents) HandleDDL(ctx context.Context, ev *changes.Event) error {
	renamed, err := e.recovery.HandleDDL(ctx, ev)
	if err != nil || !renamed {
		return err
	}
	return e.saveCollections(ctx)
}

// saveCollections saves the collections of the stream. A collection that is not saved counts as new after a change of the configuration. While
// the document describes an earlier stream, the description is saved with the position (N27).
func (e *streamEvents) saveCollections(ctx context.Context) error {
	if e.progress.undescribed.Load() {
		return nil
	}
	list := e.collections.CollectionIdentities()
	return e.held.Save(ctx, lease.Update{Collections: &list})
}

// AdoptCollection implements pipeline.Term: it registers a collection that appeared while the stream
// runs, before its first event is delivered.
func (e *streamEvents) AdoptCollection(ctx context.Context, ev *changes.Event) error {
	outbox, err := e.collections.AdoptCollection(ctx, ev)
	if err != nil {
		return err
	}
	e.indexes.ensureIndexes(outbox)

	err = e.saveCollections(ctx)

	// A batch may contain many new collections, and would look like a hung pump without ticks.
	e.NoteProgress()
	return err
}

// NoteProgress implements pipeline.Term.
func (e *streamEvents) NoteProgress() { e.calls.Ticks.Add(1) }
