package consumer

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/service/setaside"
)

// headStart is how long a new message may become the next probe of a handler in doubt before a retry may.
const headStart = 2 * time.Second

// suspension is the state of a handler that may be suspended. It belongs to the process, so a rebalance does not end it,
// and each running member of a group finds out about an outage on its own.
//
// A suspension ends in three ways: by resume, by a successful probe, and, unless it was asked for, by any other success. A
// probe is one attempt after the time until.
//
// A handler is in doubt if messages of many keys had failed before it got its partitions. Then the first failure of a new
// message suspends it, and until a success every attempt is a probe. Some of the keys may wait because of bad messages, not
// of an outage. So retries do not decide: new messages probe first, and a retry that fails prolongs nothing.
type suspension struct {
	mu      sync.Mutex
	inDoubt bool
	retryAt time.Time                    // in doubt: no retry is a probe before
	failed  map[setaside.Digest]struct{} // queues of the messages that failed since the last success
	until   time.Time                    // zero: not suspended
	manual  bool                         // suspended until resume
	asked   bool                         // by the handler, for a time that other successes do not shorten
	probes  int                          // failed probes of this suspension
	probeID int                          // of the running probe; 0 without one
	lastID  int
	changed chan struct{} // closed and replaced at each change
}

// suspendedError reports that a handler is suspended, and later that it goes on. Each is reported once.
type suspendedError struct {
	Handler string
	Over    bool
	Until   time.Time // of the first probe; zero until Consumer.ResumeHandler
	Err     error     // the last failure; nil if it is over
}

func (e *suspendedError) Error() string {
	switch {
	case e.Over:
		return fmt.Sprintf("handler %q goes on", e.Handler)
	case e.Until.IsZero():
		return fmt.Sprintf("handler %q is suspended until ResumeHandler: %v", e.Handler, e.Err)
	}
	return fmt.Sprintf("handler %q is suspended and tries one message at %s: %v",
		e.Handler, e.Until.UTC().Format(time.RFC3339), e.Err)
}

// Unwrap returns the last failure.
func (e *suspendedError) Unwrap() error { return e.Err }

func (e *suspendedError) line() line {
	switch {
	case e.Over:
		return line{slog.LevelInfo, "handler goes on", []any{"handler", e.Handler}}
	case e.Until.IsZero():
		return line{slog.LevelWarn, "handler is suspended until ResumeHandler; its messages wait", []any{"handler", e.Handler, "error", e.Err}}
	}
	return line{slog.LevelWarn, "handler is suspended; its messages wait, and one is tried at times", []any{
		"handler", e.Handler, "until", e.Until.UTC(), "error", e.Err,
	}}
}

// isSuspendedLocked reports whether the handler takes no messages other than a probe.
func (s *suspension) isSuspendedLocked() bool { return s.manual || !s.until.IsZero() }

func (s *suspension) isSuspended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isSuspendedLocked()
}

// status reports whether the handler is suspended, and until when: zero until resume.
func (s *suspension) status() (suspended bool, until time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.isSuspendedLocked(), s.until
}

// changeLocked wakes all goroutines that wait for a change.
func (s *suspension) changeLocked() {
	if s.changed != nil {
		close(s.changed)
	}
	s.changed = make(chan struct{})
}

// permit is the result of mayStart.
type permit struct {
	ok      bool
	probe   int           // the id of the probe; 0 if the handler is not suspended
	wait    time.Duration // until the next probe; 0 if there is no such time
	changed <-chan struct{}
}

// beginInDoubt puts a handler in doubt that is not suspended. A handler that is in doubt keeps the time of its next retry, which
// each rebalance would postpone otherwise.
func (s *suspension) beginInDoubt() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.inDoubt && !s.isSuspendedLocked() {
		s.inDoubt, s.retryAt = true, time.Now().Add(headStart)
	}
}

// probesOnly reports whether each attempt has to be a probe.
func (s *suspension) probesOnly() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.inDoubt || s.isSuspendedLocked()
}

// prefersRetries reports whether a message that is set aside has to be the next probe, if there is one.
func (s *suspension) prefersRetries() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.inDoubt && s.isSuspendedLocked()
}

// mayStart reports whether an attempt may start. If it is a probe, the caller must call endProbe.
func (s *suspension) mayStart(now time.Time) permit {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.startLocked(now, s.until)
}

// mayRetry is mayStart for a message that is set aside.
func (s *suspension) mayRetry(now time.Time) permit {
	s.mu.Lock()
	defer s.mu.Unlock()
	from := s.until
	if s.inDoubt && s.retryAt.After(from) {
		from = s.retryAt
	}
	return s.startLocked(now, from)
}

// startLocked is mayStart with the time from which a suspended handler may probe.
func (s *suspension) startLocked(now, from time.Time) permit {
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	permit := permit{changed: s.changed}
	switch {
	case !s.inDoubt && !s.isSuspendedLocked():
		permit.ok = true
	// Only Resume, or the outcome of the probe, ends the wait.
	case s.manual || s.probeID != 0:
	case now.Before(from):
		permit.wait = from.Sub(now)
	default:
		s.lastID++
		s.probeID = s.lastID
		permit.ok, permit.probe = true, s.probeID
	}
	return permit
}

// isProbe reports whether the probe still runs. A probe that fails ends before its message is finished.
func (s *suspension) isProbe(id int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return id != 0 && s.probeID == id
}

// allowProbe lets the next probe start at once, because an operator has requested an attempt. It does not end PauseHandler.
func (s *suspension) allowProbe() {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	if s.manual || !s.until.After(now) && !s.retryAt.After(now) {
		return
	}
	if s.until.After(now) {
		s.until = now
	}
	s.retryAt = time.Time{}
	s.changeLocked()
}

// endProbe ends a probe that neither succeeded nor failed, for example because its message was gone. The next probe may
// start at once. It has no effect if the probe has ended.
func (s *suspension) endProbe(id int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if id != 0 && s.probeID == id {
		s.probeID = 0
		s.changeLocked()
	}
}

// noteSuccess records that a message was handled. It reports whether that has ended a suspension.
func (s *suspension) noteSuccess() (over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	clear(s.failed)
	wasSuspended := s.isSuspendedLocked()
	isUndisturbed := !s.inDoubt && !wasSuspended
	// A person or the handler has set the end. Only a probe may come first.
	isFixed := (s.manual || s.asked) && s.probeID == 0
	if isUndisturbed || isFixed {
		return false
	}
	s.openLocked()
	return wasSuspended
}

// noteFailure records that a message of the queue failed, after its attempts in place. It reports whether that has
// suspended the handler, and until when. wasAside means that the message had been set aside.
func (s *suspension) noteFailure(queue setaside.Digest, wasAside bool, retry *Retry) (until time.Time, began bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	// While a probe runs, other failures show nothing about the handler: they began before.
	if s.inDoubt || s.isSuspendedLocked() {
		if s.probeID == 0 {
			return time.Time{}, false
		}
		return s.noteFailedProbeLocked(wasAside, retry)
	}
	// If retries of messages that were set aside counted, some bad messages would suspend the handler in a quiet hour. It would
	// then try only these messages, and new ones would wait until the bad ones are given up.
	if retry.Outage < 0 || wasAside {
		return time.Time{}, false
	}

	if s.failed == nil {
		s.failed = map[setaside.Digest]struct{}{}
	}
	// Messages of one key count once, because they may fail for the same reason.
	s.failed[queue] = struct{}{}
	if len(s.failed) < retry.Outage {
		return time.Time{}, false
	}
	s.until = time.Now().Add(retry.waitAfter(1))
	s.changeLocked()
	return s.until, true
}

// noteFailedProbeLocked ends the running probe. It returns the same as noteFailure.
func (s *suspension) noteFailedProbeLocked(wasAside bool, retry *Retry) (until time.Time, began bool) {
	defer s.changeLocked()
	s.probeID = 0
	s.retryAt = time.Now().Add(headStart)
	if s.inDoubt && wasAside {
		return time.Time{}, false
	}

	began = !s.isSuspendedLocked()
	// A failed probe extends the suspension.
	if !began {
		s.probes++
	}
	s.until = time.Now().Add(retry.waitAfter(s.probes + 1))
	return s.until, began
}

// suspendFor suspends the handler for duration, or until resume if duration is untilResumed. It does not shorten a longer suspension. It
// reports whether the handler was not suspended before, and until when it is.
func (s *suspension) suspendFor(duration time.Duration) (until time.Time, began bool) {
	s.mu.Lock()
	defer s.mu.Unlock()

	began = !s.isSuspendedLocked()
	s.probeID = 0
	if duration == untilResumed {
		s.manual = true
	} else if until := time.Now().Add(duration); until.After(s.until) {
		s.until, s.asked = until, true
	}
	s.changeLocked()
	return s.until, began
}

// resume ends the suspension.
func (s *suspension) resume() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.openLocked()
}

func (s *suspension) openLocked() {
	clear(s.failed)
	s.until, s.manual, s.asked, s.inDoubt, s.probes, s.probeID = time.Time{}, false, false, false, 0, 0
	s.changeLocked()
}
