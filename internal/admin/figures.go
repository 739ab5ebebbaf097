package admin

import (
	"cmp"
	"context"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/letterparts"
	"github.com/outrelay/outrelay/internal/letters"
	"github.com/outrelay/outrelay/internal/waiting"
)

const (
	figuresFresh  = 2 * time.Second  // age at which figures are renewed while an operator reads them
	figuresIdle   = 10 * time.Second // age otherwise, and the interval between evaluations of the health rules
	figuresStale  = 15 * time.Second // older figures are not shown
	viewerTimeout = 30 * time.Second // an operator counts as reading for this long after a request
	countTimeout  = 30 * time.Second // bounds one count
	countingShare = 30               // counting takes at most a thirtieth of the time

	// fewCollections is the largest number of collections that are all counted. With more, only
	// collections are counted that the watcher has marked as containing exceptions or scheduled
	// envelopes.
	fewCollections = 32

	maxServiceDatabases = 100 // databases that are searched for inboxes and sagas
	maxConcurrentCounts = 4   // collections that are counted at the same time

	// maxPendingCounted bounds the count of pending envelopes in a collection. Without the bound, a
	// backlog would be read completely for each count, by a server that is busy with the backlog.
	maxPendingCounted = 10_000

	// maxLettersCounted bounds the count of dead letters of handlers in a collection, with the requeued ones.
	maxLettersCounted = 100_000
)

// figures are the values of the overview that have to be counted.
type figures struct {
	at             time.Time
	counts         Counts
	pending        []PendingTopic
	oldest, newest time.Time // of the oplog; zero if unknown
	checks         []Check
}

// figureSet holds the figures of each watcher that an operator has requested. Its size is bounded
// by the number of watchers in the state database.
type figureSet struct {
	mu        sync.Mutex
	byWatcher map[string]*watcherFigures
	running   bool // keepFresh is running
}

type watcherFigures struct {
	operator      Operator
	last          figures
	cost          time.Duration // duration of the last count
	lastViewed    time.Time
	lastEvaluated time.Time
	rules         health.Evaluator
	busy          chan struct{} // closed at the end of the current count; nil if there is none
}

func (s *figureSet) findOrAddLocked(o Operator) *watcherFigures {
	if s.byWatcher == nil {
		s.byWatcher = map[string]*watcherFigures{}
	}

	w := s.byWatcher[o.Watcher]
	if w == nil {
		w = &watcherFigures{operator: o}
		s.byWatcher[o.Watcher] = w
	}
	return w
}

// currentFigures returns the figures of the watcher, which are counted now if nothing renews them.
func (o Operator) currentFigures(ctx context.Context) (figures, error) {
	return cmp.Or(o.figures, &figureSet{}).getFigures(ctx, o)
}

// getFigures returns the figures of the operator's watcher. It returns the last figures if they are
// fresh, or if keepFresh renews them. Otherwise it counts, or waits for a count that is in
// progress.
func (s *figureSet) getFigures(ctx context.Context, o Operator) (figures, error) {
	for {
		s.mu.Lock()
		w := s.findOrAddLocked(o)
		now := time.Now()
		w.lastViewed = now

		// A renewal in the background may take long in a large outbox, so its figures may be older by its cost.
		age := now.Sub(w.last.at)
		fresh := age <= figuresFresh
		renewed := s.running && age <= max(figuresStale, 2*countingShare*w.cost)
		if !w.last.at.IsZero() && (fresh || renewed) {
			defer s.mu.Unlock()
			return w.last, nil
		}
		busy := w.busy
		s.mu.Unlock()

		if busy == nil {
			return s.updateFigures(ctx, o)
		}
		// The result of the other count is fetched in the next round.
		select {
		case <-busy:
		case <-ctx.Done():
			return figures{}, context.Cause(ctx)
		}
	}
}

// updateFigures counts the figures of the operator's watcher. If a count is in progress, it returns
// that result instead.
func (s *figureSet) updateFigures(ctx context.Context, o Operator) (figures, error) {
	s.mu.Lock()
	w := s.findOrAddLocked(o)
	if w.busy != nil {
		// getFigures waits for the count in progress.
		s.mu.Unlock()
		return s.getFigures(ctx, o)
	}
	busy := make(chan struct{})
	w.busy = busy
	s.mu.Unlock()

	began := time.Now()
	f, err := countFigures(ctx, o)

	s.mu.Lock()
	defer s.mu.Unlock()
	w.busy = nil
	w.cost = time.Since(began)

	// If the caller has gone away, the error shows nothing about the deployment.
	if ctx.Err() == nil {
		now := time.Now()
		// The rules need observations at regular intervals, however often the page is viewed.
		if now.Sub(w.lastEvaluated) >= figuresIdle-figuresFresh/2 {
			w.lastEvaluated = now
			w.rules.Observe(health.Observation{
				At:     now,
				Err:    err,
				Dead:   f.counts.Dead,
				Counts: []health.Count{{Name: "exceptions", N: f.counts.Waiting()}},
			})
		}
	}

	// The checks are reported even if the count has failed: a failed count is one of their findings.
	f.checks = newRuleChecks(w.rules.Report())
	if err == nil {
		w.last = f
	} else {
		w.last.checks = f.checks
	}
	close(busy)
	return f, err
}

// keepFresh renews figures until ctx ends.
func (s *figureSet) keepFresh(ctx context.Context, o Operator, log *slog.Logger) {
	s.mu.Lock()
	s.running = true
	s.findOrAddLocked(o)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running = false
		s.mu.Unlock()
	}()

	// Figures are renewed before they are too old, so a viewer never waits for a count.
	tick := time.NewTicker(figuresFresh / 4)
	defer tick.Stop()
	for {
		for _, due := range s.dueOperators(time.Now()) {
			countCtx, cancel := context.WithTimeout(ctx, countTimeout)
			if _, err := s.updateFigures(countCtx, due); err != nil && ctx.Err() == nil {
				log.Debug("cannot count the figures of the overview", "watcher", due.Watcher, "reason", err)
			}
			cancel()
		}

		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// dueOperators returns operators for the watchers whose figures have to be counted now.
func (s *figureSet) dueOperators(now time.Time) []Operator {
	s.mu.Lock()
	defer s.mu.Unlock()

	var due []Operator
	for _, w := range s.byWatcher {
		// Figures of other watchers are renewed only while an operator reads them.
		viewed := now.Sub(w.lastViewed) < viewerTimeout
		if !viewed && !w.operator.isConfigured() {
			continue
		}

		every := figuresIdle
		if viewed {
			// A little early, so that the next request finds fresh figures.
			every = figuresFresh - figuresFresh/4
		}
		if now.Sub(w.last.at) >= max(every, countingShare*w.cost) && w.busy == nil {
			due = append(due, w.operator)
		}
	}
	return due
}

// figureCount counts the figures of a watcher once.
type figureCount struct {
	op       Operator
	position bson.Timestamp // that all slots have passed; zero if a slot has none yet

	mu      sync.Mutex
	figures figures
	waiting []waiting.Topic
}

// countFigures counts everything once. It reads every exception, one index entry per dead letter
// and per scheduled envelope, and the letters that exist. A collection without any of them costs a
// few milliseconds at most.
func countFigures(ctx context.Context, op Operator) (figures, error) {
	c := &figureCount{op: op, figures: figures{at: time.Now()}}
	status, err := ReadStatus(ctx, op.State)
	if err != nil {
		return c.figures, err
	}
	names, err := op.collectionNames(ctx)
	if err != nil {
		return c.figures, err
	}

	// The oplog is optional: without the privilege to read it, the headroom is unknown.
	if op.Oplog != nil {
		c.figures.oldest, c.figures.newest, _ = op.Oplog(ctx)
	}

	// If the watcher has no position yet, the position is zero and no envelope counts as pending.
	c.position, _ = op.lowestPosition(ctx)
	if err := c.countOutboxes(ctx, names, dirtyCollections(status, op.Watcher)); err != nil {
		return c.figures, err
	}
	if err := c.countLetters(ctx); err != nil {
		return c.figures, err
	}
	return c.figures, c.countServices(ctx, databaseNames(names))
}

// dirtyCollections returns the collections that the watcher's slots have marked as containing
// exceptions or scheduled envelopes.
func dirtyCollections(s Status, watcher string) map[string]bool {
	dirty := map[string]bool{}
	for _, w := range s.Watchers {
		if w.Name != watcher {
			continue
		}
		for _, ns := range w.Dirty {
			dirty[ns] = true
		}
	}
	return dirty
}

// databaseNames returns the sorted names of the databases of the namespaces.
func databaseNames(namespaces []string) []string {
	databases := make([]string, len(namespaces))
	for i, ns := range namespaces {
		databases[i], _, _ = strings.Cut(ns, ".")
	}
	slices.Sort(databases)
	return slices.Compact(databases)
}

// countOutboxes counts all outboxes, several at the same time.
func (c *figureCount) countOutboxes(ctx context.Context, names []string, dirty map[string]bool) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentCounts)
	for _, ns := range names {
		g.Go(func() error {
			// Of many outboxes, only those on the watcher's dirty list can contain exceptions.
			counts, topics, err := c.countOutbox(ctx, ns, dirty[ns] || len(names) <= fewCollections)

			c.mu.Lock()
			defer c.mu.Unlock()
			c.waiting = append(c.waiting, topics...)
			c.figures.counts.addOutbox(counts)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}

	// The counts of states come from the topics, so that both views agree.
	c.figures.pending = groupByTopic(c.waiting, time.Now())
	counts := &c.figures.counts
	for _, w := range c.waiting {
		counts.Retry += w.Retry
		counts.Blocked += w.Blocked
		counts.Parked += w.Parked
		counts.BlockedKeys += w.Keys
	}
	return nil
}

// addOutbox adds the counts that countOutbox returned.
func (c *Counts) addOutbox(o Counts) {
	c.Envelopes += o.Envelopes
	c.Pending += o.Pending
	c.PendingMore = c.PendingMore || o.PendingMore
	c.Scheduled += o.Scheduled
}

// countLetters counts the dead letters of all outboxes.
func (c *figureCount) countLetters(ctx context.Context) (err error) {
	counts := &c.figures.counts
	counts.DeadAll, err = letters.Count(ctx, c.op.letters(), letters.Query{Watcher: c.op.Watcher})
	// Most watchers have no letters, and need no second count.
	if err != nil || counts.DeadAll == 0 {
		return err
	}
	counts.Dead, err = letters.Count(ctx, c.op.letters(), letters.Query{Watcher: c.op.Watcher, RequeueStatus: letters.Replayable})
	return err
}

// countOutbox counts the envelopes of one outbox. It counts exceptions and scheduled
// envelopes only if countExceptions is true.
func (c *figureCount) countOutbox(
	ctx context.Context, ns string, countExceptions bool,
) (n Counts, topics []waiting.Topic, err error) {
	client := c.op.State.Client()
	coll := outboxes.CollectionOf(client, ns)
	if n.Envelopes, err = coll.EstimatedDocumentCount(ctx); err != nil {
		return n, nil, err
	}

	if countExceptions {
		if topics, err = waiting.CountWaiting(ctx, coll); err != nil {
			return n, nil, err
		}
		if n.Scheduled, _, err = outboxes.CountDue(ctx, coll, slot.Range{}, math.MaxInt64); err != nil {
			return n, nil, err
		}
	}

	if !c.position.IsZero() {
		if n.Pending, _, err = outboxes.CountBehind(ctx, coll, c.position, maxPendingCounted); err != nil {
			return n, nil, err
		}
		n.PendingMore = n.Pending == maxPendingCounted
	}
	return n, topics, nil
}

// countServices counts the inboxes, sagas and dead letters of handlers in the databases of the outboxes.
func (c *figureCount) countServices(ctx context.Context, databases []string) error {
	counts := &c.figures.counts
	return c.op.forEachService(ctx, databases, func(name string, found serviceCollections) error {
		for _, coll := range found.inboxes {
			n, err := c.op.Inboxes().count(ctx, name, coll)
			if err != nil {
				return err
			}
			counts.InboxHandled += n.Handled
			counts.InboxClaimed += n.Claimed
		}

		for _, coll := range found.letters {
			series, err := letterparts.CountSeries(ctx, c.op.database(name), coll, maxLettersCounted)
			if err != nil {
				return err
			}
			for _, one := range series {
				counts.HandlerDead += one.Dead
			}
		}

		if found.sagas {
			types, err := c.op.Sagas().listTypes(ctx, name)
			if err != nil {
				return err
			}
			for _, t := range types {
				counts.Sagas += t.Count
			}
		}
		return nil
	})
}

// newRuleChecks converts the results of the health rules to checks.
func newRuleChecks(r health.Report) []Check {
	statuses := map[health.Status]string{
		health.OK:        CheckOK,
		health.Degraded:  CheckWarn,
		health.Unhealthy: CheckFail,
	}
	checks := make([]Check, len(r.Checks))
	for i, c := range r.Checks {
		checks[i] = Check{ID: c.ID, Status: statuses[c.Status], Detail: c.Detail, Fix: c.Fix}
	}
	return checks
}

// groupByTopic adds up the waiting envelopes of several collections by topic. The topic with the
// oldest envelope comes first.
func groupByTopic(list []waiting.Topic, now time.Time) []PendingTopic {
	topics := []PendingTopic{}
	indexes := map[string]int{}
	for _, w := range list {
		i, exists := indexes[w.Topic]
		if !exists {
			i = len(topics)
			indexes[w.Topic] = i
			topics = append(topics, PendingTopic{Topic: w.Topic, Collections: []string{}})
		}

		p := &topics[i]
		p.Retry += w.Retry
		p.Blocked += w.Blocked
		p.Parked += w.Parked
		p.Keys += w.Keys
		p.Collections = append(p.Collections, w.NS)
		if !w.Oldest.IsZero() && (p.Oldest == nil || w.Oldest.Before(*p.Oldest)) {
			oldest := w.Oldest.UTC()
			p.Oldest = &oldest
			p.OldestAgeS = max(now.Sub(oldest).Seconds(), 0)
		}
	}

	slices.SortStableFunc(topics, func(a, b PendingTopic) int {
		return cmp.Or(cmp.Compare(b.OldestAgeS, a.OldestAgeS), strings.Compare(a.Topic, b.Topic))
	})
	return topics
}
