// Package health evaluates the health of a relay from regular counts. One failed count is a warning, and
// three in a row are a failure. Many new dead letters are a warning, and so are waiting envelopes whose
// number does not decrease.
//
// The package is pure: it holds the observations of the last minute, does no I/O, starts no goroutines, and
// gets the time from its caller. An [Evaluator] is safe for concurrent use.
package health

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"
)

// Status is the health of a relay.
type Status string

// The statuses, the best first.
const (
	OK        Status = "ok"
	Degraded  Status = "degraded"  // the relay works, but an operator should look
	Unhealthy Status = "unhealthy" // the state of the relay is unknown
)

// severity returns the rank of the status. The best has 0.
func (s Status) severity() int { return slices.Index([]Status{OK, Degraded, Unhealthy}, s) }

// The limits of the rules.
const (
	// failedLimit is how many failed counts in a row make a relay unhealthy. Fewer degrade it.
	failedLimit = 3
	// stuckLimit is how many counts in a row without a decrease degrade a relay.
	stuckLimit = 3
	// deadLimit is how many new dead letters within deadSpan degrade a relay.
	deadLimit = 100
	deadSpan  = time.Minute

	// forgetAfter is the pause between two observations after which the older ones are out of date.
	forgetAfter = 10 * time.Minute
)

// The IDs of the checks.
const (
	CountingRule    = "counting"
	DeadLettersRule = "dead_letters"
	WaitingRule     = "waiting"             // of the count of waiting envelopes
	OverdueRule     = "overdue_collections" // of the count of outboxes with overdue scheduled envelopes
)

// Count is the number of waiting items of one kind.
type Count struct {
	Name string // WaitingRule or OverdueRule: the ID of the check
	N    int64
}

// Observation is the result of one count. If Err is set, the other figures are ignored.
type Observation struct {
	At     time.Time
	Err    error
	Counts []Count
	Dead   int64 // number of stored dead letters
}

// Check is the result of one rule.
type Check struct {
	ID     string `json:"id"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"` // the next step of the operator
	N      int64  `json:"n"`             // the observed number of a count
}

// Report is the result of all rules. Its status is that of the worst check.
type Report struct {
	Status Status    `json:"status"`
	At     time.Time `json:"at"` // of the last observation; zero before the first
	Checks []Check   `json:"checks"`
}

// Evaluator compares each observation with earlier ones. The zero value is ready to use. The first
// successful observation only sets the baseline, because an existing backlog does not show a trend.
type Evaluator struct {
	mu           sync.Mutex
	observedAt   time.Time
	failedCounts int
	lastError    error
	waiting      map[string]waitingCount
	dead         []deadSample // of the last deadSpan, and one earlier sample
}

type waitingCount struct {
	n     int64
	stuck int // observations in a row in which n was above 0 and did not decrease
}

type deadSample struct {
	at time.Time
	n  int64
}

// Observe adds an observation and returns the new report.
func (e *Evaluator) Observe(observation Observation) Report {
	e.mu.Lock()
	defer e.mu.Unlock()

	// After a long pause, the observations before it have no order with this one.
	if observation.At.Sub(e.observedAt) > forgetAfter {
		e.failedCounts, e.lastError, e.waiting, e.dead = 0, nil, nil, nil
	}
	e.observedAt = observation.At
	if observation.Err != nil {
		e.failedCounts++
		e.lastError = observation.Err
		return e.reportLocked()
	}
	e.failedCounts, e.lastError = 0, nil

	waiting := make(map[string]waitingCount, len(observation.Counts))
	for _, c := range observation.Counts {
		count := waitingCount{n: c.N}
		// A count that does not fall may be stuck.
		if before, known := e.waiting[c.Name]; known && c.N > 0 && c.N >= before.n {
			count.stuck = before.stuck + 1
		}
		waiting[c.Name] = count
	}
	e.waiting = waiting

	// After a requeue or a discard there are fewer dead letters. Growth counts from the new level.
	if n := len(e.dead); n > 0 && observation.Dead < e.dead[n-1].n {
		e.dead = e.dead[:0]
	}
	e.dead = append(e.dead, deadSample{observation.At, observation.Dead})
	for len(e.dead) > 2 && observation.At.Sub(e.dead[1].at) >= deadSpan {
		e.dead = e.dead[1:]
	}
	return e.reportLocked()
}

// Report returns the report of the last observation. Before the first one the status is ok, and there are
// no checks.
func (e *Evaluator) Report() Report {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reportLocked()
}

func (e *Evaluator) reportLocked() Report {
	report := Report{Status: OK, At: e.observedAt, Checks: []Check{}}
	if e.observedAt.IsZero() {
		return report
	}

	report.Checks = append(report.Checks, e.checkCountingLocked(), e.checkDeadLettersLocked())
	for _, name := range slices.Sorted(maps.Keys(e.waiting)) {
		report.Checks = append(report.Checks, checkWaiting(name, e.waiting[name]))
	}

	for _, c := range report.Checks {
		if c.Status.severity() > report.Status.severity() {
			report.Status = c.Status
		}
	}
	return report
}

func (e *Evaluator) checkCountingLocked() Check {
	check := Check{ID: CountingRule, Status: OK, Detail: "counting waiting envelopes works"}
	if e.failedCounts == 0 {
		return check
	}

	check.Status = Degraded
	if e.failedCounts >= failedLimit {
		check.Status = Unhealthy
	}
	check.Detail = fmt.Sprintf("counting waiting envelopes failed %d times in a row: %v", e.failedCounts, e.lastError)
	check.Fix = "run outrelay doctor to check MongoDB and the privileges of the relay's user"
	return check
}

func (e *Evaluator) checkDeadLettersLocked() Check {
	check := Check{ID: DeadLettersRule, Status: OK, Detail: "no new dead letters"}
	if len(e.dead) < 2 {
		return check
	}

	first, last := e.dead[0], e.dead[len(e.dead)-1]
	grown, span := last.n-first.n, last.at.Sub(first.at)
	if grown <= 0 {
		return check
	}

	check.Detail = fmt.Sprintf("%d new within %s", grown, span.Round(time.Second))
	if float64(grown) >= deadLimit*max(float64(span)/float64(deadSpan), 1) {
		check.Status = Degraded
		check.Fix = "run outrelay dead summary to find the causes"
	}
	return check
}

func checkWaiting(name string, count waitingCount) Check {
	check := Check{ID: name, Status: OK, Detail: "none", N: count.n}
	if count.n == 0 {
		return check
	}

	check.Detail = fmt.Sprintf("%d", count.n)
	if count.stuck >= stuckLimit {
		check.Status = Degraded
		check.Detail = fmt.Sprintf("%d, without a decrease for %d counts in a row", count.n, count.stuck)
		check.Fix = "run outrelay waiting summary to see the reasons and since when the envelopes wait"
	}
	return check
}
