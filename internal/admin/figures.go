package admin

import (
	"cmp"
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/outboxes"
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
	desk          Desk
	last          figures
	cost          time.Duration // duration of the last count
	lastViewed    time.Time
	lastEvaluated time.Time
	rules         health.Evaluator
	busy          chan struct{} // closed at the end of the current count; nil if there is none
}

func (s *figureSet) findOrAddLocked(k Desk) *watcherFigures {
	if s.byWatcher == nil {
		s.byWatcher = map[string]*watcherFigures{}
	}

	w := s.byWatcher[k.Watcher]
	if w == nil {
		w = &watcherFigures{desk: k}
		s.byWatcher[k.Watcher] = w
	}
	return w
}

// getFigures returns the figures of the desk's watcher. It returns the last figures if they are
// fresh, or if keepFresh renews them. Otherwise it counts, or waits for a count that is in
// progress.
func (s *figureSet) getFigures(ctx context.Context, k Desk) (figures, error) {
	for {
		s.mu.Lock()
		w := s.findOrAddLocked(k)
		now := time.Now()
		w.lastViewed = now

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
			return s.updateFigures(ctx, k)
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return figures{}, context.Cause(ctx)
		}
	}
}

// updateFigures counts the figures of the desk's watcher. If a count is in progress, it returns
// that result instead.
func (s *figureSet) updateFigures(ctx context.Context, k Desk) (figures, error) {
	s.mu.Lock()
	w := s.findOrAddLocked(k)
	if w.busy != nil {
		// getFigures waits for the count in progress.
		s.mu.Unlock()
		return s.getFigures(ctx, k)
	}
	busy := make(chan struct{})
	w.busy = busy
	s.mu.Unlock()

	began := time.Now()
	f, err := k.countFigures(ctx)

	s.mu.Lock()
	defer s.mu.Unlock()
	w.busy = nil
	w.cost = time.Since(began)

	// If the caller has gone away, the error shows nothing about the deployment.
	if ctx.Err() == nil {
		now := time.Now()
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
func (s *figureSet) keepFresh(ctx context.Context, d *Deployment) {
	s.mu.Lock()
	s.running = true
	s.findOrAddLocked(d.For(Actor{}))
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running = false
		s.mu.Unlock()
	}()

	tick := time.NewTicker(figuresFresh / 4)
	defer tick.Stop()
	for {
		for _, k := range s.dueDesks(time.Now()) {
			countCtx, cancel := context.WithTimeout(ctx, countTimeout)
			if _, err := s.updateFigures(countCtx, k); err != nil && ctx.Err() == nil {
				d.logger().Debug("cannot count the figures of the overview", "watcher", k.Watcher, "reason", err)
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

// dueDesks returns desks for the watchers whose figures have to be counted now.
func (s *figureSet) dueDesks(now time.Time) []Desk {
	s.mu.Lock()
	defer s.mu.Unlock()

	var due []Desk
	for name, w := range s.byWatcher {
		// Figures of other watchers are renewed only while an operator reads them.
		viewed := now.Sub(w.lastViewed) < viewerTimeout
		configured := name == w.desk.d.Watcher
		if !viewed && !configured {
			continue
		}

		every := figuresIdle
		if viewed {
			every = figuresFresh - figuresFresh/4
		}
		if now.Sub(w.last.at) >= max(every, countingShare*w.cost) && w.busy == nil {
			due = append(due, w.desk)
		}
	}
	return due
}

// countFigures counts everything once. It reads every exception, one index entry per dead letter
// and per scheduled envelope, and the letters that exist. A collection without any of them costs a
// few milliseconds at most.
func (k Desk) countFigures(ctx context.Context) (figures, error) {
	f := figures{at: time.Now()}
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return f, err
	}
	claims, err := outboxes.NewRegistry(k.State.Collection("collections")).Registrations(ctx, k.Watcher)
	if err != nil {
		return f, err
	}
	names := uniqueNames(claims)

	// The oplog is optional: without the privilege to read it, the headroom is unknown.
	if k.d.Oplog != nil {
		f.oldest, f.newest, _ = k.d.Oplog(ctx)
	}

	if err := k.countOutboxes(ctx, names, dirtyCollections(status, k.Watcher), &f); err != nil {
		return f, err
	}
	return f, k.countServices(ctx, databaseNames(names), &f.counts)
}

// uniqueNames returns the sorted names of the registered collections.
func uniqueNames(claims []outboxes.Registration) []string {
	names := make([]string, len(claims))
	for i, c := range claims {
		names[i] = c.NS
	}
	slices.Sort(names)

	// A collection that was dropped and created again is registered twice.
	return slices.Compact(names)
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

// countOutboxes adds the counts of all outboxes to f, several outboxes at the same time.
func (k Desk) countOutboxes(ctx context.Context, names []string, dirty map[string]bool, f *figures) error {
	// If the watcher has no position yet, the position is zero and no envelope counts as pending.
	position, _ := Replayer{Operator: k.Operator}.lowestPosition(ctx)

	var mu sync.Mutex
	var topicRows []waiting.WaitingTopic
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentCounts)
	for _, ns := range names {
		g.Go(func() error {
			countExceptions := dirty[ns] || len(names) <= fewCollections
			counts, topics, err := k.countOutbox(ctx, ns, countExceptions, position)

			mu.Lock()
			defer mu.Unlock()
			topicRows = append(topicRows, topics...)
			f.counts.addOutbox(counts)
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}

	f.pending = groupByTopic(topicRows, time.Now())
	for _, w := range topicRows {
		f.counts.Retry += w.Retry
		f.counts.Blocked += w.Blocked
		f.counts.Parked += w.Parked
		f.counts.BlockedKeys += w.Keys
	}
	return nil
}

// addOutbox adds the counts that countOutbox returned.
func (c *Counts) addOutbox(o Counts) {
	c.Envelopes += o.Envelopes
	c.Pending += o.Pending
	c.PendingMore = c.PendingMore || o.PendingMore
	c.Scheduled += o.Scheduled
	c.Dead += o.Dead
	c.DeadAll += o.DeadAll
}

// countOutbox counts the envelopes and letters of one outbox. It counts exceptions and scheduled
// envelopes only if countExceptions is true.
func (k Desk) countOutbox(
	ctx context.Context, ns string, countExceptions bool, position bson.Timestamp,
) (c Counts, topicRows []waiting.WaitingTopic, err error) {
	coll, err := outboxes.Outboxed(k.State.Client(), ns)
	if err != nil {
		return c, nil, err
	}
	if c.Envelopes, err = coll.EstimatedDocumentCount(ctx); err != nil {
		return c, nil, err
	}

	if countExceptions {
		if topicRows, err = waiting.CountWaiting(ctx, coll); err != nil {
			return c, nil, err
		}
		if c.Scheduled, _, err = outboxes.CountDue(ctx, coll, math.MaxInt64); err != nil {
			return c, nil, err
		}
	}

	if !position.IsZero() {
		if c.Pending, _, err = outboxes.CountBehind(ctx, coll, position, maxPendingCounted); err != nil {
			return c, nil, err
		}
		c.PendingMore = c.Pending == maxPendingCounted
	}

	client := k.State.Client()
	c.DeadAll, err = deadletter.Count(ctx, client, []string{ns}, deadletter.Query{})
	if err != nil || c.DeadAll == 0 {
		return c, topicRows, err
	}
	c.Dead, err = deadletter.Count(ctx, client, []string{ns}, deadletter.Query{RequeueStatus: deadletter.Replayable})
	return c, topicRows, err
}

// countServices adds the inboxes and sagas in the databases of the outboxes to c.
func (k Desk) countServices(ctx context.Context, databases []string, c *Counts) error {
	for _, name := range databases[:min(len(databases), maxServiceDatabases)] {
		found, err := k.findServices(ctx, name)
		if err != nil {
			return err
		}

		for _, coll := range found.inboxes {
			n, err := k.inboxCounts(ctx, name, coll)
			if err != nil {
				return err
			}
			c.InboxHandled += n.Handled
			c.InboxClaimed += n.Claimed
		}

		if found.sagas {
			types, err := k.listSagaTypes(ctx, name)
			if err != nil {
				return err
			}
			for _, t := range types {
				c.Sagas += t.Count
			}
		}
	}
	return nil
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
func groupByTopic(list []waiting.WaitingTopic, now time.Time) []PendingTopic {
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
