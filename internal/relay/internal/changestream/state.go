package changestream

import (
	"time"
)

// Phase is the phase of a stream.
type Phase string

// The phases of a stream.
const (
	Opening     Phase = "opening"      // the server has not responded yet
	Live        Phase = "live"         // the server responds
	Reopening   Phase = "reopening"    // interrupted, and reopened automatically
	ConfigError Phase = "config_error" // an operator must grant or change something; retried slowly
	Oversize    Phase = "oversize"     // live, without the documents that are too large for an event (N24)
	Stopped     Phase = "stopped"
)

// State is the stream's state for status and readiness.
type State struct {
	Phase  Phase
	Reason string    // for people: the fault and the fix; empty while live
	Code   int       // the server's code, or 0
	Since  time.Time // start of this phase

	// Reopenings counts the reopenings since the stream last moved, and StuckSince is the time of the first of them. Both are
	// zero while the stream moves. A stream that reopens again and again may look alive in between.
	Reopenings int
	StuckSince time.Time
	Fault      string // the last reason of a reopening since then
}

// Ready reports whether events flow, or would flow if there were any.
func (s State) Ready() bool { return s.Phase == Live || s.Phase == Oversize }

// StandingFor returns how long the stream has stood at now; 0 if it moves.
func (s State) StandingFor(now time.Time) time.Duration {
	if s.StuckSince.IsZero() {
		return 0
	}
	return now.Sub(s.StuckSince)
}

// Metrics are hooks for counters. Each may be nil. The goroutine of Run calls them, so they must not
// block.
type Metrics struct {
	// Batch is called when a batch with events was fetched. wait is the time until the server's response,
	// without the time to send the batch to the caller.
	Batch func(events, bytes int, wait time.Duration)

	// Restart is called when the stream was reopened, by Run or by the driver ("driver"). There are
	// few reasons.
	Restart func(reason string)
}

func (m *Metrics) countBatch(events, bytes int, wait time.Duration) {
	if m.Batch != nil {
		m.Batch(events, bytes, wait)
	}
}

func (m *Metrics) countRestart(reason string) {
	if m.Restart != nil {
		m.Restart(reason)
	}
}

// State returns the current state. It is safe for concurrent use.
func (s *Stream) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

// noteReopening counts a reopening.
func (s *Stream) noteReopening() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state.Reopenings++; s.state.StuckSince.IsZero() {
		s.state.StuckSince = time.Now()
	}
}

// noteProgress notes that the stream has moved.
func (s *Stream) noteProgress() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.state.Reopenings, s.state.StuckSince, s.state.Fault = 0, time.Time{}, ""
}

func (s *Stream) setState(phase Phase, code int, reason string) {
	s.mu.Lock()
	if s.state.Phase == phase && s.state.Reason == reason {
		s.mu.Unlock()
		return
	}

	if phase == Reopening || phase == ConfigError {
		s.state.Fault = reason
	}
	since := s.state.Since
	if s.state.Phase != phase {
		since = time.Now()
	}
	s.state.Phase, s.state.Reason, s.state.Code, s.state.Since = phase, reason, code, since
	st := s.state
	s.mu.Unlock()

	if s.onState != nil {
		s.onState(st)
	}
}
