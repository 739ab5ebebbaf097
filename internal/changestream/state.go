package changestream

import (
	"time"
)

// Phase is what the stream is doing.
type Phase string

// The phases of a stream.
const (
	Opening     Phase = "opening"      // never answered yet
	Live        Phase = "live"         // the server answers
	Reopening   Phase = "reopening"    // broken off, comes back by itself
	ConfigError Phase = "config_error" // somebody must grant or change something; tried again slowly
	Oversize    Phase = "oversize"     // live, without the documents that are too large for an event (N24)
	Stopped     Phase = "stopped"
)

// State is the stream's state for status and readiness.
type State struct {
	Phase  Phase
	Reason string    // for people: what happened and what to do; empty while live
	Code   int       // the server's code, 0 if there is none
	Since  time.Time // when this phase began
}

// Ready reports whether events flow, or would if there were any.
func (s State) Ready() bool { return s.Phase == Live || s.Phase == Oversize }

// Metrics are hooks for whoever counts; each may be nil. They are called from the goroutine of Run and must not block.
type Metrics struct {
	// Batch: a batch with events was fetched; wait is the time in the server's reply, not the time to hand it on.
	Batch func(events, bytes int, wait time.Duration)
	// Restart: the stream was reopened, by us or by the driver ("driver"). Reasons are few.
	Restart func(reason string)
}

func (m *Metrics) batch(events, bytes int, wait time.Duration) {
	if m.Batch != nil {
		m.Batch(events, bytes, wait)
	}
}

func (m *Metrics) restart(reason string) {
	if m.Restart != nil {
		m.Restart(reason)
	}
}

// State is the current state. It may be called from anywhere.
func (s *Stream) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state
}

func (s *Stream) enter(p Phase, code int, reason string) {
	s.mu.Lock()
	if s.state.Phase == p && s.state.Reason == reason {
		s.mu.Unlock()
		return
	}
	since := s.state.Since
	if s.state.Phase != p {
		since = time.Now()
	}
	s.state = State{Phase: p, Reason: reason, Code: code, Since: since}
	st := s.state
	s.mu.Unlock()
	if s.cfg.OnState != nil {
		s.cfg.OnState(st)
	}
}
