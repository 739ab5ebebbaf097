// Package health judges how a relay does by what was counted of it: one failed count is a warning and three in a row are a
// failure; many new dead letters, or something that waits and does not become less, are a warning.
//
// It is pure: it holds the last minute of observations, does no I/O, starts nothing, and takes time from its caller. An
// [Evaluator] may be used from any goroutine.
package health

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// Status is how a relay does.
type Status string

// The statuses, the best first.
const (
	OK        Status = "ok"
	Degraded  Status = "degraded"  // it works, and somebody should look
	Unhealthy Status = "unhealthy" // what it does cannot be told any more
)

func (s Status) severity() int { return slices.Index([]Status{OK, Degraded, Unhealthy}, s) }

// The limits of the rules.
const (
	FailedLimit = 3                // counts in a row that fail make a relay unhealthy; fewer degrade it
	StuckLimit  = 3                // counts in a row at which something waits and has not become less
	DeadLimit   = 100              // new dead letters within DeadSpan
	DeadSpan    = time.Minute      // the time over which dead letters are compared
	forgetAfter = 10 * time.Minute // of silence: what was before says nothing of how things go now
)

// Count is something that waits.
type Count struct {
	Name string // such as exceptions; it names the check
	N    int64
}

// Observation is what was counted at one time. With Err the rest is ignored.
type Observation struct {
	At     time.Time
	Err    error
	Counts []Count
	Dead   int64 // dead letters that are there
}

// Check is the verdict of one rule.
type Check struct {
	ID     string `json:"id"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"` // what to do
}

// Report is the verdict of all rules; its status is that of the worst check.
type Report struct {
	Status Status    `json:"status"`
	At     time.Time `json:"at"` // of the last observation; zero before the first
	Checks []Check   `json:"checks"`
}

// Evaluator compares each observation with those before it. The zero value is ready; its first successful observation only
// sets the baseline, because a backlog that was there before says nothing of how things go.
type Evaluator struct {
	mu           sync.Mutex
	observedAt   time.Time
	failedCounts int
	lastError    error
	waiting      map[string]waitingCount
	dead         []deadSample // of the last DeadSpan, and one before
}

type waitingCount struct {
	n     int64
	stuck int // observations in a row at which it was there and not less
}

type deadSample struct {
	at time.Time
	n  int64
}

// Observe takes an observation in and judges.
func (e *Evaluator) Observe(o Observation) Report {
	e.mu.Lock()
	defer e.mu.Unlock()
	if o.At.Sub(e.observedAt) > forgetAfter {
		e.failedCounts, e.lastError, e.waiting, e.dead = 0, nil, nil, nil
	}
	e.observedAt = o.At
	if o.Err != nil {
		e.failedCounts, e.lastError = e.failedCounts+1, o.Err
		return e.reportLocked()
	}
	e.failedCounts, e.lastError = 0, nil
	now := make(map[string]waitingCount, len(o.Counts))
	for _, c := range o.Counts {
		w := waitingCount{n: c.N}
		if before, known := e.waiting[c.Name]; known && c.N > 0 && c.N >= before.n {
			w.stuck = before.stuck + 1
		}
		now[c.Name] = w
	}
	e.waiting = now
	if n := len(e.dead); n > 0 && o.Dead < e.dead[n-1].n {
		e.dead = e.dead[:0] // some were requeued or discarded: what comes from here on counts
	}
	e.dead = append(e.dead, deadSample{o.At, o.Dead})
	for len(e.dead) > 2 && o.At.Sub(e.dead[1].at) >= DeadSpan {
		e.dead = e.dead[1:]
	}
	return e.reportLocked()
}

// Report is the verdict as of the last observation; before the first it is ok and has no checks.
func (e *Evaluator) Report() Report {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.reportLocked()
}

func (e *Evaluator) reportLocked() Report {
	r := Report{Status: OK, At: e.observedAt, Checks: []Check{}}
	if e.observedAt.IsZero() {
		return r
	}
	r.Checks = append(r.Checks, e.checkCountingLocked(), e.checkDeadLettersLocked())
	names := make([]string, 0, len(e.waiting))
	for name := range e.waiting {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		r.Checks = append(r.Checks, checkWaiting(name, e.waiting[name]))
	}
	for _, c := range r.Checks {
		if c.Status.severity() > r.Status.severity() {
			r.Status = c.Status
		}
	}
	return r
}

func (e *Evaluator) checkCountingLocked() Check {
	c := Check{ID: "counting", Status: OK, Detail: "what waits can be counted"}
	if e.failedCounts == 0 {
		return c
	}
	c.Status, c.Fix = Degraded, "look at MongoDB, and whether the relay's user may read (outrelay doctor)"
	c.Detail = fmt.Sprintf("what waits could not be counted %d times in a row: %v", e.failedCounts, e.lastError)
	if e.failedCounts >= FailedLimit {
		c.Status = Unhealthy
	}
	return c
}

func (e *Evaluator) checkDeadLettersLocked() Check {
	c := Check{ID: "dead_letters", Status: OK, Detail: "no new ones"}
	if len(e.dead) < 2 {
		return c
	}
	first, last := e.dead[0], e.dead[len(e.dead)-1]
	grown, span := last.n-first.n, last.at.Sub(first.at)
	if grown <= 0 {
		return c
	}
	c.Detail = fmt.Sprintf("%d new within %s", grown, span.Round(time.Second))
	if float64(grown) >= DeadLimit*max(float64(span)/float64(DeadSpan), 1) {
		c.Status, c.Fix = Degraded, "outrelay dead summary says why they die"
	}
	return c
}

func checkWaiting(name string, w waitingCount) Check {
	c := Check{ID: name, Status: OK, Detail: "none"}
	if w.n == 0 {
		return c
	}
	c.Detail = fmt.Sprintf("%d", w.n)
	if w.stuck >= StuckLimit {
		c.Status, c.Fix = Degraded, "outrelay waiting summary says for what they wait and since when"
		c.Detail = fmt.Sprintf("%d, and not less for %d counts in a row", w.n, w.stuck)
	}
	return c
}
