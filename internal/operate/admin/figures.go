package admin

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/internal/service/letterparts"
	"github.com/outrelay/outrelay/internal/service/setaside"
)

const (
	figuresFresh  = 2 * time.Second  // age at which figures are renewed while an operator reads them
	figuresIdle   = 10 * time.Second // age otherwise, and the interval between evaluations of the health rules
	figuresStale  = 15 * time.Second // older figures are not shown
	viewerTimeout = 30 * time.Second // an operator counts as reading for this long after a request
	countTimeout  = 30 * time.Second // bounds one count
	countingShare = 30               // counting takes at most a thirtieth of the time

	maxServiceDatabases = 100 // databases that are searched for inboxes and sagas
	maxConcurrentCounts = 4   // collections that are counted at the same time

	// maxPendingCounted bounds the count of pending envelopes in a collection. Without the bound, a
	// backlog would be read completely for each count, by a server that is busy with the backlog.
	maxPendingCounted = 10_000

	// maxLettersCounted bounds the count of dead letters of handlers in a collection, with the requeued ones, and of the messages
	// that handlers retry.
	maxLettersCounted = 100_000
)

// figures are the values of the overview that have to be counted.
type figures struct {
	at             time.Time
	counts         Counts
	pending        []WaitingTopic
	oldest, newest time.Time // of the oplog; zero if unknown
	letters        *problems.Letters
	health         *health.Report
	watched        []outboxes.Finding
	outboxes       map[string]Counts // by namespace
	lastOutbox     string            // the last one that was counted
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

func (s *figureSet) findOrAddLocked(operator Operator) *watcherFigures {
	if s.byWatcher == nil {
		s.byWatcher = map[string]*watcherFigures{}
	}

	figures := s.byWatcher[operator.Watcher]
	if figures == nil {
		figures = &watcherFigures{operator: operator}
		s.byWatcher[operator.Watcher] = figures
	}
	return figures
}

// currentFigures returns the figures of the watcher, which are counted now if nothing renews them.
func (o Operator) currentFigures(ctx context.Context) (figures, error) {
	return cmp.Or(o.figures, &figureSet{}).getFigures(ctx, o)
}

// getFigures returns the figures of the operator's watcher. It returns the last figures if they are
// fresh, or if keepFresh renews them. Otherwise it counts, or waits for a count that is in
// progress.
func (s *figureSet) getFigures(ctx context.Context, operator Operator) (figures, error) {
	for {
		s.mu.Lock()
		watcherFigures := s.findOrAddLocked(operator)
		now := time.Now()
		watcherFigures.lastViewed = now

		// A renewal in the background may take long in a large outbox, so its figures may be older by its cost.
		age := now.Sub(watcherFigures.last.at)
		fresh := age <= figuresFresh
		renewed := s.running && age <= max(figuresStale, 2*countingShare*watcherFigures.cost)
		if !watcherFigures.last.at.IsZero() && (fresh || renewed) {
			defer s.mu.Unlock()
			return watcherFigures.last, nil
		}
		busy := watcherFigures.busy
		s.mu.Unlock()

		if busy == nil {
			return s.updateFigures(ctx, operator)
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
func (s *figureSet) updateFigures(ctx context.Context, operator Operator) (figures, error) {
	s.mu.Lock()
	figures := s.findOrAddLocked(operator)
	if figures.busy != nil {
		// getFigures waits for the count in progress.
		s.mu.Unlock()
		return s.getFigures(ctx, operator)
	}
	busy := make(chan struct{})
	figures.busy = busy
	before := figures.last
	s.mu.Unlock()

	began := time.Now()
	counted, err := countFigures(ctx, operator, before)

	s.mu.Lock()
	defer s.mu.Unlock()
	figures.busy = nil
	figures.cost = time.Since(began)

	// If the caller has gone away, the error shows nothing about the deployment.
	if ctx.Err() == nil {
		now := time.Now()
		// The rules need observations at regular intervals, however often the page is viewed.
		if now.Sub(figures.lastEvaluated) >= figuresIdle-figuresFresh/2 {
			figures.lastEvaluated = now
			figures.rules.Observe(health.Observation{
				At:     now,
				Err:    err,
				Dead:   counted.counts.Dead,
				Counts: []health.Count{{Name: health.WaitingRule, N: counted.counts.Waiting()}},
			})
		}
	}

	// The rules are reported even if the count has failed: a failed count is one of their findings.
	report := figures.rules.Report()
	counted.health = &report
	if err == nil {
		figures.last = counted
	} else {
		figures.last.health = counted.health
	}
	close(busy)
	return counted, err
}

// keepFresh renews figures until ctx ends.
func (s *figureSet) keepFresh(ctx context.Context, operator Operator, log *slog.Logger) {
	s.mu.Lock()
	s.running = true
	s.findOrAddLocked(operator)
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
				log.Debug("cannot count the figures of the overview", "watcher", due.Watcher, "error", err)
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

	mu       sync.Mutex
	figures  figures
	outboxes map[string]Counts // of this round
}

// countFigures counts everything once. It reads every waiting envelope, one index entry per dead letter
// and per scheduled envelope, and the letters of handlers. Of the envelopes in the outboxes, it counts at most
// [outboxes.MaxCounted] outboxes, the next ones after those that before counted; the numbers of the others come from before.
func countFigures(ctx context.Context, op Operator, before figures) (figures, error) {
	count := &figureCount{op: op, figures: figures{at: time.Now(), letters: &problems.Letters{}}, outboxes: map[string]Counts{}}
	names, err := op.collectionNames(ctx)
	if err != nil {
		return count.figures, err
	}

	// The oplog is optional: without the privilege to read it, the headroom is unknown.
	if op.Oplog != nil {
		count.figures.oldest, count.figures.newest, _ = op.Oplog(ctx)
	}
	if count.figures.watched, err = op.inspectWatched(ctx, true); err != nil {
		return count.figures, err
	}
	if err := count.countStored(ctx); err != nil {
		return count.figures, err
	}

	// If the watcher has no position yet, the position is zero and no envelope counts as pending.
	count.position, _ = op.lowestPosition(ctx)
	if err := count.countOutboxes(ctx, names, before); err != nil {
		return count.figures, err
	}
	err = count.countServices(ctx, databaseNames(names))
	count.figures.letters.Relay, count.figures.letters.Handlers = count.figures.counts.Dead, count.figures.counts.HandlerDead
	return count.figures, err
}

// countStored counts what the state database holds: waiting envelopes and dead letters. It also counts the scheduled envelopes.
func (c *figureCount) countStored(ctx context.Context) error {
	topics, err := waiting.CountTopics(ctx, c.op.waiting(), c.op.Watcher)
	if err != nil {
		return err
	}
	// The counts by reason come from the topics, so that both views agree.
	c.figures.pending = newPendingTopics(topics, time.Now())
	counts := &c.figures.counts
	for _, w := range topics {
		counts.Retry += w.Retry
		counts.Blocked += w.Blocked
		counts.Parked += w.Parked
		counts.Queued += w.Queued
		counts.BlockedKeys += w.Keys
	}

	dead := c.op.letters()
	if counts.DeadAll, err = letters.Count(ctx, dead, letters.Query{Watcher: c.op.Watcher}); err != nil {
		return err
	}
	if counts.DeadAll > 0 {
		if counts.Dead, c.figures.letters.Oldest, err = letters.CountOpen(ctx, dead, c.op.Watcher); err != nil {
			return err
		}
	}

	due, err := c.op.countDue(ctx, "")
	for _, g := range due {
		counts.Scheduled += g.Count
	}
	return err
}

// countDue counts the scheduled envelopes of the outboxes that may hold any, or of the named one. The time of a group is the first
// due time.
func (o Operator) countDue(ctx context.Context, only string) (groups []WaitingGroup, err error) {
	names, err := o.scheduledCollections(ctx, only)
	if err != nil {
		return nil, err
	}

	var mu sync.Mutex
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrentCounts)
	for _, ns := range names {
		group.Go(func() error {
			n, first, err := outboxes.CountDue(ctx, outboxes.CollectionOf(o.State.Client(), ns), slot.Range{}, math.MaxInt64)
			if errors.Is(err, outboxes.ErrNotIndexed) {
				// The number is unknown, and a read of the collection would take too long.
				return nil
			}
			if err != nil || n == 0 {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			groups = append(groups, WaitingGroup{Collection: ns, Reason: "scheduled", Count: n, Oldest: &first})
			return nil
		})
	}
	err = group.Wait()
	return groups, err
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

// countOutboxes counts the outboxes of this round, several at the same time, and adds the numbers of the others.
func (c *figureCount) countOutboxes(ctx context.Context, names []string, before figures) error {
	part := outboxes.NextToCount(names, before.lastOutbox)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(maxConcurrentCounts)
	for _, ns := range part {
		group.Go(func() error {
			counts, err := c.countOutbox(ctx, ns)

			c.mu.Lock()
			defer c.mu.Unlock()
			c.outboxes[ns] = counts
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}

	for _, ns := range names {
		counts, counted := c.outboxes[ns]
		if !counted {
			counts = before.outboxes[ns]
			c.outboxes[ns] = counts
		}
		c.figures.counts.addOutbox(counts)
	}
	c.figures.outboxes = c.outboxes
	if len(part) > 0 {
		c.figures.lastOutbox = part[len(part)-1]
	}
	return nil
}

// addOutbox adds the counts that countOutbox returned.
func (c *Counts) addOutbox(counts Counts) {
	c.Envelopes += counts.Envelopes
	c.Pending += counts.Pending
	c.PendingMore = c.PendingMore || counts.PendingMore
}

// countOutbox counts the envelopes of one outbox.
func (c *figureCount) countOutbox(ctx context.Context, ns string) (n Counts, err error) {
	coll := outboxes.CollectionOf(c.op.State.Client(), ns)
	if n.Envelopes, err = coll.EstimatedDocumentCount(ctx); err != nil || c.position.IsZero() {
		return n, err
	}
	n.Pending, _, err = outboxes.CountBehind(ctx, coll, c.position, maxPendingCounted)
	n.PendingMore = n.Pending == maxPendingCounted
	if errors.Is(err, outboxes.ErrNotIndexed) {
		return n, nil
	}
	return n, err
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

		if found.waiting {
			n, err := c.op.HandlerWaiting().desk(name).Count(ctx, setaside.Query{}, false, maxLettersCounted)
			if err != nil {
				return err
			}
			counts.HandlerWaiting += n
		}

		for _, coll := range found.letters {
			series, err := letterparts.CountSeries(ctx, c.op.database(name), coll, maxLettersCounted)
			if err != nil {
				return err
			}
			open := int64(0)
			for _, one := range series {
				open += one.Dead
			}
			counts.HandlerDead += open
			if open > 0 {
				oldest, err := letterparts.OldestOpen(ctx, c.op.database(name), coll)
				if err != nil {
					return err
				}
				c.figures.addOldestLetter(oldest)
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

// addOldestLetter takes the time of a letter if it is older than the others.
func (f *figures) addOldestLetter(died *time.Time) {
	if died != nil && (f.letters.Oldest == nil || died.Before(*f.letters.Oldest)) {
		f.letters.Oldest = died
	}
}

// newPendingTopics returns the topics with the oldest envelope first.
func newPendingTopics(list []waiting.Topic, now time.Time) []WaitingTopic {
	topics := []WaitingTopic{}
	for _, w := range list {
		topic := WaitingTopic{
			Topic: w.Topic, Retry: w.Retry, Blocked: w.Blocked, Parked: w.Parked, Queued: w.Queued, Keys: w.Keys, Collections: w.Outboxes,
		}
		if !w.Oldest.IsZero() {
			oldest := w.Oldest.UTC()
			topic.Oldest = &oldest
			topic.OldestAgeS = max(now.Sub(oldest).Seconds(), 0)
		}
		topics = append(topics, topic)
	}

	slices.SortStableFunc(topics, func(a, b WaitingTopic) int {
		return cmp.Or(cmp.Compare(b.OldestAgeS, a.OldestAgeS), strings.Compare(a.Topic, b.Topic))
	})
	return topics
}
