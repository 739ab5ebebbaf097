package consumer

import (
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// applyVerdict records the failure of x, and carries out the verdict. done reports
// whether the message is finished, again whether it has to be attempted again.
func (t *track) applyVerdict(x task, cause error) (done, again bool) {
	attempts, m := &x.share.attempts, x.entry.m
	// The history is noted before the decision, because the decision depends on the number of failures.
	*attempts = attempts.note(cause, m, time.Now())

	v := t.reg.decider.decide(cause, originalMessage(x.entry), *attempts)
	if g := x.entry.givenUp; g != nil {
		v.Action, v.Reason = g.Action, g.Reason
	}
	if v.Uncounted {
		attempts.Spared++
	}
	t.count(telemetry.Failed, 1, v.Action.String())
	text := errorText(cause)
	t.reg.lastError.Store(&text)
	t.noteOutcome(x, v, cause)

	// Without WithUnknown, messages without a handler are normal. They are reported once per type, not
	// once per message.
	if t.reg == t.p.s.c.unknown && v.Action == actDiscard {
		t.p.s.c.reg.reportUnknownOnce(m.Name, t.p.s.report)
		return t.disposeTask(x, v, cause), false
	}

	reported := cause
	if n := attempts.Total - attempts.Spared; v.Action == actDeadLetter && n > 1 {
		reported = fmt.Errorf("given up after %d attempts: %w", n, cause)
	}
	failed := &HandlerError{Handler: t.reg.name, Message: m, Attempt: attempts.Total, Next: v.Action.String(), Err: reported}
	if p, ok := errors.AsType[*panicError](cause); ok {
		failed.Stack = p.Stack
	}
	t.p.s.report(failed)

	switch v.Action {
	case actRetry:
		t.waitYielding(v.Delay)
		return false, true
	case actWait, actAside, actSuspend:
		return t.waitElsewhere(x, v)
	default:
		return t.disposeTask(x, v, cause), false
	}
}

// waitElsewhere lets x wait for the delay of v: set aside if v asks for that, otherwise in its lane. The results have the
// same meaning as in applyVerdict.
func (t *track) waitElsewhere(x task, v verdict) (done, again bool) {
	// A negative delay is untilResumed, which is about the suspension. The message itself waits no longer.
	delay := max(v.Delay, 0)
	if t.waiting != nil {
		return t.postpone(x, delay), false
	}

	if v.Action != actWait && t.room() != nil {
		if stored, full := t.setAside(x, delay, v.Unordered); !full {
			return stored, false
		}
	}

	// The suspension of the handler holds up its lanes.
	if v.Action != actSuspend {
		t.waitYielding(delay)
	}
	return false, true
}

// disposeTask moves the message to the place that the verdict names, then moves its watermark, then
// finishes the task. It returns false if it was interrupted before that. So the offset passes only
// a message that was moved. A step that fails is repeated until it succeeds.
func (t *track) disposeTask(x task, v verdict, cause error) bool {
	wrap := func(err error) error {
		if err == nil {
			return nil
		}
		return fmt.Errorf("%s of message %s for handler %q: %w", v.Action, record.Clip(x.entry.m.ID, maxReason), t.reg.name, err)
	}

	// The watermark moves only after the message is in its new place.
	disposed := t.repeatStep(func() error {
		return wrap(t.p.callDisposer(originalMessage(x.entry), t.reg.name, v, cause))
	}) && t.repeatStep(func() error {
		err := t.passDisposed(x)
		if errors.Is(err, inbox.ErrInvalid) {
			// The inbox has no watermark for such a place.
			t.p.s.report(wrap(err))
			return nil
		}
		return wrap(err)
	})
	if !disposed {
		return false
	}

	switch {
	case t.reg == t.p.s.c.unknown:
		t.count(telemetry.Unknown, 1, "")
		t.p.s.c.health.countUnknown(x.entry.m.Name)
	case v.Action == actDiscard:
		t.count(telemetry.Discarded, 1, "")
	case v.Action == actDeadLetter:
		t.count(telemetry.DeadLetters, 1, classOf(cause))
	}
	t.completeTasks([]task{x})
	return true
}

// passDisposed records in the store, or in the inbox, that the handler is done with a message that was moved.
func (t *track) passDisposed(x task) error {
	s := t.p.s
	switch {
	case t.waiting != nil:
		return s.c.waiting.Remove(t.p.drainCtx, t.waiting)
	case !t.reg.mode.usesInbox() || x.entry.orphan.Load():
		return nil
	}
	return s.passWatermark(t.p.drainCtx, t.inboxEntry(x))
}

// callDisposer calls the disposer, and turns a panic into an error.
func (p *partition) callDisposer(m *Message, handler string, v verdict, cause error) error {
	return runGuarded(func() error { return p.s.disposer.Dispose(p.drainCtx, m, handler, v, cause) })
}

// originalMessage returns a copy of the message as it was read, with the record's own key and value.
func originalMessage(e *entry) *Message {
	m := e.m.copy()
	m.Key, m.Value = e.rec.Key, e.rec.Value
	return m
}
