package term

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/ledger"
	"github.com/outrelay/outrelay/internal/letters"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/readiness"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/slots"
)

// takeOver prepares the term after the lease was acquired. The order of its steps is essential:
// first the collections are listed and claimed, then earlier senders are fenced and their records
// read back, with the new sender persisted before its first record (N4), and only then the stream
// may be opened. It returns where to open it. It blocks until MongoDB and Kafka have answered, or
// ctx ends.
func (t *term) takeOver(ctx, work context.Context, g *errgroup.Group) (changestream.Start, error) {
	none := changestream.Start{}
	doc := t.held.Document()

	if err := t.calls.RetryCall(ctx, func(ctx context.Context) error {
		return t.slot.shared.Clock.Sync(ctx, t.slot.shared.Mongo.Stream)
	}); err != nil {
		return none, err
	}

	// If the watcher was divided between the check of the standby and the acquisition, the
	// acquisition has made a document that must not exist.
	if err := t.slot.checkRedivided(ctx); err != nil {
		return none, err
	}

	// The time comes before the list of collections: inserts into a collection that appears
	// after the list was read are then committed after this time.
	began, err := t.calls.OperationTime(ctx)
	if err != nil {
		return none, err
	}
	claims, err := t.findCollections(ctx, &doc)
	if err != nil {
		return none, err
	}

	// Indexes are made concurrently with the rest of the takeover, which is slow without them.
	t.inBackground(t.indexes.ensureAllIndexes)
	t.inBackground(func(ctx context.Context) { t.collections.ForgetGone(ctx, claims) })

	// The first position is saved below. After that, later owners look for scheduled envelopes only in the outboxes on the
	// list (N17).
	if doc.Position().IsZero() {
		if err := t.schedules.NoteExisting(ctx, t.collections.WatchedOutboxes()); err != nil {
			return none, err
		}
	}
	if err := t.schedules.Load(ctx); err != nil {
		return none, err
	}

	start, err := t.start.findStart(ctx, &doc, began)
	if err != nil {
		return none, err
	}
	if err := t.calls.RetryCall(ctx, func(ctx context.Context) error {
		// This comes after the first position is saved: a slot that has begun and has no position
		// has lost its document.
		return t.slot.shared.Divisions.Begin(ctx, t.slot.cfg.Watcher, t.slot.Slot)
	}); err != nil {
		return none, err
	}
	if err := t.collections.ClaimCollections(ctx, claims, t.start.from.ClusterTime); err != nil {
		return none, err
	}

	t.stampMargin = mongodb.Margin(ctx, t.slot.shared.Mongo.Stream)
	if t.sink, err = t.openSink(ctx, &doc); err != nil {
		return none, err
	}
	t.countTopics(ctx)
	t.dispatcher.SetSink(t.sink)
	t.dispatcher.Start(t.start.from)

	// The read-back has ended, so it cannot have found records of events that are committed after
	// this time.
	until, err := t.calls.OperationTime(ctx)
	if err != nil {
		return none, err
	}

	if t.slot.scope.Multiple() && t.namespaceAlias(&doc).NS != nil {
		t.start.keepDescriptionUntil(until)
	}

	t.reconciler = t.newReconciler()

	// After this, envelopes that were delivered no longer wait when the store is loaded.
	finished, err := t.finishSent(ctx)
	if err != nil {
		return none, err
	}
	previous, err := t.loadStored(ctx)
	if err != nil {
		return none, err
	}

	// The stream repeats the events of envelopes that were sent outside of its order since the position.
	t.dispatcher.BeginReplay(finished > 0 || previous != nil || doc.Beside > outboxes.PosOf(t.start.from))
	t.pump = t.newPump(until, previous)
	t.recovery.Pump = t.pump

	g.Go(func() error { return ignoreStop(work, t.sink.Run(work)) })
	g.Go(func() error { return ignoreStop(work, t.ledger.Run(work)) })
	t.startReconciler(ctx, work, g)
	t.delivering.Store(true)
	t.slot.current.Store(t)

	t.log.Info("took over", "watcher", t.slot.cfg.Watcher, "node", t.slot.cfg.Node,
		"position", t.start.from.Token.String(), "time", t.start.from.ClusterTime.T)
	t.journal.appendEvent(ctx, nodes.TookOver, bson.D{{Key: "position", Value: t.start.from.Token.String()}})
	return start, nil
}

// newDispatcher returns the dispatcher of the term, without a sink.
func (t *term) newDispatcher() *pipeline.Dispatcher {
	return pipeline.New(pipeline.Config{
		Pool:    t.slot.shared.Pool,
		Ledger:  t.ledger,
		Ready:   t.ready,
		Now:     t.slot.shared.Clock.Now,
		Metrics: pipeline.Metrics{Acked: t.observeAcked, Dead: t.observeDead, Held: t.observeHeld},
	})
}

// observeAcked counts a batch that Kafka acknowledged.
func (t *term) observeAcked(b *record.AckedBatch) {
	t.acked.Add(int64(b.Records))
	t.slot.shared.LastAck.Store(time.Now().UnixNano())
	t.slot.metrics.ObservePublish(b.TP.Topic, metrics.Acked, b.Records)
	b.EachLatency(t.slot.metrics.ObserveLatency)
	t.activity.Observe(b)
}

// observeDead counts a dead letter. Without a topic, the envelope was dead before it had one.
func (t *term) observeDead(topic string, class record.Class) {
	t.slot.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
	if topic != "" {
		t.slot.metrics.ObservePublish(topic, metrics.Refused, 1)
	}
}

// observeHeld counts envelopes that were stored as waiting.
func (t *term) observeHeld(reason string, n int) {
	t.slot.metrics.Reconciled.WithLabelValues(reason).Add(float64(n))
}

// openSink fences every earlier sender and persists the new one. It blocks until that succeeds, the
// lease is lost or ctx ends.
func (t *term) openSink(ctx context.Context, doc *lease.Document) (opened *sink.Sink, err error) {
	err = t.calls.Retry(ctx, "kafka", func(ctx context.Context) (err error) {
		in := slots.FenceInput(&t.slot.cfg, t.slot.Slot, t.held, doc)
		in.Alias, in.Event = t.namespaceAlias(doc), t.journal.recordFenceEvent
		opened, err = t.slot.sinks.Open(ctx, sink.TakeOver{Holder: t.dispatcher, Fence: in}, t.held, t.dispatcher)
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}

		// If another owner initializes the same transactional id at the same moment, the
		// coordinator may fence both. That proves nothing about the lease, so the lease holder
		// tries again after a random wait (N5).
		if err != nil {
			return t.diagnoseKafka(ctx, err)
		}
		return nil
	})
	return opened, err
}

// namespaceAlias returns the collection to which records without the header outrelay-ns belong (N7):
// earlier versions did not write the header for the only collection of a watcher. It returns
// the zero Alias if the watcher had several collections at the checkpoint.
func (t *term) namespaceAlias(doc *lease.Document) fence.Alias {
	only := t.slot.scope.String()
	if t.slot.scope.Multiple() {
		if len(doc.Collections) != 1 {
			return fence.Alias{}
		}
		only = doc.Collections[0].NS
	}

	ns := routing.NamespaceHash(only)
	return fence.Alias{NS: ns[:]}
}

// diagnoseKafka returns an error that contains the fix, if the client can determine the cause of
// err. Otherwise it returns err. It takes at most three seconds.
func (t *term) diagnoseKafka(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if d := t.slot.shared.Kafka.Diagnose(ctx); d != nil {
		return d
	}
	return err
}

func (t *term) newStream() (*changestream.Stream, error) {
	return changestream.New(changestream.Config{
		Client:         t.slot.shared.Mongo.Stream,
		Scope:          t.slot.scope,
		ReadPreference: t.slot.shared.Mongo.StreamPreference,
		Skip:           t.listSkips(),
		Log:            t.log,
		Metrics: changestream.Metrics{
			Batch: func(events, bytes int, _ time.Duration) {
				t.slot.metrics.Read.Add(float64(events))
				t.slot.metrics.ReadBytes.Add(float64(bytes))
				t.slot.metrics.Batches.Inc()
			},
			Restart: func(reason string) { t.slot.metrics.StreamRestarts.WithLabelValues(reason).Inc() },
		},
	})
}

// listSkips returns the events that operators have ordered to pass over.
func (t *term) listSkips() (list []changestream.Skip) {
	doc := t.held.Document()
	at, _ := doc.Position().Time()
	for _, s := range doc.Control.Skips {
		// The stream has passed it.
		if !s.At.After(at) {
			continue
		}
		db, coll, _ := strings.Cut(s.NS, ".")
		list = append(list, changestream.Skip{DB: db, Coll: coll, ID: s.ID, Until: s.At})
		t.log.Warn("the stream passes over an event, because an operator has ordered it", "collection", s.NS, "id", letters.IDText(s.ID))
	}
	return list
}

// buildConfig returns the parts that build the records of envelopes.
func (t *term) buildConfig() pipeline.BuildConfig {
	return pipeline.BuildConfig{
		Mapping: t.slot.shared.Mapping,
		Router:  t.slot.shared.Router,
		Preset:  t.slot.shared.Preset,
		Scope:   t.slot.scope,
		Now:     t.slot.shared.Clock.Now,
		Tap:     t.slot.tap,

		Activity: t.activity,
	}
}

// newPump returns the pump of the term. until is the end of the replay window.
func (t *term) newPump(until bson.Timestamp, previous *pipeline.PreviousOwner) *pipeline.Pump {
	return pipeline.NewPump(t.buildConfig(), pipeline.PumpConfig{
		Dispatcher:       t.dispatcher,
		Term:             t,
		Collections:      t.collections.Claimed,
		Stored:           t.newStoredTopics(),
		DropExpired:      t.slot.cfg.Expired == "drop",
		RecordDeliveries: t.slot.cfg.Recording != ledger.RecordWatermark,
		StampMargin:      uint32(t.stampMargin / time.Second),
		ReplayUntil:      until,
		Previous:         previous,
		DrainedSlots:     t.start.drainedSlots,
	})
}

// findCollections lists the watched collections and returns the claims of the watcher. A watcher
// with claims has had a position, because the first position is saved before the first claim. If it
// has none, its document has vanished, and the error is a *HaltError.
func (t *term) findCollections(ctx context.Context, doc *lease.Document) ([]outboxes.Registration, error) {
	if err := t.collections.ListCollections(ctx); err != nil {
		return nil, err
	}
	claims, err := t.collections.Registrations(ctx)
	if err != nil || !doc.Position().IsZero() || doc.Gap != nil || len(claims) == 0 {
		return claims, err
	}

	// With several slots, the claims may belong to other slots, so the slot is looked up. If that
	// fails, it counts as begun: a slot must not start from the beginning by mistake.
	begun := true
	_ = t.calls.RetryCall(ctx, func(ctx context.Context) (err error) {
		begun, err = t.slot.shared.Divisions.Begun(ctx, t.slot.cfg.Watcher, t.slot.Slot)
		return err
	})
	if begun {
		return claims, &readiness.HaltError{
			What: "the watcher document of " + t.slot.displayName() + " vanished: its place in the stream is lost",
			Fix:  "run `outrelay recover`, which sweeps the collections; no envelope is lost",
		}
	}
	return claims, nil
}

// HandleDDL implements pipeline.Term.
func (t *term) HandleDDL(ctx context.Context, ev *changestream.Event) error {
	return t.recovery.HandleDDL(ctx, ev)
}

// AdoptCollection implements pipeline.Term: it registers a collection that appeared while the stream
// runs, before its first event is delivered.
func (t *term) AdoptCollection(ctx context.Context, ev *changestream.Event) error {
	o, err := t.collections.AdoptCollection(ctx, ev)
	if err != nil {
		return err
	}
	t.indexes.ensureIndexes(o)

	list := t.collections.CollectionIdentities()
	err = t.held.Save(ctx, lease.Update{Collections: &list})

	// A batch may contain many new collections, and would look like a hung pump without ticks.
	t.NoteProgress()
	return err
}

// NoteIrregularID implements pipeline.Term.
func (t *term) NoteIrregularID(ctx context.Context, uuid [16]byte) error {
	return t.collections.MarkIrregularIDs(ctx, uuid)
}

// NoteScheduled implements pipeline.Term. After the watermark has passed the envelope, a later owner looks for it only in the
// outboxes on the list (N17).
func (t *term) NoteScheduled(ctx context.Context, ns string, id bson.RawValue, dueAt time.Time) error {
	if err := t.schedules.Note(ctx, ns); err != nil {
		return err
	}
	t.reconciler.scheduled.NoteScheduled(ns, id, dueAt)
	return nil
}

// NoteProgress implements pipeline.Term.
func (t *term) NoteProgress() { t.calls.Ticks.Add(1) }

// CountDropped implements pipeline.Term.
func (t *term) CountDropped(class record.Class) {
	if class == record.Expired {
		t.slot.metrics.Reconciled.WithLabelValues("expired_dropped").Inc()
	}
	t.slot.metrics.Dropped.WithLabelValues(string(class)).Inc()
}

// topicNamesEvery is the interval at which the topics are listed while envelopes name more topics
// than topics.max.
const topicNamesEvery = 10 * time.Second

// countTopics starts to count the topics that envelopes name. Topics of the cluster do not count, so
// that a service with invented topic names cannot use up the places of existing topics. They are
// listed now, and again while the count is at its maximum, because topics may have been created
// since.
func (t *term) countTopics(ctx context.Context) {
	var existing atomic.Pointer[map[string]bool]
	existing.Store(&map[string]bool{})
	list := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, topicNamesEvery)
		defer cancel()
		names, err := t.slot.shared.Kafka.TopicNames(ctx)
		if err != nil {
			t.log.Debug("cannot list the topics of the cluster", "error", err)
			return
		}
		existing.Store(&names)
	}

	list(ctx)
	t.slot.shared.Router.ResetTopics(func(topic string) bool { return (*existing.Load())[topic] })
	t.inBackground(func(ctx context.Context) {
		for retry.Sleep(ctx, topicNamesEvery) == nil {
			// Below the maximum, a topic is accepted whether or not the cluster has it.
			if t.slot.shared.Router.TopicsFull() {
				list(ctx)
			}
		}
	})
}
