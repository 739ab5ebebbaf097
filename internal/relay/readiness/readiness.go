// Package readiness contains the phase and the problems of a process or slot, as /livez, /readyz and
// `outrelay status` report them, and calls to the servers that are repeated until they succeed, whose
// errors are such problems.
//
// Blocking: the methods of [State] take one mutex and do no I/O. The methods of [Calls] block until the call
// succeeds, its error is permanent, or their context ends.
package readiness

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/logging"
)

// Phase is the part that a process or slot has in its watcher at the moment.
type Phase string

// The phases, as /readyz and `outrelay status` print them.
const (
	PhaseStarting Phase = "starting"
	PhaseStandby  Phase = "standby"
	PhaseTakeOver Phase = "taking-over"
	PhaseOwner    Phase = "owner"
	PhaseAdmin    Phase = "admin" // runs no watcher
	PhaseHalted   Phase = "halted"
	PhaseStopping Phase = "stopping"
)

// State contains the phase and the problems of a process or slot, for health and status. Each part
// has at most one problem, and one more for each object. It is safe for concurrent use.
type State struct {
	mu           sync.Mutex
	phase        Phase
	problems     map[problemKey]problem
	unreadyAfter time.Duration        // an older problem makes the process not ready
	hung         bool                 // a stage does not move
	pulses       map[string]time.Time // when the loops that must not hang last moved
	now          func() time.Time
	log          *slog.Logger
}

// problemKey names a part and, if the problem concerns a single object of many, this object. Such a problem leaves the
// process ready.
type problemKey struct{ part, object string }

type problem struct {
	text  string
	since time.Time
	fatal bool // makes the process not ready at once
}

// NewState returns the state of a process or slot that starts. A problem that is older than unreadyAfter
// makes it not ready.
func NewState(unreadyAfter time.Duration, now func() time.Time, log *slog.Logger) *State {
	return &State{
		phase:        PhaseStarting,
		problems:     map[problemKey]problem{},
		pulses:       map[string]time.Time{},
		unreadyAfter: unreadyAfter,
		now:          now,
		log:          log,
	}
}

// SetPhase sets the phase.
func (s *State) SetPhase(phase Phase) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.phase = phase
}

// SetProblem sets the problem of part. If text is empty, part has no problem any more. It reports
// whether the problem has changed.
func (s *State) SetProblem(part, text string) bool {
	return s.setProblem(problemKey{part: part}, problem{text: text})
}

// SetObjectProblem is SetProblem of a problem that concerns a single object of part. It leaves the process ready.
func (s *State) SetObjectProblem(part, object, text string) bool {
	return s.setProblem(problemKey{part, object}, problem{text: text})
}

// SetFatalProblem is SetProblem of a problem that makes the process not ready at once.
func (s *State) SetFatalProblem(part, text string) bool {
	return s.setProblem(problemKey{part: part}, problem{text: text, fatal: true})
}

// SetProblemSince is SetProblem of a problem that began at the time began.
func (s *State) SetProblemSince(part, text string, began time.Time) bool {
	return s.setProblem(problemKey{part: part}, problem{text: text, since: began})
}

// setProblem sets the problem of key. If next.since is zero, the problem continues the previous problem, or begins now.
func (s *State) setProblem(key problemKey, next problem) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, had := s.problems[key]
	if next.text == "" {
		delete(s.problems, key)
		return had
	}

	if next.since.IsZero() {
		next.since = s.now()
		if had {
			next.since = old.since
		}
	}
	s.problems[key] = next
	return old.text != next.text
}

// SetError sets the problem of part to err. If err is nil, part has no problem any more.
func (s *State) SetError(part string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	s.SetProblem(part, text)
}

// ReportProblem sets the problem of part to err. It logs the problem once, not at each attempt.
func (s *State) ReportProblem(part string, err error) {
	if s.SetProblem(part, err.Error()) {
		// The error itself is an attribute, so that the log can recognize the outage that it belongs to.
		s.log.Warn("cannot complete a step; trying again", "part", part, "error", err)
	}
}

// ReportFatalProblem is ReportProblem of a problem that makes the process not ready at once.
func (s *State) ReportFatalProblem(part string, err error) {
	if s.SetFatalProblem(part, err.Error()) {
		s.log.Error("cannot deliver events; they wait in MongoDB", "part", part, "error", err)
	}
}

// ClearProblems removes the problems of parts, also those of their objects.
func (s *State) ClearProblems(parts ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.problems, func(key problemKey, _ problem) bool { return slices.Contains(parts, key.part) })
}

// KeepProblems removes the problems of all other parts.
func (s *State) KeepProblems(parts ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.problems, func(key problemKey, _ problem) bool { return !slices.Contains(parts, key.part) })
}

// Problem is a problem of a part, for status and metrics.
type Problem struct {
	Part   string
	Object string // "", or the object that the problem concerns
	Text   string // without secrets
	Since  time.Time
	For    time.Duration // until now
	Fatal  bool          // only a person can fix it
}

// Problems returns the current problems, sorted by part and object.
func (s *State) Problems() []Problem {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []Problem
	for key, p := range s.problems {
		list = append(list, Problem{
			Part:   key.part,
			Object: key.object,
			Text:   logging.Clean(p.text),
			Since:  p.since,
			For:    s.now().Sub(p.since),
			Fatal:  p.fatal,
		})
	}
	slices.SortFunc(list, func(a, b Problem) int {
		return cmp.Or(strings.Compare(a.Part, b.Part), strings.Compare(a.Object, b.Object))
	})
	return list
}

// SetHung makes the process not live, because only a restart ends a stage that does not move. After
// a new term has begun, the process is live again: hung is false.
func (s *State) SetHung(hung bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hung = hung
}

// hungAfter is the time without a pulse after which a loop counts as hung. The deadlines of all
// operations of these loops are far shorter.
const hungAfter = time.Minute

// RecordPulse records that a loop moves.
func (s *State) RecordPulse(loop string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pulses[loop] = s.now()
}

// EndPulse records that a loop has ended.
func (s *State) EndPulse(loop string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.pulses, loop)
}

// Live implements probes.Health. The process is not live only if a stage hangs, or a loop that
// monitors the stages.
func (s *State) Live() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.hung {
		return errors.New("the owner is stuck: a part of it makes no progress; restart the process")
	}
	for loop, at := range s.pulses {
		if silent := s.now().Sub(at); silent > hungAfter {
			return fmt.Errorf("the %s loop has made no progress for %s; restart the process",
				loop, silent.Truncate(time.Second))
		}
	}
	return nil
}

// Ready implements probes.Health. A standby is ready: it can take over. The process is not ready if
// a problem lasts longer than the readiness time, or if only a person can fix it. The problem of an object
// is no reason.
func (s *State) Ready() (ok bool, phase string, reasons []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok = s.phase != PhaseStarting && s.phase != PhaseHalted

	for key, p := range s.problems {
		if key.object != "" {
			continue
		}
		age := s.now().Sub(p.since)
		if p.fatal || age >= s.unreadyAfter {
			ok = false
		}
		reason := fmt.Sprintf("%s: %s (for %s)", key.part, logging.Clean(p.text), age.Truncate(time.Second))
		reasons = append(reasons, reason)
	}
	slices.Sort(reasons)
	if s.phase == PhaseStarting {
		reasons = append(reasons, "starting: neither owner nor standby yet")
	}
	return ok, string(s.phase), reasons
}

// HaltError ends the delivery until an operator acts. The owner keeps the lease, so that no standby
// runs into the same problem.
type HaltError struct {
	What string // what happened
	Fix  string // what to do
	Err  error
}

func (e *HaltError) Error() string {
	text := e.What
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	if e.Fix != "" {
		text += "; " + e.Fix
	}
	return text
}

func (e *HaltError) Unwrap() error { return e.Err }
