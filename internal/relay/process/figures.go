package process

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/relay/connect"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/internal/term"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/service/inventory"
)

const (
	// factsEvery is the interval at which every process reads the facts about slots and nodes.
	factsEvery = 5 * time.Second
	// countEvery is the interval at which the documents of the watcher are counted.
	countEvery = 5 * time.Second
	// countShare bounds the cost of counting: after a count, the pause is this many times as long as the count took, but at most
	// maxCountPause. On a busy server a count takes seconds, and operators need counts of the present then.
	countShare    = 30
	maxCountPause = 30 * time.Second
	// judgeEvery is the interval at which the health rules compare the counts, at least.
	judgeEvery = 10 * time.Second
	// factsTimeout bounds the queries for slots and nodes.
	factsTimeout = 2 * time.Second
	// overdueAfter is the time after which a due envelope that is not sent makes its outbox overdue.
	overdueAfter = 10 * time.Second
)

// countLoop counts the documents of the watcher while this process is the one that counts for it. It stores the figures, for the metrics,
// the health rules, the page, the API and the commands.
type countLoop struct {
	relay     *Relay
	countedAt atomic.Int64 // Unix nanoseconds; 0 while this process does not count
	oplog     atomic.Pointer[problems.Oplog]
	facts     atomic.Pointer[problems.Facts]  // about slots and nodes; nil before the first read
	counted   atomic.Pointer[figures.Figures] // of the process that counts for the watcher; nil: unknown

	// Used only by runCounts.
	counter  figures.Counter
	judge    *health.Evaluator
	judgedAt time.Time
	last     figures.Figures // of the last count that succeeded
	actions  int64           // of operators, before the next count
	logged   []outboxes.Finding
}

// newCounter returns a counter for the watcher of the relay.
func (r *Relay) newCounter() figures.Counter {
	indexes := connect.WantedIndexes(r.cfg)
	inspect := connect.Inspect(r.cfg, r.shared.Mongo.State)
	return figures.Counter{
		State:             state.Open(r.shared.Mongo.State, r.cfg.State),
		Watcher:           r.cfg.Watcher,
		HandlerLetters:    r.cfg.DeadLetters.Handlers,
		ConsumerDatabases: inventory.ConfiguredDatabases(r.cfg.Consumers.Databases, r.cfg.Watch),

		Now:     r.shared.Clock.Now,
		Indexes: &indexes,
		Lenient: true,
		Oplog: func(context.Context) (oplog problems.Oplog, err error) {
			if known := r.counts.oplog.Load(); known != nil {
				oplog = *known
			}
			return oplog, nil
		},
		// The owner itself reports whether it may read the outboxes.
		Inspect: func(ctx context.Context) ([]outboxes.Finding, error) { return inspect(ctx, connect.SkipRights) },
	}
}

// runFacts reads the facts about slots and nodes until ctx ends. A slow count does not delay them.
func (l *countLoop) runFacts(ctx context.Context) error {
	// The first read comes soon, for people who watch a start.
	for wait := factsEvery / 5; retry.Sleep(ctx, wait) == nil; wait = factsEvery {
		facts := l.readFacts(ctx)
		// An interrupted read is no observation.
		if ctx.Err() == nil {
			l.facts.Store(&facts)
		}
	}
	return nil
}

// runCounts counts until ctx ends. If a collection cannot be counted, only the health report contains that.
func (l *countLoop) runCounts(ctx context.Context) error {
	metricSet := &l.relay.metrics.Figures
	metricSet.Limit.Set(figures.Limit)
	metricSet.Watcher.WithLabelValues(l.relay.cfg.Watcher, l.relay.cfg.Node).Set(1)
	metricSet.Problems.SetSource(func() []metrics.Age {
		var ages []metrics.Age
		for _, problem := range l.relay.Problems() {
			ages = append(ages, metrics.Age{
				Labels: []string{string(problem.Kind), problem.Object, string(problem.Severity)},
				Age:    time.Duration(problem.ForS * float64(time.Second)),
			})
		}
		return ages
	})
	metricSet.Age.SetSource(func() float64 {
		if at := l.countedAt.Load(); at > 0 {
			return time.Since(time.Unix(0, at)).Seconds()
		}
		return 0
	})
	metricSet.Ready.SetSource(func() float64 {
		ok, _, _ := l.relay.processHealth().Ready()
		return metrics.Bool(ok)
	})

	for wait := countEvery / 5; retry.Sleep(ctx, wait) == nil; {
		wait = l.countOnce(ctx)
	}
	return nil
}

// countOnce counts if this process is the one that counts for the watcher, and otherwise reads the stored figures. It returns the pause
// before the next call.
func (l *countLoop) countOnce(ctx context.Context) time.Duration {
	// Without the slots, it is unknown which process counts.
	facts := l.facts.Load()
	if facts == nil {
		return countEvery / 5
	}

	if !mayCount(l.relay.activeSlots(), facts.Slots) {
		// Another process counts now, or none: what this one has counted is history.
		if !l.judgedAt.IsZero() {
			l.countedAt.Store(0)
			l.relay.metrics.Figures.Clear()
			l.counter, l.judge, l.judgedAt, l.last = l.relay.newCounter(), new(health.Evaluator), time.Time{}, figures.Figures{}
		}
		// The problems of a standby are those of the watcher. Without current figures, their facts are unknown.
		var known *figures.Figures
		if stored, err := figures.Read(ctx, l.counter.State, l.counter.Watcher); err == nil && stored.Current {
			known = &stored.Figures
		}
		l.counted.Store(known)
		return countEvery
	}

	began := time.Now()
	counted, err := l.counter.Count(ctx)
	// The errors of an interrupted count are no observation.
	if ctx.Err() != nil {
		return countEvery
	}
	cost := time.Since(began)
	next := min(max(countEvery, countShare*cost), maxCountPause)

	if err == nil {
		l.last = counted
		l.countedAt.Store(began.UnixNano())
		l.logEmpty(counted.Unreadable)
		l.relay.metrics.Figures.Show(counted.Outboxes, counted.Handlers, map[string]int64{
			"retry": counted.Counts.Retry, "blocked": counted.Counts.Blocked, "parked": counted.Counts.Parked, "queued": counted.Counts.Queued,
		})
	} else {
		l.relay.log.Debug("cannot count the documents of the watcher", "error", err)
	}
	l.last.Health = l.evaluate(began, err)
	last := l.last
	l.counted.Store(&last)

	// After a failed count, the others get the last counts with the failure. Without any, they count themselves.
	if !l.last.At.IsZero() {
		valid := 2*(next+cost) + countEvery
		if l.actions, err = figures.Save(ctx, l.counter.State, l.counter.Watcher, l.last, valid, l.actions); err != nil {
			l.relay.log.Debug("the figures are not stored", "error", err)
		}
	}
	return next
}

// logEmpty logs each missing name once when the watcher has had nothing to read for long.
func (l *countLoop) logEmpty(found []outboxes.Finding) {
	now := l.relay.shared.Clock.Now()
	failing := slices.DeleteFunc(slices.Clone(found), func(finding outboxes.Finding) bool { return !problems.FailsEmpty(finding, now) })
	for _, finding := range failing {
		if !slices.ContainsFunc(l.logged, finding.IsSame) {
			l.relay.log.Warn("the watcher has nothing to read, so no event is sent", "name", finding.NS, "error", finding.Cause,
				"for", now.Sub(finding.Since).Truncate(time.Second), "fix", finding.Fix)
		}
	}
	l.logged = failing
}

// mayCount reports whether this process, which delivers in the slots active, counts for the watcher: it does in the first slot that any
// process delivers in. For a moment, two processes may count, or none.
func mayCount(active []*term.Runner, slots []problems.SlotStatus) bool {
	if len(active) == 0 {
		return false
	}
	for i := range slots {
		slot := &slots[i]
		delivers := slot.HasOwner() && slot.State != string(readiness.PhaseTakeOver) && slot.State != string(readiness.PhaseHalted)
		if delivers {
			return slices.ContainsFunc(active, func(one *term.Runner) bool { return one.Slot.String() == slot.Slot })
		}
	}
	// If the slots are unknown, two counts are better than none.
	return true
}

// evaluate compares the last count, or its error, with earlier ones.
func (l *countLoop) evaluate(now time.Time, err error) *health.Report {
	// The rules expect observations at their own interval.
	if now.Sub(l.judgedAt) < judgeEvery-countEvery/2 {
		report := l.judge.Report()
		return &report
	}
	l.judgedAt = now

	var overdue int64
	for i := range l.last.Outboxes {
		if l.last.Outboxes[i].Overdue > overdueAfter {
			overdue++
		}
	}
	report := l.judge.Observe(health.Observation{
		At: now, Err: err, Dead: l.last.Counts.Dead,
		Counts: []health.Count{{Name: health.WaitingRule, N: l.last.Counts.Waiting()}, {Name: health.OverdueRule, N: overdue}},
	})
	return &report
}

// readFacts reads the facts about slots and nodes, which every process reports. What cannot be read is unknown: the heartbeat fails with
// the same error, and reports it.
func (l *countLoop) readFacts(ctx context.Context) problems.Facts {
	facts := problems.Facts{
		Watcher:      l.relay.cfg.Watcher,
		TopicCommand: connect.NewCluster(l.relay.cfg, connect.KafkaHost{}).FormatCommand,
	}

	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
	defer cancel()
	status, err := problems.ReadStatus(ctx, state.Open(l.relay.shared.Mongo.State, l.relay.cfg.State))
	if err == nil {
		facts.Slots = slices.DeleteFunc(status.Slots, func(slot problems.SlotStatus) bool { return slot.Name != l.relay.cfg.Watcher })
	}
	facts.Nodes = l.countNodes(ctx)
	return facts
}

// Problems returns the problems that this process knows. The facts about the slots and nodes of the watcher are some five seconds old. The
// counts are older if a count takes long, and the problems have their age. It does not block.
func (r *Relay) Problems() []problems.Problem {
	facts := problems.Facts{Watcher: r.cfg.Watcher}
	if known := r.counts.facts.Load(); known != nil {
		facts = *known
	}
	if counted := r.counts.counted.Load(); counted != nil {
		counted.AddTo(&facts)
	}
	if oplog := r.counts.oplog.Load(); oplog != nil {
		facts.Oplog = *oplog
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
func (l *countLoop) countNodes(ctx context.Context) []nodes.Node {
	list, err := l.relay.shared.Nodes.List(ctx)
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
	l.relay.metrics.Figures.Nodes.WithLabelValues("alive").Set(alive)
	l.relay.metrics.Figures.Nodes.WithLabelValues("stale").Set(stale)
	return append([]nodes.Node{}, list...)
}
