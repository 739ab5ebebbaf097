package process

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/letterparts"
)

const (
	// figuresEvery is the interval at which an owner counts the documents in its collections. The
	// health rules compare these counts.
	figuresEvery = 10 * time.Second
	// figuresShare bounds the cost of counting: after a count, the pause is at least this many
	// times as long as the count took.
	figuresShare = 30
	// indexesEvery is the interval at which indexes are compared with the declared indexes.
	indexesEvery = 5 * time.Minute
	// figuresLimit is the number at which counting one collection stops.
	figuresLimit = 100_000
	// figuresDatabases is how many databases are searched for the dead letters of handlers.
	figuresDatabases = 100
	// figuresTimeout bounds the queries for one collection.
	figuresTimeout = 2 * time.Second
	// overdueAfter is the time after which a due envelope that is not sent makes its collection
	// overdue.
	overdueAfter = 10 * time.Second
)

// figures counts documents for the metrics and the health rules while this process owns a slot of
// the watcher.
type figures struct {
	relay     *Relay
	judge     *health.Evaluator
	countedAt atomic.Int64 // Unix nanoseconds; 0 while this process owns no slot
	oplog     atomic.Pointer[problems.Oplog]
	facts     atomic.Pointer[problems.Facts] // of the last round, without the steps of this process

	// Used only by countPeriodically.
	indexesCheckedAt time.Time
	missingIndexes   map[string]int                // number of declared indexes that do not exist, by collection
	counted          map[string]metrics.Collection // of the last round that counted the outbox, by namespace
	lastOutbox       string                        // the last one that was counted
}

// countPeriodically counts until ctx ends. If a collection cannot be counted, only the health
// report contains that.
func (f *figures) countPeriodically(ctx context.Context) error {
	figures := &f.relay.metrics.Figures
	figures.Limit.Set(figuresLimit)
	figures.Watcher.WithLabelValues(f.relay.cfg.Watcher, f.relay.cfg.Node).Set(1)
	figures.Problems.SetSource(func() []metrics.Age {
		var ages []metrics.Age
		for _, problem := range f.relay.Problems() {
			ages = append(ages, metrics.Age{
				Labels: []string{string(problem.Kind), problem.Object, string(problem.Severity)},
				Age:    time.Duration(problem.ForS * float64(time.Second)),
			})
		}
		return ages
	})
	figures.Age.SetSource(func() float64 {
		if at := f.countedAt.Load(); at > 0 {
			return time.Since(time.Unix(0, at)).Seconds()
		}
		return 0
	})
	figures.Ready.SetSource(func() float64 {
		ok, _, _ := f.relay.processHealth().Ready()
		return metrics.Bool(ok)
	})

	// The first count comes soon, for people who watch a start.
	for wait := figuresEvery / 5; retry.Sleep(ctx, wait) == nil; {
		began := time.Now()
		f.countOnce(ctx, began)
		wait = max(figuresEvery, figuresShare*time.Since(began))
	}
	return nil
}

// countOnce counts, updates the metrics and evaluates the health rules.
func (f *figures) countOnce(ctx context.Context, now time.Time) {
	facts := f.readFacts(ctx)
	defer func() {
		if ctx.Err() == nil {
			f.facts.Store(&facts)
		}
	}()

	// A standby evaluates nothing: the owner reports on the collections.
	active := f.relay.activeSlots()
	if len(active) == 0 {
		f.countedAt.Store(0)
		f.indexesCheckedAt, f.counted = time.Time{}, nil
		f.relay.metrics.Figures.SetCollections(nil)
		f.relay.metrics.Figures.SetHandlerLetters(nil)
		f.judge = new(health.Evaluator)
		return
	}

	letters := &problems.Letters{}
	list, err := f.countCollections(ctx, active)
	if err == nil {
		err = f.countOpenLetters(ctx, list, letters)
	}
	if err == nil {
		facts.Letters = letters
	}
	// The errors of an interrupted count are no observation.
	if ctx.Err() != nil {
		return
	}
	observation := health.Observation{At: now, Err: err}
	var overdue int64
	for _, c := range list {
		observation.Dead += c.DeadLetters
		if c.Overdue > overdueAfter {
			overdue++
		}
	}
	var waiting int64
	for _, one := range active {
		waiting += one.WaitingCount.Load()
	}
	observation.Counts = []health.Count{
		{Name: health.WaitingRule, N: waiting},
		{Name: health.OverdueRule, N: overdue},
	}

	if err == nil {
		f.countedAt.Store(now.UnixNano())
		f.relay.metrics.Figures.SetCollections(list)
	} else {
		f.relay.log.Debug("cannot count the documents of the collections", "error", err)
	}
	report := f.judge.Observe(observation)
	facts.Health = &report
}

// readFacts reads the facts about slots and nodes, which every process reports. What cannot be read is unknown: the heartbeat fails with
// the same error, and reports it.
func (f *figures) readFacts(ctx context.Context) problems.Facts {
	facts := problems.Facts{Watcher: f.relay.cfg.Watcher}
	if oplog := f.oplog.Load(); oplog != nil {
		facts.Oplog = *oplog
	}

	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()
	status, err := problems.ReadStatus(ctx, state.Open(f.relay.shared.Mongo.State, f.relay.cfg.State))
	if err == nil {
		facts.Slots = slices.DeleteFunc(status.Slots, func(slot problems.SlotStatus) bool { return slot.Name != f.relay.cfg.Watcher })
	}
	facts.Nodes = f.countNodes(ctx)
	return facts
}

// Problems returns the problems that this process knows. The facts about the whole watcher are of the last count, at most some ten
// seconds old. It does not block.
func (r *Relay) Problems() []problems.Problem {
	facts := problems.Facts{Watcher: r.cfg.Watcher}
	if counted := r.figures.facts.Load(); counted != nil {
		facts = *counted
	}
	facts.Now = r.shared.Clock.Now()
	facts.Node, facts.StepFailsAfter = r.cfg.Node, r.cfg.HTTP.Readiness

	facts.Own = []problems.OwnSteps{{Object: r.cfg.Node, Steps: r.shared.State.Problems()}}
	for _, one := range r.slots {
		// With one slot, its state is that of the process.
		if one.State == r.shared.State {
			facts.Own[0] = problems.OwnSteps{Object: one.DisplayName(), Steps: one.State.Problems()}
			continue
		}
		facts.Own = append(facts.Own, problems.OwnSteps{Object: one.DisplayName(), Steps: one.State.Problems()})
	}
	return problems.List(facts)
}

// countNodes updates the metrics of live and stale nodes, and returns the nodes, or nil if they cannot be read.
func (f *figures) countNodes(ctx context.Context) []nodes.Node {
	list, err := f.relay.shared.Nodes.List(ctx)
	if err != nil {
		return nil
	}

	var alive, stale float64
	for _, n := range list {
		if n.Alive(nodes.StaleAfter) {
			alive++
		} else {
			stale++
		}
	}
	f.relay.metrics.Figures.Nodes.WithLabelValues("alive").Set(alive)
	f.relay.metrics.Figures.Nodes.WithLabelValues("stale").Set(stale)
	return append([]nodes.Node{}, list...)
}

// countCollections counts up to outboxes.MaxCounted of the collections, with a few short queries that use indexes or metadata. The figures
// of the others are those of an earlier round. It returns the first error, and counts the other collections nevertheless.
func (f *figures) countCollections(ctx context.Context, active []*term.Runner) ([]metrics.Collection, error) {
	// Envelopes after the position of the slot that is furthest behind are pending. The position is
	// zero while a slot has none.
	var after bson.Timestamp
	for i, one := range active {
		at := one.ReachedTime()
		if i == 0 || at.Before(after) {
			after = at
		}
	}

	// A start makes missing indexes concurrently with the delivery, so they are checked more often.
	every := indexesEvery
	for _, n := range f.missingIndexes {
		if n > 0 {
			every = indexesEvery / 10
		}
	}
	all := active[0].WatchedOutboxes()
	checkIndexes := time.Since(f.indexesCheckedAt) > every || len(all) > outboxes.MaxCounted
	if checkIndexes {
		f.indexesCheckedAt = time.Now()
		if f.missingIndexes == nil || len(all) <= outboxes.MaxCounted {
			f.missingIndexes = map[string]int{}
		}
	}

	letters, err := f.countLetters(ctx)
	if err != nil {
		return nil, err
	}

	now := f.relay.shared.Clock.Now()
	round := f.nextOutboxes(all)
	due, err := f.listScheduled(ctx)
	if err != nil {
		return nil, err
	}
	var list []metrics.Collection
	var failed error
	inboxes := map[string]bool{}
	for _, o := range all {
		collection := f.counted[o.NS()]
		collection.Name = o.NS()
		if round[collection.Name] || due[collection.Name] {
			one, cancel := context.WithTimeout(ctx, figuresTimeout)
			var err error
			// All outboxes of a database share one inbox.
			if round[collection.Name] {
				collection = metrics.Collection{Name: collection.Name}
				err = f.countCollection(one, o, after, &collection, !inboxes[o.DB])
				inboxes[o.DB] = true
				if checkIndexes && err == nil {
					f.countIndexes(one, o)
				}
			}
			if err == nil {
				err = f.countDue(one, o, now, &collection, due[collection.Name] || len(all) <= outboxes.MaxCounted && round[collection.Name])
			}
			cancel()
			if err != nil && failed == nil {
				failed = err
			}
		}

		collection.DeadLetters, collection.HasDead = letters[collection.Name], true
		collection.MissingIndexes, collection.HasIndexes = f.missingIndexes[collection.Name]
		list = append(list, collection)
	}
	f.counted = make(map[string]metrics.Collection, len(list))
	for _, c := range list {
		f.counted[c.Name] = c
	}
	return list, failed
}

// nextOutboxes returns the outboxes that this round counts: those after the last one of the round before.
func (f *figures) nextOutboxes(list []outboxes.Outbox) map[string]bool {
	names := make([]string, len(list))
	for i, o := range list {
		names[i] = o.NS()
	}
	slices.Sort(names)

	round := map[string]bool{}
	for _, ns := range outboxes.NextToCount(names, f.lastOutbox) {
		f.lastOutbox = ns
		round[ns] = true
	}
	return round
}

// listScheduled returns up to outboxes.MaxCounted of the outboxes that hold scheduled envelopes.
func (f *figures) listScheduled(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()
	coll := state.Open(f.relay.shared.Mongo.State, f.relay.cfg.State).Collection("schedules")
	names, err := outboxes.ListScheduled(ctx, coll, f.relay.cfg.Watcher)
	due := map[string]bool{}
	for _, ns := range names[:min(len(names), outboxes.MaxCounted)] {
		due[ns] = true
	}
	return due, err
}

// countLetters returns the number of dead letters by outbox.
func (f *figures) countLetters(ctx context.Context) (map[string]int64, error) {
	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()
	coll := state.Open(f.relay.shared.Mongo.State, f.relay.cfg.State).Collection("letters")
	return mongodb.CountValues(ctx, coll, bson.D{{Key: "watcher", Value: f.relay.cfg.Watcher}}, "ns", figuresLimit)
}

// countOpenLetters counts the dead letters that are not requeued into open, and updates the metric of those of handlers, in the databases
// of the collections.
func (f *figures) countOpenLetters(ctx context.Context, list []metrics.Collection, open *problems.Letters) error {
	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()

	var total int64
	for _, c := range list {
		total += c.DeadLetters
	}
	if total > 0 {
		coll := state.Open(f.relay.shared.Mongo.State, f.relay.cfg.State).Collection("letters")
		var err error
		if open.Relay, open.Oldest, err = letters.CountOpen(ctx, coll, f.relay.cfg.Watcher); err != nil {
			return err
		}
	}

	var all []metrics.HandlerLetters
	databases := map[string]bool{}
	for _, c := range list {
		name, _, _ := strings.Cut(c.Name, ".")
		if databases[name] {
			continue
		}
		databases[name] = true
		if len(databases) > figuresDatabases {
			break
		}

		for _, coll := range f.relay.cfg.DeadLetters.Handlers {
			series, err := letterparts.CountSeries(ctx, mongodb.Database(f.relay.shared.Mongo.State, name), coll, figuresLimit)
			// Without the privilege, the metric stays empty: the relay does not need these collections.
			if err = ignoreUnauthorized(err); err != nil {
				return err
			}
			for _, s := range series {
				open.Handlers += s.Dead
				all = append(all, metrics.HandlerLetters(s))
			}
		}
	}
	f.relay.metrics.Figures.SetHandlerLetters(all)
	return nil
}

// countCollection counts one collection into collection, except for its scheduled envelopes. It skips documents that the user may not read: the
// relay does not need these privileges. It also skips what only a read of a large collection could count.
func (f *figures) countCollection(
	ctx context.Context, outbox outboxes.Outbox, after bson.Timestamp, collection *metrics.Collection, inbox bool,
) error {
	db := mongodb.Database(f.relay.shared.Mongo.State, outbox.DB)
	if !after.IsZero() {
		n, oldest, err := outboxes.CountBehind(ctx, db.Collection(outbox.Coll), after, figuresLimit)
		switch {
		case err == nil:
			collection.Pending, collection.HasPending = n, true
		case !errors.Is(err, outboxes.ErrNotIndexed):
			return ignoreUnauthorized(err)
		}
		if !oldest.IsZero() {
			collection.OldestAge = max(f.relay.shared.Clock.Now().Sub(time.Unix(int64(oldest.T), 0)), 0)
		}
	}

	if !inbox {
		return nil
	}
	n, err := db.Collection(record.InboxCollection).EstimatedDocumentCount(ctx)
	if err != nil {
		return ignoreUnauthorized(err)
	}
	// The metadata of an empty inbox and of a missing inbox are equal.
	collection.Inbox, collection.HasInbox = n, n > 0
	return nil
}

// countDue counts the scheduled envelopes of one collection into collection. look is false if the collection is on no list of those that hold
// any.
func (f *figures) countDue(ctx context.Context, outbox outboxes.Outbox, now time.Time, collection *metrics.Collection, look bool) error {
	collection.Scheduled, collection.Overdue, collection.HasScheduled = 0, 0, true
	if !look {
		return nil
	}

	coll := mongodb.Database(f.relay.shared.Mongo.State, outbox.DB).Collection(outbox.Coll)
	n, first, err := outboxes.CountDue(ctx, coll, slot.Range{}, figuresLimit)
	collection.Scheduled, collection.HasScheduled = n, err == nil
	if !first.IsZero() {
		collection.Overdue = max(now.Sub(first), 0)
	}

	if errors.Is(err, outboxes.ErrNotIndexed) {
		return nil
	}
	return ignoreUnauthorized(err)
}

// countIndexes compares the indexes of one collection with the declared indexes. If they cannot be
// listed, the collection has no metric until the next check.
func (f *figures) countIndexes(ctx context.Context, outbox outboxes.Outbox) {
	coll := mongodb.Database(f.relay.shared.Mongo.State, outbox.DB).Collection(outbox.Coll)
	missing, err := connect.WantedIndexes(f.relay.cfg).Missing(ctx, coll)
	if err == nil {
		f.missingIndexes[outbox.NS()] = len(missing)
	}
}

// ignoreUnauthorized returns nil if err is caused by a missing privilege, and err otherwise.
func ignoreUnauthorized(err error) error {
	if mongodb.HasCode(err, mongodb.CodeUnauthorized) {
		return nil
	}
	return err
}
