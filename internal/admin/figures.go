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
	"github.com/outrelay/outrelay/internal/store"
)

const (
	figuresFresh  = 2 * time.Second  // while somebody looks
	figuresIdle   = 10 * time.Second // else, and between two evaluations of the health rules
	figuresLooked = 30 * time.Second // so long after a look somebody still looks
	figuresStale  = 15 * time.Second // older ones are not shown
	figuresShare  = 30               // counting takes at most a thirtieth of the time
	figuresWait   = 30 * time.Second // for one count

	// manyCollections is from how many on only those are asked that the watcher has marked as holding exceptions or
	// scheduled envelopes.
	manyCollections = 32
	manyDatabases   = 100 // are asked for inboxes and sagas at most
	counting        = 4   // collections at once

	// pendingCounted is up to where the envelopes of a collection that are behind the position are counted. In a backlog all of
	// them are walked each time, by a server that has the backlog to read.
	pendingCounted = 10_000
)

// figures are what has to be counted.
type figures struct {
	at             time.Time
	counts         Counts
	pending        []PendingTopic
	oldest, newest time.Time // of the oplog; zero where unknown
	checks         []Check
}

// figureSet holds the figures of each watcher that was asked for. There are as many as watchers in the state database.
type figureSet struct {
	mu      sync.Mutex
	of      map[string]*figuresOf
	running bool
}

type figuresOf struct {
	desk   Desk
	last   figures
	cost   time.Duration
	looked time.Time
	judged time.Time
	rules  health.Evaluator
	busy   chan struct{} // closed when the count under way is done; nil: none is
}

func (s *figureSet) entry(k Desk) *figuresOf {
	if s.of == nil {
		s.of = map[string]*figuresOf{}
	}
	e := s.of[k.Watcher]
	if e == nil {
		e = &figuresOf{desk: k}
		s.of[k.Watcher] = e
	}
	return e
}

// get is the figures of the desk's watcher: those that are there if they are young enough or are being renewed by run, else
// new ones. Of several that ask at once one counts.
func (s *figureSet) get(ctx context.Context, k Desk) (figures, error) {
	for {
		s.mu.Lock()
		e := s.entry(k)
		now := time.Now()
		e.looked = now
		age := now.Sub(e.last.at)
		if !e.last.at.IsZero() && (age <= figuresFresh || s.running && age <= max(figuresStale, 2*figuresShare*e.cost)) {
			defer s.mu.Unlock()
			return e.last, nil
		}
		busy := e.busy
		s.mu.Unlock()
		if busy == nil {
			return s.count(ctx, k)
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return figures{}, context.Cause(ctx)
		}
	}
}

// count counts, unless another does already; then it waits for that one's.
func (s *figureSet) count(ctx context.Context, k Desk) (figures, error) {
	s.mu.Lock()
	e := s.entry(k)
	if e.busy != nil {
		s.mu.Unlock()
		return s.get(ctx, k)
	}
	busy := make(chan struct{})
	e.busy = busy
	s.mu.Unlock()
	began := time.Now()
	f, err := k.countFigures(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	e.busy, e.cost = nil, time.Since(began)
	if ctx.Err() == nil { // a caller who went away says nothing of the deployment
		now := time.Now()
		if now.Sub(e.judged) >= figuresIdle-figuresFresh/2 {
			e.judged = now
			e.rules.Observe(health.Observation{At: now, Err: err, Dead: f.counts.Dead, Counts: []health.Count{{Name: "exceptions", N: f.counts.Waiting()}}})
		}
	}
	f.checks = ruleChecks(e.rules.Report())
	if err == nil {
		e.last = f
	} else {
		e.last.checks = f.checks
	}
	close(busy)
	return f, err
}

// run keeps figures fresh until ctx ends.
func (s *figureSet) run(ctx context.Context, d *Deployment) {
	s.mu.Lock()
	s.running = true
	s.entry(d.For(Actor{}))
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		s.running = false
		s.mu.Unlock()
	}()
	tick := time.NewTicker(figuresFresh / 4)
	defer tick.Stop()
	for {
		for _, k := range s.due(time.Now()) {
			one, cancel := context.WithTimeout(ctx, figuresWait)
			if _, err := s.count(one, k); err != nil && ctx.Err() == nil {
				d.logger().Debug("the figures of the overview cannot be counted", "watcher", k.Watcher, "reason", err)
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

// due are the watchers whose figures are to be counted now.
func (s *figureSet) due(now time.Time) []Desk {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Desk
	for name, e := range s.of {
		every := figuresIdle
		switch looked := now.Sub(e.looked) < figuresLooked; {
		case looked:
			every = figuresFresh - figuresFresh/4
		case name != e.desk.d.Watcher:
			continue // another's, that nobody looks at
		}
		if now.Sub(e.last.at) >= max(every, figuresShare*e.cost) && e.busy == nil {
			out = append(out, e.desk)
		}
	}
	return out
}

// countFigures counts everything once. It reads every exception, one index entry of each dead letter and each scheduled
// envelope, and the letters that are there; a collection without any of them costs some milliseconds at most.
func (k Desk) countFigures(ctx context.Context) (figures, error) {
	f := figures{at: time.Now()}
	status, err := ReadStatus(ctx, k.State)
	if err != nil {
		return f, err
	}
	claims, err := store.NewRegistry(k.State.Collection("collections")).Claims(ctx, k.Watcher)
	if err != nil {
		return f, err
	}
	names := namesOf(claims)
	if k.d.Oplog != nil {
		f.oldest, f.newest, _ = k.d.Oplog(ctx) // optional: without the privilege there is no headroom to show
	}
	if err := k.countOutboxes(ctx, names, marked(status, k.Watcher), &f); err != nil {
		return f, err
	}
	return f, k.countServices(ctx, databases(names), &f.counts)
}

func namesOf(claims []store.Claim) []string {
	names := make([]string, len(claims))
	for i, c := range claims {
		names[i] = c.NS
	}
	slices.Sort(names)
	return slices.Compact(names) // one that was dropped and made anew is claimed twice
}

// marked are the collections that the watcher's slots have marked as holding exceptions or scheduled envelopes.
func marked(s Status, watcher string) map[string]bool {
	out := map[string]bool{}
	for _, w := range s.Watchers {
		for _, ns := range w.Dirty {
			if w.Name == watcher {
				out[ns] = true
			}
		}
	}
	return out
}

// databases are those of the namespaces, in order.
func databases(names []string) []string {
	out := make([]string, len(names))
	for i, ns := range names {
		out[i], _, _ = strings.Cut(ns, ".")
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func (k Desk) countOutboxes(ctx context.Context, names []string, dirty map[string]bool, f *figures) error {
	var mu sync.Mutex
	var waiting []store.WaitingTopic
	position, _ := Replayer{Operator: k.Operator}.position(ctx) // none yet: then nothing is behind it
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(counting)
	for _, ns := range names {
		g.Go(func() error {
			one, list, err := k.countOutbox(ctx, ns, dirty[ns] || len(names) <= manyCollections, position)
			mu.Lock()
			defer mu.Unlock()
			waiting = append(waiting, list...)
			c := &f.counts
			c.Envelopes, c.Pending, c.Scheduled = c.Envelopes+one.Envelopes, c.Pending+one.Pending, c.Scheduled+one.Scheduled
			c.Dead, c.DeadAll = c.Dead+one.Dead, c.DeadAll+one.DeadAll
			c.PendingMore = c.PendingMore || one.PendingMore
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	f.pending = pendingTopics(waiting, time.Now())
	for _, w := range waiting {
		f.counts.Retry, f.counts.Blocked, f.counts.Parked = f.counts.Retry+w.Retry, f.counts.Blocked+w.Blocked, f.counts.Parked+w.Parked
		f.counts.BlockedKeys += w.Keys
	}
	return nil
}

func (k Desk) countOutbox(ctx context.Context, ns string, look bool, position bson.Timestamp) (c Counts, waiting []store.WaitingTopic, err error) {
	coll, err := store.Outboxed(k.State.Client(), ns)
	if err != nil {
		return c, nil, err
	}
	if c.Envelopes, err = coll.EstimatedDocumentCount(ctx); err != nil {
		return c, nil, err
	}
	if look {
		if waiting, err = store.CountWaiting(ctx, coll); err != nil {
			return c, nil, err
		}
		if c.Scheduled, _, err = store.CountDue(ctx, coll, math.MaxInt64); err != nil {
			return c, nil, err
		}
	}
	if !position.IsZero() {
		if c.Pending, _, err = store.CountBehind(ctx, coll, position, pendingCounted); err != nil {
			return c, nil, err
		}
		c.PendingMore = c.Pending == pendingCounted
	}
	client := k.State.Client()
	if c.DeadAll, err = deadletter.Count(ctx, client, []string{ns}, deadletter.Query{}); err != nil || c.DeadAll == 0 {
		return c, waiting, err
	}
	c.Dead, err = deadletter.Count(ctx, client, []string{ns}, deadletter.Query{Stand: deadletter.Replayable})
	return c, waiting, err
}

// countServices adds what the services in the databases of the outboxes hold.
func (k Desk) countServices(ctx context.Context, names []string, c *Counts) error {
	for _, name := range names[:min(len(names), manyDatabases)] {
		there, err := k.services(ctx, name)
		if err != nil {
			return err
		}
		for _, coll := range there.inboxes {
			n, err := k.inboxCounts(ctx, name, coll)
			if err != nil {
				return err
			}
			c.InboxHandled, c.InboxClaimed = c.InboxHandled+n.Handled, c.InboxClaimed+n.Claimed
		}
		if there.sagas {
			types, err := k.sagaTypesOf(ctx, name)
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

// ruleChecks are the verdicts of the health rules in the words of checks.
func ruleChecks(r health.Report) []Check {
	out := make([]Check, len(r.Checks))
	for i, c := range r.Checks {
		out[i] = Check{ID: c.ID, Status: map[health.Status]string{health.OK: CheckOK, health.Degraded: CheckWarn, health.Unhealthy: CheckFail}[c.Status], Detail: c.Detail, Fix: c.Fix}
	}
	return out
}

// pendingTopics joins what waits in several collections, the oldest first.
func pendingTopics(list []store.WaitingTopic, now time.Time) []PendingTopic {
	at := map[string]int{}
	out := []PendingTopic{}
	for _, w := range list {
		i, known := at[w.Topic]
		if !known {
			i = len(out)
			at[w.Topic] = i
			out = append(out, PendingTopic{Topic: w.Topic, Collections: []string{}})
		}
		p := &out[i]
		p.Retry, p.Blocked, p.Parked, p.Keys = p.Retry+w.Retry, p.Blocked+w.Blocked, p.Parked+w.Parked, p.Keys+w.Keys
		p.Collections = append(p.Collections, w.NS)
		if !w.Oldest.IsZero() && (p.Oldest == nil || w.Oldest.Before(*p.Oldest)) {
			oldest := w.Oldest.UTC()
			p.Oldest, p.OldestAgeS = &oldest, max(now.Sub(oldest).Seconds(), 0)
		}
	}
	slices.SortStableFunc(out, func(a, b PendingTopic) int {
		return cmp.Or(cmp.Compare(b.OldestAgeS, a.OldestAgeS), strings.Compare(a.Topic, b.Topic))
	})
	return out
}
