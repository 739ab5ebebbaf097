package term

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/internal/relay/internal/changestream"
	"github.com/outrelay/outrelay/internal/relay/internal/sink"
	"github.com/outrelay/outrelay/internal/relay/internal/slots"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// takeOver prepares the term after the lease was acquired. The order of its steps is essential:
// first the collections are listed and claimed, then earlier senders are fenced and their records
// read back, with the new sender persisted before its first record (N4), and only then the stream
// may be opened. It returns where to open it, and starts nothing that sends. It blocks until MongoDB and Kafka have responded, or
// ctx ends.
func (t *term) takeOver(ctx context.Context) (delivery *delivery, start changes.Start, err error) {
	doc := t.held.Document()
	if err := t.syncWithServers(ctx); err != nil {
		return nil, start, err
	}

	// The stream contains all inserts since began into a collection that appears after the list was read.
	began, err := t.collections.ListWithTime(ctx)
	if err != nil {
		return nil, start, err
	}
	claims, err := t.findClaims(ctx, &doc)
	if err != nil {
		return nil, start, err
	}

	// Indexes are made concurrently with the rest of the takeover, which is slow without them.
	t.inBackground(t.indexes.ensureAllIndexes)
	t.inBackground(func(ctx context.Context) { t.collections.ForgetGone(ctx, claims) })

	if err := t.findSchedules(ctx, &doc); err != nil {
		return nil, start, err
	}
	if start, err = t.start.chooseStart(ctx, &doc, began); err != nil {
		return nil, start, err
	}
	if err := t.claimCollections(ctx, claims); err != nil {
		return nil, start, err
	}

	sink, err := t.openSink(ctx, &doc)
	if err != nil {
		return nil, start, err
	}
	t.countTopics(ctx)
	t.resolver.Start(t.start.from)
	// The position from which the term starts does not show how far an earlier owner has swept.
	if t.plan.IsGapOpen() || len(t.start.added.Outboxes) > 0 {
		t.resolver.HoldSwept()
	}

	// The read-back has ended, so it cannot have found records of events that are committed after
	// this time.
	until, err := t.calls.OperationTime(ctx)
	if err != nil {
		return nil, start, err
	}
	delivery, err = t.prepareDelivery(ctx, sink, &doc, until)
	return delivery, start, err
}

// syncWithServers learns the clock of the server, and checks that the watcher was not divided between the check of the standby and
// the acquisition: the acquisition has made a document then that must not exist.
func (t *term) syncWithServers(ctx context.Context) error {
	if err := t.calls.RetryCall(ctx, func(ctx context.Context) error {
		return t.slot.shared.Clock.Sync(ctx, t.slot.shared.Mongo.Stream)
	}); err != nil {
		return err
	}
	return t.slot.division.checkRedivided(ctx)
}

// findSchedules loads the list of outboxes with scheduled envelopes. Before the first position of this watcher is saved, it adds all outboxes with such
// envelopes: later owners look for scheduled envelopes only in the outboxes on the list (N19).
func (t *term) findSchedules(ctx context.Context, doc *lease.Document) error {
	if doc.Position().IsZero() || doc.PipelineHash == lease.AdoptedHash {
		if err := t.schedules.NoteExisting(ctx, t.collections.WatchedOutboxes()); err != nil {
			return err
		}
	}
	return t.schedules.Load(ctx)
}

// claimCollections registers the collections for the watcher. It comes after the first position is saved: a slot that has begun and
// has no position has lost its document.
func (t *term) claimCollections(ctx context.Context, claims []outboxes.Registration) error {
	if err := t.calls.RetryCall(ctx, func(ctx context.Context) error {
		return t.slot.shared.Divisions.Begin(ctx, t.slot.cfg.Watcher, t.slot.Slot)
	}); err != nil {
		return err
	}
	claims, err := t.collections.ReclaimCollections(ctx, t.start.added.Outboxes, claims)
	if err != nil {
		return err
	}
	return t.collections.ClaimCollections(ctx, claims, t.start.from.ClusterTime)
}

// openSink fences every earlier sender and persists the new one. It blocks until that succeeds, the
// lease is lost or ctx ends.
func (t *term) openSink(ctx context.Context, doc *lease.Document) (opened *sink.Sink, err error) {
	err = t.calls.Retry(ctx, "kafka", func(ctx context.Context) (err error) {
		in := slots.FenceInput(&t.slot.cfg, t.slot.Slot, t.held, doc, t.store)
		in.Event = t.journal.recordFenceEvent
		in.Waiting = reportTakeover(t.slot.State)
		opened, err = t.slot.sinks.Open(ctx, sink.TakeOver{Holder: t.resolver, Fence: in}, t.held, t.resolver)
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

// diagnoseKafka returns an error that contains the fix, if the client can determine the cause of
// err. Otherwise it returns err. It takes at most three seconds.
func (t *term) diagnoseKafka(ctx context.Context, err error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if cause := t.slot.shared.Kafka.Diagnose(ctx); cause != nil {
		return cause
	}
	return err
}

// newStream returns a stream that is not open, and that will leave out skips.
func (r *Runner) newStream(log *slog.Logger, skips []changes.Skip) (*changestream.Stream, error) {
	return changestream.New(changestream.Config{
		Client:         r.shared.Mongo.Stream,
		Scope:          r.scope,
		ReadPreference: r.shared.Mongo.StreamPreference,
		Log:            log,
		Skip:           skips,
		Metrics: changestream.Metrics{
			Batch: func(events, bytes int, _ time.Duration) {
				r.metrics.Read.Add(float64(events))
				r.metrics.ReadBytes.Add(float64(bytes))
				r.metrics.Batches.Inc()
			},
			Restart: func(reason string) { r.metrics.StreamRestarts.WithLabelValues(reason).Inc() },
		},
	})
}

// listSkips returns the events that operators have ordered to pass over.
func listSkips(doc *lease.Document, log *slog.Logger) (list []changes.Skip) {
	at, _ := doc.Position().Time()
	for _, s := range doc.Control.Skips {
		// The stream has passed it.
		if !s.At.After(at) {
			continue
		}
		db, coll, _ := strings.Cut(s.NS, ".")
		list = append(list, changes.Skip{DB: db, Coll: coll, ID: s.ID, Until: s.At, At: s.EventAt, Size: s.Size})
		log.Warn("the stream passes over an event, because an operator has ordered it",
			"collection", s.NS, "id", letters.IDText(s.ID), "id_bytes", max(s.Size, len(s.ID.Value)))
	}
	return list
}

// findClaims returns the claims of the watcher. A watcher
// with claims has had a position, because the first position is saved before the first claim. If it
// has none, its document has vanished, and the error is a *HaltError.
func (t *term) findClaims(ctx context.Context, doc *lease.Document) ([]outboxes.Registration, error) {
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
			What: "the watcher document of " + t.slot.DisplayName() + " vanished: its place in the stream is lost",
			Fix:  "run `outrelay recover`, which sweeps the collections; no envelope is lost",
		}
	}
	return claims, nil
}

// topicNamesEvery is the interval at which the topics are listed while the router needs them.
const topicNamesEvery = 10 * time.Second

// countTopics starts to count the topics that envelopes name. Topics of the cluster do not count, so
// that a service with invented topic names cannot use up the places of existing topics. They are
// listed now, and again while the count is at its maximum, because topics may have been created
// since.
func (t *term) countTopics(ctx context.Context) {
	router := t.slot.shared.Router
	router.ResetTopics()
	failing := false
	list := func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, topicNamesEvery)
		defer cancel()
		names, err := t.slot.shared.Kafka.TopicNames(ctx)
		isNew := err != nil && !failing
		failing = err != nil
		// With an earlier list, the only effect is that topics that were created since count.
		if isNew && !router.KnowsTopics() {
			t.log.Warn("cannot list the topics of the cluster; topics.max counts none until then", "error", err)
		}
		if err != nil {
			return
		}
		router.SetExistingTopics(names)
	}

	list(ctx)
	t.inBackground(func(ctx context.Context) {
		for retry.Sleep(ctx, topicNamesEvery) == nil {
			if router.NeedsTopics() {
				list(ctx)
			}
		}
	})
}
