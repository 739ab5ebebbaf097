package app

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/purge"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/slots"
	"github.com/outrelay/outrelay/resume"
)

// takeOver prepares the term after the lease was acquired. The order of its steps is essential:
// first the collections are listed and claimed, then earlier senders are fenced and their records
// read back, with the new sender persisted before its first record (N4), and only then the stream
// may be opened. It returns where to open it. It blocks until MongoDB and Kafka have answered, or
// ctx ends.
func (t *term) takeOver(ctx, work context.Context, g *errgroup.Group) (changestream.Start, error) {
	none := changestream.Start{}
	doc := t.held.Document()

	if err := t.retryCall(ctx, "mongodb", func(ctx context.Context) error {
		return t.slot.relay.clock.sync(ctx, t.slot.relay.mongo.stream)
	}); err != nil {
		return none, err
	}
	if err := t.checkSchema(ctx); err != nil {
		return none, err
	}
	if err := t.confirmDivision(ctx); err != nil {
		return none, err
	}
	if err := t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		t.seal, err = t.slot.relay.registry.Seal(ctx)
		return err
	}); err != nil {
		return none, err
	}

	// The time comes before the list of collections: inserts into a collection that appears in
	// between are then committed after it.
	began, err := t.operationTime(ctx)
	if err != nil {
		return none, err
	}
	claims, err := t.findCollections(ctx, &doc)
	if err != nil {
		return none, err
	}

	// Indexes are made concurrently with the rest of the takeover, which is slow without them.
	t.runInBackground(t.ensureAllIndexes)

	// The first position is saved below. After that, later owners look only at collections on the
	// dirty list (N17).
	t.dirty = newDirtyList(t, &doc)
	if doc.Position().IsZero() {
		if err := t.dirty.markAllNonEmpty(ctx); err != nil {
			return none, err
		}
	}

	start, err := t.findStart(ctx, &doc, began)
	if err != nil {
		return none, err
	}
	if err := t.markSlotBegun(ctx); err != nil {
		return none, err
	}
	if err := t.claimCollections(ctx, claims); err != nil {
		return none, err
	}

	t.stampMargin = mongodb.Margin(ctx, t.slot.relay.mongo.stream)
	disp := t.newDispatcher()
	sink, err := t.openSink(ctx, &doc, disp)
	if err != nil {
		return none, err
	}
	t.countTopics(ctx)
	t.dispatcher = disp
	t.sink = sink
	disp.SetSink(sink)
	disp.Start(t.from)
	disp.BeginReplay(len(doc.Dirty) > 0)

	// The read-back has ended, so it cannot have found records of events that are committed after
	// this time.
	until, err := t.operationTime(ctx)
	if err != nil {
		return none, err
	}

	if t.stream, err = t.newStream(); err != nil {
		return none, err
	}
	t.drainedSlots = pipeline.ParseDrainedSlots(&doc)
	t.reconciler = t.newReconciler(&doc)
	if err := t.recoverUnrecorded(ctx); err != nil {
		return none, err
	}
	previous, err := t.loadExceptions(ctx)
	if err != nil {
		return none, err
	}
	t.pump = t.newPump(until, previous)

	g.Go(func() error { return ignoreStop(work, sink.Run(work)) })
	g.Go(func() error { return ignoreStop(work, disp.Run(work)) })
	t.startReconciler(ctx, work, g)
	t.delivering.Store(disp)
	t.slot.current.set(t)

	t.log.Info("took over", "watcher", t.slot.cfg.Watcher, "node", t.slot.cfg.Node,
		"position", t.from.Token.String(), "time", t.from.ClusterTime.T)
	t.appendEvent(ctx, nodes.TookOver, bson.D{{Key: "position", Value: t.from.Token.String()}})
	return start, nil
}

// operationTime returns the current cluster time of the server. It blocks until MongoDB answers or
// ctx ends.
func (t *term) operationTime(ctx context.Context) (at bson.Timestamp, err error) {
	err = t.retryCall(ctx, "mongodb", func(ctx context.Context) (err error) {
		at, err = mongodb.ClusterTime(ctx, t.slot.relay.mongo.stream)
		return err
	})
	return at, err
}

// retryCall repeats op until it succeeds, and reports its errors as a problem of part. Each attempt
// has a deadline, so op must be cheap for the server.
func (t *term) retryCall(ctx context.Context, part string, op func(context.Context) error) error {
	return t.retryReporting(ctx, part, func(ctx context.Context) error {
		call, cancel := context.WithTimeout(ctx, t.slot.relay.pace.call)
		defer cancel()
		return op(call)
	})
}

// retryRead is like retryCall, without deadlines. It is for reads of a collection: without an index
// they take time in proportion to its size, so an attempt after a deadline would only start from
// the beginning.
func (t *term) retryRead(ctx context.Context, op func(context.Context) error) error {
	return t.retryReporting(ctx, "mongodb", func(ctx context.Context) error {
		ended := make(chan error, 1)
		go func() { ended <- op(ctx) }()

		ticker := time.NewTicker(time.Second)
		defer ticker.Stop()
		for {
			select {
			case err := <-ended:
				return err
			case <-ticker.C:
				// The pump may be the caller. Without ticks the monitor would consider it hung.
				t.progress.ticks.Add(1)
			}
		}
	})
}

// retryReporting repeats op until it succeeds or ctx ends, and reports its errors as a problem of
// part.
func (t *term) retryReporting(ctx context.Context, part string, op func(context.Context) error) error {
	err := retry.Do(ctx, retry.Reopen, op, func(err error, _ time.Duration) { t.slot.reportProblem(part, err, false) })
	if err == nil {
		t.slot.state.clearProblems(part)
	}
	return err
}

// newDispatcher returns the dispatcher of the term, without a sink.
func (t *term) newDispatcher() *pipeline.Dispatcher {
	return pipeline.New(pipeline.Config{
		Pool:       t.slot.relay.pool,
		Exceptions: &exceptionWriter{t},
		Recorder:   &exceptionWriter{t},
		Retry:      t.retryFenced,
		Now:        t.slot.relay.clock.now,
		Ready:      func(topic string) { t.reconciler.exceptions.Wake(topic) },
		Found:      func(ready func() bool, let func()) { t.reconciler.exceptions.ReclaimLate(ready, let) },
		Metrics: pipeline.Metrics{
			Published: func(topic string, n int) {
				t.progress.acked.Add(int64(n))
				t.slot.relay.lastAck.Store(time.Now().UnixNano())
				t.slot.metrics.ObservePublish(topic, metrics.Acked, n)
			},
			Dead: func(topic string, class record.Class) {
				t.slot.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
				if topic != "" {
					t.slot.metrics.ObservePublish(topic, metrics.Refused, 1)
				}
			},
			Held: func(state string, n int) { t.slot.metrics.Reconciled.WithLabelValues(state).Add(float64(n)) },
			Latency: func(ms float64) {
				t.slot.metrics.ObserveLatency(time.Duration(ms*float64(time.Millisecond)), 1)
			},
		},
	})
}

// openSink fences every earlier sender and persists the new one. It blocks until that succeeds, the
// lease is lost or ctx ends.
func (t *term) openSink(ctx context.Context, doc *lease.Document, disp *pipeline.Dispatcher) (*sink.Sink, error) {
	var opened *sink.Sink
	err := retry.Do(ctx, retry.Reopen, func(ctx context.Context) (err error) {
		opened, err = t.slot.sinks.Open(ctx, sink.TakeOver{Holder: disp, Fence: fence.In{
			TransactionalID: slots.TransactionalID(doc, t.slot.cfg.Watcher, t.slot.part),
			Generation:      doc.Generation,
			Offsets:         doc.OffsetMap(),
			Senders:         doc.Senders(),
			Gate:            t.held.Valid,
			Bounds: fence.Bounds{
				Bytes: int64(t.slot.cfg.Kafka.ReadBack.Bytes),
				Time:  t.slot.cfg.Kafka.ReadBack.Time,
			},
			Alias: t.namespaceAlias(doc),
			Alive: doc.RenewedAt,
			Event: t.recordFenceEvent,
		}}, senderClaims{t.held}, disp)
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}

		// If another owner initializes the same transactional id at the same moment, the
		// coordinator may fence both. That proves nothing about the lease, so the lease holder
		// tries again after a random wait (N5).
		return err
	}, func(err error, _ time.Duration) { t.slot.reportProblem("kafka", t.diagnoseKafka(ctx, err), false) })
	if err == nil {
		t.slot.state.clearProblems("kafka")
		t.slot.metrics.KafkaReachable.Set(1)
	}
	return opened, err
}

// namespaceAlias returns the collection whose records may be in the topics both with the header
// outrelay-ns and without it (N7). There is one if the watcher changed from one collection to
// several since the checkpoint, or from several to one. Otherwise it returns the zero Alias.
func (t *term) namespaceAlias(doc *lease.Document) fence.Alias {
	only := t.slot.scope.String()
	if t.slot.scope.Multiple() {
		if len(doc.Collections) != 1 {
			return fence.Alias{}
		}
		only = doc.Collections[0].NS
	}

	ns := routing.NamespaceHash(only)
	return fence.Alias{NS: ns[:], Named: t.slot.scope.Multiple()}
}

// diagnoseKafka returns an error that contains the fix, if the client can determine the cause of
// err. Otherwise it returns err. It takes at most three seconds.
func (t *term) diagnoseKafka(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if d := t.slot.relay.kafka.Diagnose(ctx); d != nil {
		return d
	}
	return err
}

// senderClaims saves senders and offsets of the sink in the watcher document.
type senderClaims struct{ held *lease.Held }

// Save implements sink.Claims.
func (c senderClaims) Save(ctx context.Context, senders []record.Sender, offsets map[string][]int64) error {
	u := lease.Update{Offsets: offsets}
	if senders != nil {
		u.Senders = &senders
		generation := 0
		for _, s := range senders {
			generation = max(generation, s.Generation)
		}
		u.Generation = &generation
	}
	return c.held.Save(ctx, u)
}

func (t *term) newStream() (*changestream.Stream, error) {
	return changestream.New(changestream.Config{
		Client: t.slot.relay.mongo.stream,
		Scope:  t.slot.scope,
		Log:    t.log,
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

// buildConfig returns what is needed to build the records of envelopes.
func (t *term) buildConfig() pipeline.BuildConfig {
	return pipeline.BuildConfig{
		Router: t.slot.relay.router,
		Preset: t.slot.relay.preset,
		Scope:  t.slot.scope,
		Seal:   t.seal,
		Now:    t.slot.relay.clock.now,
		Tap:    t.slot.tap,
	}
}

// newPump returns the pump of the term. until is the end of the replay window.
func (t *term) newPump(until bson.Timestamp, previous *pipeline.PreviousOwner) *pipeline.Pump {
	return pipeline.NewPump(t.buildConfig(), pipeline.PumpConfig{
		Dispatcher:       t.dispatcher,
		Term:             pumpTerm{t},
		Collections:      t.collections,
		DropExpired:      t.slot.cfg.Expired == "drop",
		RecordDeliveries: t.slot.cfg.Recording != purge.RecordWatermark,
		StampMargin:      uint32(t.stampMargin / time.Second),
		ReplayUntil:      until,
		Previous:         previous,
		DrainedSlots:     t.drainedSlots,
	})
}

// pumpTerm is the term as its pump uses it.
type pumpTerm struct{ t *term }

// HandleDDL implements pipeline.Term.
func (p pumpTerm) HandleDDL(ctx context.Context, ev *changestream.Event) error {
	return p.t.handleDDL(ctx, ev)
}

// AdoptCollection implements pipeline.Term.
func (p pumpTerm) AdoptCollection(ctx context.Context, ev *changestream.Event) error {
	return p.t.adoptCollection(ctx, ev)
}

// MarkDirty implements pipeline.Term.
func (p pumpTerm) MarkDirty(ctx context.Context, ns string) error { return p.t.dirty.mark(ctx, ns) }

// NoteScheduled implements pipeline.Term.
func (p pumpTerm) NoteScheduled(ns string, id bson.RawValue, dueAt time.Time) {
	p.t.reconciler.scheduled.NoteScheduled(ns, id, dueAt)
}

// NoteProgress implements pipeline.Term.
func (p pumpTerm) NoteProgress() { p.t.progress.ticks.Add(1) }

// CountDropped implements pipeline.Term.
func (p pumpTerm) CountDropped() {
	p.t.slot.metrics.Reconciled.WithLabelValues("expired_dropped").Inc()
}

// findStart returns where to open the stream, and sets t.from to the position that stays until the
// stream moves it. began is a cluster time before the collections were listed.
func (t *term) findStart(ctx context.Context, doc *lease.Document, began bson.Timestamp) (changestream.Start, error) {
	hash := t.slot.scope.PipelineHash()
	identities := t.collectionIdentities()
	t.from = doc.Position()

	if doc.Gap != nil {
		u := lease.Update{PipelineHash: &hash, Collections: &identities}
		return t.resumeGap(ctx, doc, u, began)
	}
	if !t.from.IsZero() {
		s := changestream.Start{Position: t.from, PipelineHash: doc.PipelineHash}
		for _, c := range doc.Collections {
			s.Collections = append(s.Collections, resumeCollection(c))
		}

		// The hash may only be saved with a position that was reached with this pipeline (N23): see
		// saveDescription.
		t.unsavedDescription = &lease.Update{PipelineHash: &hash, Collections: &identities}
		return s, nil
	}

	at, err := t.findFirstStart(ctx, began)
	if err == nil {
		at, err = t.agreeOnStart(ctx, at)
	}
	if err != nil {
		return changestream.Start{}, err
	}

	// The position is persisted before the first event. After a crash from here on, the next owner
	// starts at the same place.
	t.from = resume.Position{ClusterTime: at}
	u := lease.Update{
		Checkpoint:   lease.Checkpoint{Position: t.from},
		PipelineHash: &hash,
		Collections:  &identities,
	}
	hidden, err := t.hasUnstampedBacklog(ctx, began)
	if err != nil {
		return changestream.Start{}, err
	}
	if hidden {
		return t.planSweep(ctx, reasonBacklog, bson.Timestamp{}, began, u)
	}
	return changestream.Start{Position: t.from}, t.held.Save(ctx, u)
}

// saveDescription saves the pipeline hash and the collections of the stream, together with the
// first position that was reached with them. Before the stream has reached one, it does nothing.
func (t *term) saveDescription(ctx context.Context) {
	t.startMu.Lock()
	defer t.startMu.Unlock()
	t.forgetDrainedSlotsLocked(ctx)

	if t.unsavedDescription == nil || t.sweeping.Load() != nil {
		return
	}
	reached, ok := t.dispatcher.Reached()
	if !ok || reached.Compare(t.from) <= 0 {
		return
	}

	// The checkpoint is part of the same write: the hash must never be stored with an older
	// position.
	u := *t.unsavedDescription
	identities := t.collectionIdentities()
	u.Collections = &identities
	u.Current = true
	if err := t.held.Save(ctx, u); err != nil {
		// The renewal fails with the same error, and reports it.
		return
	}
	t.unsavedDescription = nil
}

// findFirstStart returns where a watcher without a checkpoint starts: at the oldest envelope of the
// backlog, at a configured time, or at now. now is a cluster time before the outboxes were listed.
func (t *term) findFirstStart(ctx context.Context, now bson.Timestamp) (at bson.Timestamp, err error) {
	if t.slot.cfg.Start.Now {
		return now, nil
	}
	if when := t.slot.cfg.Start.At; !when.IsZero() {
		return bson.Timestamp{T: uint32(when.Unix()), I: 1}, nil
	}

	// The reads must see everything that was committed up to now. Otherwise the oldest of it could
	// lie before the start.
	session, err := t.slot.relay.mongo.stream.StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return at, err
	}
	defer session.EndSession(ctx)
	if err := session.AdvanceOperationTime(&now); err != nil {
		return at, err
	}
	ctx = mongo.NewSessionContext(ctx, session)

	oldest := now
	for _, c := range t.watchedOutboxes() {
		coll := t.slot.relay.mongo.stream.Database(c.DB).Collection(c.Coll)
		err := t.retryRead(ctx, func(ctx context.Context) error {
			ts, ok, err := outboxes.OldestTS(ctx, coll)
			if err == nil && ok && ts.Before(oldest) {
				oldest = ts
			}
			return err
		})
		if err != nil {
			return at, err
		}
	}
	return oldest, nil
}
