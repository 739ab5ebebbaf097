package consumer

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// applyPolicy records the failure of x, and carries out the verdict of the policy. done reports
// whether the message is finished, again whether it has to be attempted again.
func (t *track) applyPolicy(x task, cause error) (done, again bool) {
	attempts, m := &x.share.attempts, x.entry.m
	*attempts = attempts.Note(cause, m, time.Now())

	v := t.reg.decideVerdict(cause, originalMessage(x.entry), *attempts)
	if v.Uncounted {
		attempts.Spared++
	}
	t.count(telemetry.Failed, 1, v.Action.String())
	t.noteOutcome(x, v, cause)

	// Without WithUnknown, messages without a handler are normal. They are reported once per type, not
	// once per message.
	if t.reg == t.p.s.c.unknown && v.Action == Skip {
		t.p.s.c.reg.reportUnknownOnce(m.Name, t.p.s.report)
		return t.disposeTask(x, v, cause), false
	}

	reported := cause
	if n := attempts.Total - attempts.Spared; v.Action == DeadLetter && n > 1 {
		reported = &RetriesExhaustedError{Attempts: n, Err: cause}
	}
	t.p.s.report(&HandlerError{
		Handler: t.reg.name, Topic: m.Topic, Partition: m.Partition, Offset: m.Offset, ID: m.ID, Type: m.Name,
		Attempts: *attempts, Verdict: v, Err: reported,
	})

	switch v.Action {
	case RetryInline:
		t.waitYielding(v.Delay)
		return false, true
	case RetryAfter, SetAside, SuspendHandler:
		return t.waitElsewhere(x, v)
	case PauseConsumer:
		t.p.s.keepAttempts(t, x)
		t.p.s.c.pauseFor(v.Delay)
		return false, false
	default:
		return t.disposeTask(x, v, cause), false
	}
}

// waitElsewhere lets x wait for the delay of v: set aside if v asks for that, otherwise in its lane. The results are those
// of applyPolicy.
func (t *track) waitElsewhere(x task, v Verdict) (done, again bool) {
	delay := max(v.Delay, 0) // UntilResumed is the time of the suspension, not of the message
	if t.waiting != nil {
		return t.postpone(x, delay), false
	}

	if v.Action != RetryAfter && t.room() != nil {
		if stored, full := t.setAside(x, delay, v.Unordered); !full {
			return stored, false
		}
	}

	// The suspension of the handler holds up its lanes.
	if v.Action != SuspendHandler {
		t.waitYielding(delay)
	}
	return false, true
}

// decideVerdict returns the verdict of the policy. A policy that panics or returns no known action
// sends the message to the dead letters.
func (r *registration) decideVerdict(cause error, m *Message, attempts Attempts) (v Verdict) {
	dead := Verdict{Action: DeadLetter}
	defer func() {
		if recover() != nil {
			v = dead
		}
	}()

	v = r.decider.Decide(cause, m, attempts)
	if v.Action == 0 || int(v.Action) >= len(actions) {
		v = dead
	}
	return v
}

// disposeTask moves the message to the place that the verdict names, then moves its watermark, then
// finishes the task. It returns false if it was interrupted before that. So the offset passes only
// a message that was moved.
//
// If a disposal can never succeed for this message, a weaker one replaces it, so that no message
// blocks its partition forever. If it fails because a server is away, it is repeated until the
// server is back.
func (t *track) disposeTask(x task, v Verdict, cause error) bool {
	s := t.p.s
	backoff := retry.Reopen.Start()
	moved, lost := false, false

	for {
		var err error
		if !moved {
			err = s.callDisposer(originalMessage(x.entry), t.reg.name, v, cause)
			moved = err == nil
		}

		if isUnfit(err) {
			s.report(t.disposalError(x, v, err))

			// The letter's class is that of the handler's failure, not that of the disposal's.
			v.Reason = cmp.Or(v.Reason, Class(cause))
			cause = errors.Join(cause, err)

			weaker, last := weakerVerdict(v)
			if !last {
				v = weaker
				continue
			}
			moved, lost = true, true
			s.report(&LostError{
				Handler: t.reg.name, Topic: x.entry.m.Topic, Partition: x.entry.m.Partition, Offset: x.entry.m.Offset, Err: err,
			})
			err = nil
		}

		switch {
		case moved && t.waiting != nil:
			err = s.c.waiting.Remove(s.drainCtx, t.waiting)
		case moved && t.reg.mode != AtLeastOnce && !x.entry.orphan.Load():
			if err = s.inbox.Pass(s.drainCtx, []inbox.Entry{t.inboxEntry(x)}); err != nil {
				err = fmt.Errorf("passing the watermark: %w", err)
			}
		}
		if err == nil {
			break
		}

		s.report(t.disposalError(x, v, err))
		if errors.Is(err, inbox.ErrInvalid) {
			break // the inbox has no watermark for such a place
		}
		if t.mustStop() {
			return false
		}
		t.waitYielding(backoff.Next())

		// As after an attempt, the partition is attached again and the message is fetched again.
		if errors.Is(err, inbox.ErrStale) {
			t.p.detachHandler(t.reg)
			return false
		}
	}

	switch {
	case t.reg == s.c.unknown:
		t.count(telemetry.Unknown, 1, "")
	case v.Action == Skip || lost:
		t.count(telemetry.Discarded, 1, "")
	case v.Action == DeadLetter:
		t.count(telemetry.Letters, 1, Class(cause))
	}
	t.completeTasks([]task{x})
	if v.Pause != 0 {
		s.c.pauseFor(v.Pause)
	}
	return true
}

// disposalError wraps the error of a disposal with the action, the message and the handler.
func (t *track) disposalError(x task, v Verdict, err error) error {
	return fmt.Errorf("%s of message %s for handler %q: %w", v.Action, clip(x.entry.m.ID, maxReason), t.reg.name, err)
}

// weakerVerdict returns the verdict that replaces one that cannot be carried out for the message.
// last reports that there is none.
func weakerVerdict(v Verdict) (next Verdict, last bool) {
	next = v
	switch {
	case v.Bare:
		return v, true
	case v.Action == DeadLetter || v.Action == Park:
		next.Bare = true
	default:
		next.Action, next.Topic = DeadLetter, ""
	}
	return next, false
}

// callDisposer calls the disposer, and turns a panic into an error.
func (s *session) callDisposer(m *Message, handler string, v Verdict, cause error) (err error) {
	defer recoverPanic(&err)
	return s.disposer.Dispose(s.drainCtx, m, handler, v, cause)
}

// originalMessage returns a copy of the message as it was read, with the record's own key and value.
func originalMessage(e *entry) *Message {
	m := e.m.Copy()
	m.Key, m.Value = e.rec.Key, e.rec.Value
	return m
}
