package app

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/health"
	"github.com/outrelay/outrelay/internal/logging"
)

// Role is what a process does for its watcher.
type Role string

// The roles, as /readyz and `outrelay status` print them.
const (
	RoleStarting Role = "starting"
	RoleStandby  Role = "standby"
	RoleTakeOver Role = "taking-over"
	RoleOwner    Role = "owner"
	RoleAdmin    Role = "admin"             // it runs no watcher
	RoleUpgrade  Role = "waits-for-upgrade" // for nodes of older versions to go
	RoleHalted   Role = "halted"
	RoleStopping Role = "stopping"
)

// state is what health and status say about this process. Problems are named by the part that has them; a part says ok by
// an empty text.
type state struct {
	mu       sync.Mutex
	role     Role
	problems map[string]problem
	ready    time.Duration // a problem older than this makes the process not ready
	dead     error
	pulses   map[string]time.Time // when the loops that must not hang moved last
	report   *health.Report       // nil unless this process judges
	now      func() time.Time
}

type problem struct {
	text  string
	since time.Time
	fatal bool // not ready at once
}

func newState(after time.Duration, now func() time.Time) *state {
	return &state{role: RoleStarting, problems: map[string]problem{}, pulses: map[string]time.Time{}, ready: after, now: now}
}

func (s *state) setRole(r Role) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.role = r
}

// set tells how part does: text is empty when it is well. It reports whether that is news.
func (s *state) set(part, text string, fatal bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, had := s.problems[part]
	if text == "" {
		delete(s.problems, part)
		return had
	}
	p := problem{text: text, since: s.now(), fatal: fatal}
	if had {
		p.since = old.since
	}
	s.problems[part] = p
	return old.text != text
}

// clear forgets every problem of a term of ownership that ended.
func (s *state) clear(parts ...string) {
	for _, p := range parts {
		s.set(p, "", false)
	}
}

// hung makes the process not live: only a restart frees a stage that stands still.
func (s *state) hung() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = errors.New("a stage stands still; restart the process")
}

// moves takes a hang back: a new term has begun.
func (s *state) moves() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dead = nil
}

// hungAfter is the silence of a loop after which it hangs. What each of them waits for has a deadline far below.
const hungAfter = time.Minute

// pulse says that a loop moves.
func (s *state) pulse(loop string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pulses[loop] = s.now()
}

// rest says that a loop has ended.
func (s *state) rest(loop string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pulses, loop)
}

// Live implements probes.Health: the process is dead only when a stage of it hangs, or a loop that watches over them.
func (s *state) Live() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for loop, at := range s.pulses {
		if silent := s.now().Sub(at); s.dead == nil && silent > hungAfter {
			return fmt.Errorf("the %s loop stands still for %s; restart the process", loop, silent.Truncate(time.Second))
		}
	}
	return s.dead
}

// judged keeps what the health rules say; nil when this process does not judge.
func (s *state) judged(r *health.Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report = r
}

// Report implements probes.Health.
func (s *state) Report() *health.Report {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.report
}

// Ready implements probes.Health. A standby is ready: it can take over. What lasts longer than the readiness time, or
// needs a person, is not.
func (s *state) Ready() (ok bool, role string, reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok = s.role != RoleStarting && s.role != RoleHalted
	for part, p := range s.problems {
		age := s.now().Sub(p.since)
		if p.fatal || age >= s.ready {
			ok = false
		}
		reasons = append(reasons, fmt.Sprintf("%s: %s (for %s)", part, logging.Clean(p.text), age.Truncate(time.Second)))
	}
	slices.Sort(reasons)
	if s.role == RoleStarting {
		reasons = append(reasons, "starting: neither owner nor standby yet")
	}
	return ok, string(s.role), reasons
}

// HaltError ends work until an operator acts; the lease is kept meanwhile, so that no standby runs into the same.
type HaltError struct {
	What string // what happened
	Fix  string // what to do
	Err  error
}

func (e *HaltError) Error() string {
	var b strings.Builder
	b.WriteString(e.What)
	if e.Err != nil {
		b.WriteString(": " + e.Err.Error())
	}
	if e.Fix != "" {
		b.WriteString("; " + e.Fix)
	}
	return b.String()
}

func (e *HaltError) Unwrap() error { return e.Err }

// errStepDown ends a term in which the process gives the lease back on purpose.
var errStepDown = errors.New("stepping down")

// is reports whether that is the role of now.
func (s *state) is(r Role) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.role == r
}
