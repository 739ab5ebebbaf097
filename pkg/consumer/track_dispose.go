package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// applyVerdict records the failure of task, and carries out the verdict. done reports
// whether the message is finished, again whether it has to be attempted again.
func (t *track) applyVerdict(task task, cause error) (done, again bool) {
	attempts, message := &task.share.attempts, task.entry.m
	// The history is noted before the decision, because the decision depends on the number of failures.
	*attempts = attempts.note(cause, message, time.Now())

	verdict := t.reg.decider.decide(cause, originalMessage(task.entry), *attempts)
	if givenUp := task.entry.givenUp; givenUp != nil {
		verdict.Action, verdict.Reason = givenUp.Action, givenUp.Reason
	}
	if verdict.Uncounted {
		attempts.Spared++
	}
	t.count(telemetry.Failed, 1, verdict.Action.String())
	text := errorText(cause)
	t.reg.lastError.Store(&text)
	t.noteOutcome(task, verdict, cause)

	switch t.reg {
	case t.p.s.c.unknown:
		t.p.s.reportUnknown(message, attempts.Total)
		return t.disposeTask(task, verdict, cause), false
	case t.p.s.c.skipped:
		return t.disposeTask(task, verdict, cause), false
	}

	reported := cause
	if n := attempts.Total - attempts.Spared; verdict.Action == actDeadLetter && n > 1 {
		reported = fmt.Errorf("given up after %d attempts: %w", n, cause)
	}
	failed := &HandlerError{Handler: t.reg.name, Message: message, Attempt: attempts.Total, Next: verdict.Action.String(), Err: reported}
	if panicErr, ok := errors.AsType[*panicError](cause); ok {
		failed.Stack = panicErr.Stack
	}
	t.p.s.report(failed)

	switch verdict.Action {
	case actRetry:
		t.waitYielding(verdict.Delay)
		return false, true
	case actWait, actAside, actSuspend:
		return t.waitElsewhere(task, verdict)
	default:
		return t.disposeTask(task, verdict, cause), false
	}
}

// waitElsewhere lets task wait for the delay of verdict: set aside if verdict asks for that, otherwise in its lane. The results have the
// same meaning as in applyVerdict.
func (t *track) waitElsewhere(task task, verdict verdict) (done, again bool) {
	// A negative delay is untilResumed, which is about the suspension. The message itself waits no longer.
	delay := max(verdict.Delay, 0)
	if t.waiting != nil {
		return t.postpone(task, delay), false
	}

	if verdict.Action != actWait && t.room() != nil {
		if stored, full := t.setAside(task, asideTerms{wait: delay, unordered: verdict.Unordered}); !full {
			return stored, false
		}
	}

	// The suspension of the handler holds up its lanes.
	if verdict.Action != actSuspend {
		t.waitYielding(delay)
	}
	return false, true
}

// disposeTask moves the message to the place that the verdict names, then moves its watermark, then
// finishes the task. It returns false if it was interrupted before that. So the offset passes only
// a message that was moved. A step that fails is repeated until it succeeds.
func (t *track) disposeTask(current task, verdict verdict, cause error) bool {
	wrap := func(err error) error {
		if err == nil {
			return nil
		}
		return fmt.Errorf("%s of message %s for handler %q: %w", verdict.Action, record.Clip(current.entry.m.ID, maxReason), t.reg.name, err)
	}

	// The watermark moves only after the message is in its new place.
	var givenUp *GivenUp
	disposed := t.repeatStep("move a message that was given up or waits for its retry", func() (err error) {
		givenUp, err = t.p.s.callDisposer(t.p.drainCtx, originalMessage(current.entry), t.reg.name, verdict, cause)
		return wrap(err)
	}) && t.repeatStep("record in the inbox that a message was moved", func() error {
		err := t.passDisposed(current)
		if errors.Is(err, inbox.ErrInvalid) {
			// The inbox has no watermark for such a place.
			t.p.reportTrouble("cannot record in the inbox that a message was moved; its offset passes", wrap(err), "handler", t.reg.name)
			return nil
		}
		return wrap(err)
	})
	if !disposed {
		return false
	}

	t.p.s.announce(givenUp)
	if t.reg == t.p.s.c.unknown || t.reg == t.p.s.c.skipped {
		t.count(telemetry.Unknown, 1, "")
		t.p.s.c.health.countUnknown(current.entry.m.Name)
	}
	switch {
	case t.reg == t.p.s.c.skipped:
	case verdict.Action == actDiscard:
		t.count(telemetry.Discarded, 1, "")
	case verdict.Action == actDeadLetter:
		t.count(telemetry.DeadLetters, 1, classOf(cause))
	}
	t.completeTasks([]task{current})
	return true
}

// passDisposed records in the store, or in the inbox, that the handler is done with a message that was moved.
func (t *track) passDisposed(task task) error {
	switch {
	case t.waiting != nil:
		_, err := t.p.s.c.waiting.Remove(t.p.drainCtx, t.waiting)
		return err
	case !t.reg.mode.usesInbox():
		return nil
	}

	// The new topic has other watermarks.
	if err := t.passWatermark(t.p.drainCtx, task); !errors.Is(err, errOrphan) {
		return err
	}
	return nil
}

// callDisposer calls the disposer, and turns a panic into an error.
func (r *run) callDisposer(ctx context.Context, message *Message, handler string, verdict verdict, cause error) (givenUp *GivenUp, err error) {
	err = runGuarded(func() (err error) {
		givenUp, err = r.disposer.Dispose(ctx, message, handler, verdict, cause)
		return err
	})
	return givenUp, err
}

// announce passes a message that is given up for good to WithGivenUpHook. It does nothing with nil.
func (r *run) announce(givenUp *GivenUp) {
	if givenUp != nil {
		r.givenUp.Add(*givenUp)
	}
}

// originalMessage returns a copy of the message as it was read, with the record's own key and value.
func originalMessage(entry *entry) *Message {
	message := entry.m.copy()
	message.Key, message.Value = entry.rec.Key, entry.rec.Value
	return message
}
