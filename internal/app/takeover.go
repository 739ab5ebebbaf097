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
	"github.com/outrelay/outrelay/internal/dispatch"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/lease"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/resume"
)

// takeOver is the order on which everything rests, after the lease was won: what is ours to read, the fence and the
// read-back in Kafka with the sender persisted before its first record (N4), and only then the place to read from.
func (t *term) takeOver(ctx, work context.Context, g *errgroup.Group) (changestream.Start, error) {
	none := changestream.Start{}
	doc := t.held.Document()
	if err := t.untilDone(ctx, "mongodb", func(ctx context.Context) error { return t.clock.sync(ctx, t.mongo.stream) }); err != nil {
		return none, err
	}
	if err := t.guardSchema(ctx); err != nil {
		return none, err
	}
	if err := t.stillDivided(ctx); err != nil {
		return none, err
	}
	if err := t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		t.seal, err = t.registry.Seal(ctx)
		return err
	}); err != nil {
		return none, err
	}
	// Before the collections are looked for: what is committed to one that appears meanwhile is behind it.
	began, err := t.operationTime(ctx)
	if err != nil {
		return none, err
	}
	claims, err := t.findCollections(ctx, &doc)
	if err != nil {
		return none, err
	}
	t.later(t.indexes) // beside all that follows, which is slow without them
	t.dirty = newDirty(t, &doc)
	if doc.Position().IsZero() { // N17: before there is a position, behind which nobody would look any more
		if err := t.dirty.find(ctx); err != nil {
			return none, err
		}
	}
	start, err := t.startFrom(ctx, &doc, began)
	if err != nil {
		return none, err
	}
	if err := t.begun(ctx); err != nil {
		return none, err
	}
	if err := t.claimCollections(ctx, claims); err != nil {
		return none, err
	}
	t.margin = store.Margin(ctx, t.mongo.stream)
	disp := t.newDispatcher()
	sink, err := t.openSink(ctx, &doc, disp)
	if err != nil {
		return none, err
	}
	t.countTopics(ctx)
	t.disp, t.sink = disp, sink
	disp.Use(sink)
	disp.Start(t.from)
	disp.BeginReplay(len(doc.Dirty) > 0)
	// What is committed from here on cannot have been read back: the read-back ended before.
	until, err := t.operationTime(ctx)
	if err != nil {
		return none, err
	}
	if t.stream, err = t.newStream(); err != nil {
		return none, err
	}
	t.passed = passedOf(&doc)
	t.rec = t.newReconciler(&doc)
	if err := t.recoverSent(ctx); err != nil {
		return none, err
	}
	owned, err := t.loadExceptions(ctx)
	if err != nil {
		return none, err
	}
	t.pump = t.newPump(until, owned)
	g.Go(func() error { return endOf(work, sink.Run(work)) })
	g.Go(func() error { return endOf(work, disp.Run(work)) })
	t.reconcile(ctx, work, g)
	t.delivering.Store(disp)
	t.running.set(t)
	t.log.Info("took over", "watcher", t.cfg.Watcher, "node", t.cfg.Node, "position", t.from.Token.String(), "time", t.from.ClusterTime.T)
	t.announce(ctx, store.TookOver, bson.D{{Key: "position", Value: t.from.Token.String()}})
	return start, nil
}

// operationTime is the server's time of now, as the change stream counts it.
func (t *term) operationTime(ctx context.Context) (at bson.Timestamp, err error) {
	err = t.untilDone(ctx, "mongodb", func(ctx context.Context) (err error) {
		at, err = store.ClusterTime(ctx, t.mongo.stream)
		return err
	})
	return at, err
}

// untilDone repeats what MongoDB has to answer, and tells of it when it lasts. It is for calls that cost the server little.
func (t *term) untilDone(ctx context.Context, part string, op func(context.Context) error) error {
	return t.untilAnswered(ctx, part, func(ctx context.Context) error {
		call, cancel := context.WithTimeout(ctx, t.pace.call)
		defer cancel()
		return op(call)
	})
}

// untilRead is untilDone for a read of a collection, which takes as long as that is large where an index is missing: a deadline would
// only begin it again.
func (t *term) untilRead(ctx context.Context, op func(context.Context) error) error {
	return t.untilAnswered(ctx, "mongodb", func(ctx context.Context) error {
		ended := make(chan error, 1)
		go func() { ended <- op(ctx) }()
		alive := time.NewTicker(time.Second)
		defer alive.Stop()
		for {
			select {
			case err := <-ended:
				return err
			case <-alive.C:
				t.progress.ticks.Add(1) // it may be the pump that waits
			}
		}
	})
}

func (t *term) untilAnswered(ctx context.Context, part string, op func(context.Context) error) error {
	err := retry.Do(ctx, retry.Reopen, op, func(err error, _ time.Duration) { t.report(part, err, false) })
	if err == nil {
		t.state.clear(part)
	}
	return err
}

func (t *term) newDispatcher() *dispatch.Dispatcher {
	return dispatch.New(dispatch.Config{
		Pool:       t.pool,
		Exceptions: &exceptions{t}, Recorder: &exceptions{t}, Retry: t.retryFenced, Now: t.clock.now,
		Ready: func(topic string) { t.rec.exceptions.Wake(topic) },
		Found: func(ready func() bool, let func()) { t.rec.exceptions.Found(ready, let) },
		Metrics: dispatch.Metrics{
			Published: func(topic string, n int) {
				t.progress.acked.Add(int64(n))
				t.acked.Store(time.Now().UnixNano())
				t.metrics.ObservePublish(topic, metrics.Acked, n)
			},
			Dead: func(topic string, class record.Class) {
				t.metrics.DeadLetters.WithLabelValues(string(class)).Inc()
				if topic != "" {
					t.metrics.ObservePublish(topic, metrics.Refused, 1)
				}
			},
			Held:    func(state string, n int) { t.metrics.Reconciled.WithLabelValues(state).Add(float64(n)) },
			Latency: func(ms float64) { t.metrics.ObserveLatency(time.Duration(ms*float64(time.Millisecond)), 1) },
		},
	})
}

// openSink fences every earlier sender and persists this one. It goes on until Kafka answers, the lease is lost or ctx ends.
func (t *term) openSink(ctx context.Context, doc *lease.Document, disp *dispatch.Dispatcher) (*kafka.Sink, error) {
	var sink *kafka.Sink
	err := retry.Do(ctx, retry.Reopen, func(ctx context.Context) (err error) {
		sink, err = kafka.Open(ctx, t.kafka, kafka.TakeOver{
			TransactionalID: transactionalID(doc, t.cfg.Watcher, t.part),
			Generation:      doc.Generation,
			Offsets:         doc.OffsetMap(),
			Senders:         doc.Senders(),
			Gate:            t.held.Valid,
			Bounds:          fence.Bounds{Bytes: int64(t.cfg.Kafka.ReadBack.Bytes), Time: t.cfg.Kafka.ReadBack.Time},
			Alias:           t.alias(doc),
			Alive:           doc.RenewedAt,
			Event:           t.kafkaEvent,
			Holder:          disp,
		}, claims{t.held}, disp)
		if errors.Is(err, lease.ErrLeaseLost) {
			return retry.Permanent(err)
		}
		// N5: another owner takes the same id at this moment, and the coordinator may tell both that they lost. That says nothing
		// about the lease: whoever has it tries again, after a wait of random length.
		return err
	}, func(err error, _ time.Duration) { t.report("kafka", t.diagnose(ctx, err), false) })
	if err == nil {
		t.state.clear("kafka")
		t.metrics.KafkaReachable.Set(1)
	}
	return sink, err
}

// alias is the collection whose records stand in the topics with the header outrelay-ns or without it, when the watcher has
// become one of several collections since the checkpoint, or of one (N7).
func (t *term) alias(doc *lease.Document) fence.Alias {
	only := t.scope.String()
	if t.scope.Multiple() {
		if len(doc.Collections) != 1 {
			return fence.Alias{}
		}
		only = doc.Collections[0].NS
	}
	ns := routing.NamespaceHash(only)
	return fence.Alias{NS: ns[:], Named: t.scope.Multiple()}
}

// diagnose puts an error of Kafka into words that say what to do.
func (t *term) diagnose(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if d := t.kafka.Diagnose(ctx); d != nil {
		return d
	}
	return err
}

// claims lets the sink write into the watcher document.
type claims struct{ held *lease.Held }

// Save implements kafka.Claims.
func (c claims) Save(ctx context.Context, senders []record.Sender, offsets map[string][]int64) error {
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
		Client: t.mongo.stream, Scope: t.scope, Log: t.log,
		Metrics: changestream.Metrics{
			Batch: func(events, bytes int, _ time.Duration) {
				t.metrics.Read.Add(float64(events))
				t.metrics.ReadBytes.Add(float64(bytes))
				t.metrics.Batches.Inc()
			},
			Restart: func(reason string) { t.metrics.StreamRestarts.WithLabelValues(reason).Inc() },
		},
	})
}

func (t *term) newPump(until bson.Timestamp, owned *owned) *pump {
	p := &pump{
		filling: filling{router: t.router, filler: t.preset.Filler(), seal: t.seal},
		scope:   t.scope, disp: t.disp, ddl: t.onDDL, now: t.clock.now,
		replay: replay{until: until, end: func() { t.sink.EndReplay(); t.disp.EndReplay() }},
		standing: func(r record.Record) bool {
			_, _, ok := t.sink.Standing(&r)
			return ok
		},
		tick:        func() { t.progress.ticks.Add(1) },
		tap:         t.tap,
		dropExpired: t.cfg.Expired == "drop",
		dropped:     func() { t.metrics.Reconciled.WithLabelValues("expired_dropped").Inc() },
		known:       t.dirty,
		owned:       owned,
		saw:         t.rec.scheduled.Saw,
		remember:    t.cfg.Recording != store.RecordWatermark,
		margin:      uint32(t.margin / time.Second),
		collections: t.collections,
		adopt:       t.adopt, passed: t.passed,
	}
	p.meta.MultiCollection = t.scope.Multiple()
	return p
}

// startFrom finds the place to read from, and the position to keep until the stream moves it.
func (t *term) startFrom(ctx context.Context, doc *lease.Document, began bson.Timestamp) (changestream.Start, error) {
	hash, identities := t.scope.PipelineHash(), t.identities()
	if t.from = doc.Position(); doc.Gap != nil {
		return t.resumeGap(ctx, doc, lease.Update{PipelineHash: &hash, Collections: &identities}, began)
	}
	if !t.from.IsZero() {
		s := changestream.Start{Position: t.from, PipelineHash: doc.PipelineHash}
		for _, c := range doc.Collections {
			s.Collections = append(s.Collections, resumeCollection(c))
		}
		// Only a position that was reached with this pipeline may stand beside its hash (N23): see describe.
		t.fresh = &lease.Update{PipelineHash: &hash, Collections: &identities}
		return s, nil
	}
	at, err := t.firstStart(ctx, began)
	if err == nil {
		at, err = t.sharedStart(ctx, at)
	}
	if err != nil {
		return changestream.Start{}, err
	}
	t.from = resume.Position{ClusterTime: at}
	// Persisted before the first event: a crash from here on starts at the same place again.
	u := lease.Update{Checkpoint: lease.Checkpoint{Position: t.from}, PipelineHash: &hash, Collections: &identities}
	if hidden, err := t.unstampedBacklog(ctx, began); err != nil {
		return changestream.Start{}, err
	} else if hidden {
		return t.planSweep(ctx, reasonBacklog, bson.Timestamp{}, began, u)
	}
	return changestream.Start{Position: t.from}, t.held.Save(ctx, u)
}

// describe writes what the stream watches beside the first position that was reached with it.
func (t *term) describe(ctx context.Context) {
	t.startMu.Lock()
	defer t.startMu.Unlock()
	t.forgetPassedLocked(ctx)

	if t.fresh == nil || t.sweeping.Load() != nil {
		return
	}
	reached, ok := t.disp.Reached()
	if !ok || reached.Compare(t.from) <= 0 {
		return
	}
	u := *t.fresh
	identities := t.identities()
	u.Collections, u.Checkpoint = &identities, t.checkpoint() // the hash never stands beside an older position
	if err := t.held.Save(ctx, u); err != nil {
		return // said by the renewal, which meets the same
	}
	t.fresh = nil
}

// firstStart is where a watcher without a checkpoint begins: the backlog, a given time, or now. now is a time before the
// outboxes were listed.
func (t *term) firstStart(ctx context.Context, now bson.Timestamp) (at bson.Timestamp, err error) {
	if t.cfg.Start.Now {
		return now, nil
	}
	if when := t.cfg.Start.At; !when.IsZero() {
		return bson.Timestamp{T: uint32(when.Unix()), I: 1}, nil
	}
	// The reads must see all that was committed up to now, else the oldest of it could lie before the start.
	session, err := t.mongo.stream.StartSession(options.Session().SetCausalConsistency(true))
	if err != nil {
		return at, err
	}
	defer session.EndSession(ctx)
	if err := session.AdvanceOperationTime(&now); err != nil {
		return at, err
	}
	ctx = mongo.NewSessionContext(ctx, session)
	oldest := now
	for _, c := range t.outboxes() {
		coll := t.mongo.stream.Database(c.DB).Collection(c.Coll)
		if err := t.untilRead(ctx, func(ctx context.Context) error {
			ts, ok, err := store.OldestTS(ctx, coll)
			if err == nil && ok && ts.Before(oldest) {
				oldest = ts
			}
			return err
		}); err != nil {
			return at, err
		}
	}
	return oldest, nil
}
