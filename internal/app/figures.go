package app

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/store"
)

const (
	// figuresEvery is how often an owner counts what lies in its collections; the health rules compare these counts.
	figuresEvery = 10 * time.Second
	// figuresShare bounds what that may cost: where it takes long, the next one comes so many times later.
	figuresShare = 30
	// indexesEvery is how often indexes are compared with those that are declared.
	indexesEvery = 5 * time.Minute
	// figuresLimit is where counting one collection stops.
	figuresLimit = 100_000
	// figuresTimeout bounds one question.
	figuresTimeout = 2 * time.Second
	// overdueAfter is from when on a scheduled envelope that is not sent counts as one that waits.
	overdueAfter = 10 * time.Second

	// inboxCollection is where the consumers of a service keep what they have handled, unless told otherwise.
	inboxCollection = "inbox"
)

// figures counts what no stage knows, for the metrics and the health rules, while this process owns the watcher.
type figures struct {
	*Relay
	judge     *health.Evaluator
	countedAt atomic.Int64 // when it was counted last, Unix nanoseconds; 0 while nothing is owned

	indexesCheckedAt time.Time      // when indexes were looked at last; these two are the loop's alone
	missingIndexes   map[string]int // by collection: declared indexes that are not there
}

// countPeriodically counts until ctx ends. What cannot be counted is no failure of the relay; health tells of it.
func (f *figures) countPeriodically(ctx context.Context) error {
	m := &f.metrics.Figures
	m.Limit.Set(figuresLimit)
	m.Watcher.WithLabelValues(f.cfg.Watcher, f.cfg.Node).Set(1)
	m.Health.Enter(string(health.OK))
	m.Age.From(func() float64 {
		if at := f.countedAt.Load(); at > 0 {
			return time.Since(time.Unix(0, at)).Seconds()
		}
		return 0
	})
	m.Ready.From(func() float64 {
		ok, _, _ := f.processHealth().Ready()
		return boolGauge(ok)
	})
	wait := figuresEvery / 5 // the first soon, for those who watch a start
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
		began := time.Now()
		f.countOnce(ctx, began)
		wait = max(figuresEvery, figuresShare*time.Since(began))
	}
}

// countOnce counts, shows and judges.
func (f *figures) countOnce(ctx context.Context, now time.Time) {
	f.countNodes(ctx)
	terms := f.activeTerms()
	if len(terms) == 0 { // a standby has nothing to judge: what the owner sees is the owner's
		f.countedAt.Store(0)
		f.indexesCheckedAt = time.Time{}
		f.metrics.Figures.Show(nil)
		f.judge = new(health.Evaluator)
		f.metrics.Figures.Health.Enter(string(health.OK))
		f.state.setReport(nil)
		return
	}
	list, err := f.countCollections(ctx, terms)
	if ctx.Err() != nil {
		return
	}
	o := health.Observation{At: now, Err: err}
	var overdue int64
	for _, c := range list {
		o.Dead += c.DeadLetters
		if c.Overdue > overdueAfter {
			overdue++
		}
	}
	o.Counts = []health.Count{{Name: "exceptions", N: f.waitingExceptions(terms)}, {Name: "overdue_collections", N: overdue}}
	if err == nil {
		f.countedAt.Store(now.UnixNano())
		f.metrics.Figures.Show(list)
	} else {
		f.log.Debug("what lies in the collections could not be counted", "reason", err)
	}
	report := f.judge.Observe(o)
	f.metrics.Figures.Health.Enter(string(report.Status))
	f.state.setReport(&report)
}

// waitingExceptions are those of the last audits.
func (f *figures) waitingExceptions(terms []*term) (n int64) {
	for _, t := range terms {
		n += t.waitingCount.Load()
	}
	return n
}

func (f *figures) countNodes(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, figuresTimeout)
	defer cancel()
	list, err := f.nodes.List(ctx)
	if err != nil {
		return // the heartbeat meets the same and tells of it
	}
	var alive, stale float64
	for _, n := range list {
		if n.Alive(staleAfter) {
			alive++
		} else {
			stale++
		}
	}
	f.metrics.Figures.Nodes.WithLabelValues("alive").Set(alive)
	f.metrics.Figures.Nodes.WithLabelValues("stale").Set(stale)
}

// countCollections looks at each collection of the term: a handful of short questions that indexes or metadata answer.
func (f *figures) countCollections(ctx context.Context, terms []*term) ([]metrics.Collection, error) {
	var after bson.Timestamp // of slots, the one that is furthest behind; zero while one has not begun
	for i, t := range terms {
		at := bson.Timestamp{}
		if pos, ok := t.dispatcher.Reached(); ok {
			at, _ = pos.Time()
		}
		if i == 0 || at.Before(after) {
			after = at
		}
	}
	now := f.clock.now()
	var list []metrics.Collection
	var failed error
	every := indexesEvery
	for _, n := range f.missingIndexes {
		if n > 0 { // a start makes them beside the delivery
			every = indexesEvery / 10
		}
	}
	look := time.Since(f.indexesCheckedAt) > every
	if look {
		f.indexesCheckedAt, f.missingIndexes = time.Now(), map[string]int{}
	}
	inboxes := map[string]bool{}
	for _, o := range terms[0].watchedOutboxes() {
		c := metrics.Collection{Name: o.NS()}
		one, cancel := context.WithTimeout(ctx, figuresTimeout)
		err := f.countCollection(one, o, after, now, &c, !inboxes[o.DB])
		if look && err == nil {
			f.countIndexes(one, o)
		}
		cancel()
		c.MissingIndexes, c.HasIndexes = f.missingIndexes[c.Name]
		inboxes[o.DB] = true // one for all outboxes of a database
		if err != nil && failed == nil {
			failed = err
		}
		list = append(list, c)
	}
	return list, failed
}

// countCollection counts one collection. What the user may not read is left out: the privileges of the relay need not reach so far.
func (f *figures) countCollection(ctx context.Context, o store.Outbox, after bson.Timestamp, now time.Time, c *metrics.Collection, inbox bool) (err error) {
	db := f.mongo.state.Database(o.DB)
	coll := db.Collection(o.Coll)
	if !after.IsZero() {
		var oldest bson.Timestamp
		if c.Pending, oldest, err = store.CountBehind(ctx, coll, after, figuresLimit); err != nil {
			return ignoreUnauthorized(err)
		}
		if c.HasPending = true; !oldest.IsZero() {
			c.OldestAge = max(now.Sub(time.Unix(int64(oldest.T), 0)), 0)
		}
	}
	var first time.Time
	if c.Scheduled, first, err = store.CountDue(ctx, coll, figuresLimit); err != nil {
		return ignoreUnauthorized(err)
	}
	if c.HasScheduled = true; !first.IsZero() {
		c.Overdue = max(now.Sub(first), 0)
	}
	if c.DeadLetters, err = db.Collection(deadletter.Collection(o.Coll)).EstimatedDocumentCount(ctx); err != nil {
		return ignoreUnauthorized(err)
	}
	c.HasDead = true
	if !inbox {
		return nil
	}
	if c.Inbox, err = db.Collection(inboxCollection).EstimatedDocumentCount(ctx); err != nil {
		return ignoreUnauthorized(err)
	}
	c.HasInbox = c.Inbox > 0 // else there is none, as far as metadata tell
	return nil
}

// countIndexes compares the indexes of one collection. What cannot be listed now has no series until the next look.
func (f *figures) countIndexes(ctx context.Context, o store.Outbox) {
	missing, err := store.MissingIndexes(ctx, f.mongo.state.Database(o.DB).Collection(o.Coll))
	if err == nil {
		f.missingIndexes[o.NS()] = len(missing)
	}
}

// unauthorized is the server's code for what a user may not do.
const unauthorized = 13

func ignoreUnauthorized(err error) error {
	if se := mongo.ServerError(nil); errors.As(err, &se) && se.HasErrorCode(unauthorized) {
		return nil
	}
	return err
}
