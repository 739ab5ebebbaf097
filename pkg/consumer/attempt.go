package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// attemptResult counts the outcomes of the messages of one attempt.
type attemptResult struct {
	handled, duplicates int
	took                time.Duration
}

// handlerFailure is a failure of the handler. Failures of the inbox and the transaction have other types.
type handlerFailure struct{ error }

func (e *handlerFailure) Unwrap() error { return e.error }

// inboxFailure is a failure of the inbox.
type inboxFailure struct{ error }

func (e *inboxFailure) Unwrap() error { return e.error }

// timeoutError reports that a handler exceeded its Timeout.
type timeoutError struct {
	Name  string // of the function
	After time.Duration
	Err   error // the error that the function returned after the timeout
}

func (e *timeoutError) Error() string {
	return fmt.Sprintf("%s did not end within %v: %v", e.Name, e.After, e.Err)
}

// Unwrap returns ErrTimeout, context.DeadlineExceeded and the handler's error. A timeout does not mean that the database is
// unavailable, so it is not transient.
func (e *timeoutError) Unwrap() []error { return []error{ErrTimeout, context.DeadlineExceeded, e.Err} }

// recoverPanic stores a panic as a *panicError in err. It must be deferred directly.
func recoverPanic(err *error) {
	if panicked := recover(); panicked != nil {
		*err = &panicError{Value: panicked, Stack: debug.Stack()}
	}
}

// errOrphan reports that the message's topic was deleted and created again after the message was read.
var errOrphan = errors.New("the topic was deleted and created again")

// checkOrphans returns errOrphan if one of the messages was abandoned. Called in a transaction after the inbox has moved the
// watermarks, it also shows that they were not those of the new topic: this process attaches to it only afterwards.
func checkOrphans(list []task) error {
	if slices.ContainsFunc(list, func(task task) bool { return task.entry.orphan.Load() }) {
		return errOrphan
	}
	return nil
}

// attemptTasks handles the messages once, in the handler's mode. It blocks until the handler and its transaction end.
// A failure of the handler is a *handlerFailure.
func (t *track) attemptTasks(list []task) (res attemptResult, err error) {
	// A system handler has no function. Its messages fail with the reason why no handler takes them.
	if t.reg.system {
		return res, &handlerFailure{noHandlerCause(list[0])}
	}

	defer recoverPanic(&err)
	// The wait comes first: another message of the key may be set aside during it.
	if err := t.reg.rateLimiter.await(t, len(list)); err != nil {
		return res, err
	}
	if !t.attempt.begin(t, list) {
		return res, errBehind
	}
	defer t.attempt.end(t.p)
	// The log no longer has such a message, so it must not be handled.
	if err := checkOrphans(list); err != nil {
		return res, err
	}

	ctx := t.p.drainCtx
	// A partition that no member reads has no log, and its messages move no watermark.
	if t.reg.mode.usesInbox() && !t.p.isStray {
		generation, err := t.attachHandler(ctx)
		if err != nil {
			return res, err
		}
		for _, x := range list {
			if !x.entry.orphan.Load() {
				x.share.generation = generation
			}
		}
	}
	if t.reg.mode.usesTransaction() {
		t.trouble.watchDatabase(t, maxQuerySilence)
		defer t.trouble.stopWatching()
	}

	t.reg.running.Add(1)
	defer t.reg.running.Add(-1)
	// The span covers the transaction, so that its commands are children of the span.
	ctx, endSpan, spanErr := t.startSpan(ctx, list)
	if spanErr != nil {
		return res, &handlerFailure{spanErr}
	}
	defer func() { t.endSpan(endSpan, err) }()

	began := time.Now()
	// Users can supply the inbox and the transactions, so not only handlers panic or end their goroutine.
	err = runGuarded(func() error { return t.handleByMode(ctx, list, &res) })
	res.took = time.Since(began)
	return res, err
}

// handleByMode handles the messages in the mode of the handler.
func (t *track) handleByMode(ctx context.Context, list []task, res *attemptResult) (err error) {
	switch {
	case t.waiting != nil && t.reg.mode == Transactional:
		return t.handleWaiting(ctx, list[0], res)
	case t.reg.mode == Claimed:
		return t.handleEager(ctx, list[0], res)
	case t.reg.mode == Transactional:
		return t.handleOptimistic(ctx, list, res)
	case t.reg.mode == AtLeastOnceInTransaction:
		return t.runTransaction(ctx, list, func(ctx context.Context) error {
			if taken, err := t.takeWaiting(ctx, res); !taken || err != nil {
				return err
			}
			return t.runHandler(ctx, list, nil, res)
		})
	}

	// Without a transaction, a message that is set aside is removed after its handler. After a crash in between, the handler
	// runs again.
	err = t.runHandler(ctx, list, nil, res)
	if err == nil && t.waiting != nil {
		_, err = t.p.s.c.waiting.Remove(ctx, t.waiting)
	}
	return err
}

// runTransaction runs callback in a transaction. The driver repeats callback after transient failures, for up to two minutes.
// runTransaction stops the repetitions with an *overrunError if the server aborted a transaction that was open for long
// or had several messages, because the same messages would take as long again.
func (t *track) runTransaction(ctx context.Context, list []task, callback func(ctx context.Context) error) error {
	began := time.Now()
	ran := false
	var lastErr error
	tooSlow := func(cause error) bool { return isAbortedTransaction(cause) && (len(list) > 1 || t.handlerRanLong()) }

	err := t.p.s.transact(ctx, func(ctx context.Context) error {
		// If the last run had no error, its commit failed, and only the driver has the cause. A smaller batch takes less
		// time, so all runs of a batch count together.
		slowCommit := lastErr == nil && (t.handlerRanLong() || len(list) > 1 && time.Since(began) > targetDuration/2)
		if ran && (slowCommit || tooSlow(lastErr)) {
			return &overrunError{after: time.Since(began), err: lastErr}
		}
		if ran {
			t.noteRepeat(ctx, lastErr)
		}
		// MongoDB has responded: the lane waits for another transaction.
		if mongodb.IsConflict(lastErr) {
			t.trouble.noteResponse(t)
		}

		t.lastRun = 0
		ran, lastErr = true, callback(ctx)
		// The timeout may have interrupted a statement, whose label would make the driver run the handler again.
		if _, late := errors.AsType[*timeoutError](lastErr); late {
			return &finalError{lastErr}
		}
		return lastErr
	})
	if final, ok := errors.AsType[*finalError](err); ok {
		return final.err
	}

	// After its own limit the driver does not run callback again. It returns the cause instead.
	_, isOverrun := errors.AsType[*overrunError](err)
	if !isOverrun && len(list) == 1 && tooSlow(err) {
		return &overrunError{after: time.Since(began), err: err}
	}
	return err
}

// finalError hides the labels of an error, so that the transaction is not repeated.
type finalError struct{ err error }

func (e *finalError) Error() string { return e.err.Error() }

// noteRepeat logs once for each handler that its transaction was rolled back, so that a handler that prints or counts on its
// own does not look as if it had handled a message twice.
func (t *track) noteRepeat(ctx context.Context, cause error) {
	// A conflict in the inbox comes before the handler.
	if t.lastRun == 0 || !t.reg.repeatNoted.CompareAndSwap(false, true) {
		return
	}

	attrs := []any{"group", t.p.s.c.group, "handler", t.reg.name}
	// If the commit has failed, only the driver has the cause.
	if cause != nil {
		attrs = append(attrs, "error", cause)
	}
	t.p.s.c.s.log.InfoContext(ctx,
		"handler runs again because MongoDB rolled its transaction back; only the last run takes effect; this is logged once", attrs...)
}

// handlerRanLong reports whether the last run of the handler took most of a long transaction.
func (t *track) handlerRanLong() bool { return t.lastRun > targetDuration/2 }

// noHandlerCause returns the reason why no handler gets the message.
func noHandlerCause(task task) error {
	if task.entry.decodeErr != nil {
		return task.entry.decodeErr
	}
	return fmt.Errorf("%w takes type %q: register one", ErrNoHandler, task.entry.m.Name)
}

// handleOptimistic marks and handles the messages in one transaction. A message that has a mark costs a second transaction, which
// reads the marks.
func (t *track) handleOptimistic(ctx context.Context, list []task, res *attemptResult) error {
	entries := make([]inbox.Entry, len(list))
	for i, x := range list {
		entries[i] = t.inboxEntry(x)
	}

	for {
		admit := t.p.s.inbox.AdmitNew
		readsMarks := t.reg.repeats.areRecent(time.Now())
		if readsMarks {
			admit = t.p.s.inbox.Admit
		}

		err := t.runTransaction(ctx, list, func(ctx context.Context) error {
			ctx = t.p.s.inbox.Remember(ctx)
			fresh, err := admit(ctx, entries)
			if err != nil {
				return &inboxFailure{fmt.Errorf("admitting %d messages to the inbox: %w", len(entries), err)}
			}
			if err := checkOrphans(list); err != nil {
				return err
			}
			if err := t.checkOrder(ctx, list, fresh); err != nil {
				return err
			}
			return t.runHandler(ctx, list, fresh, res)
		})
		if readsMarks || !errors.Is(err, inbox.ErrMarked) {
			return err
		}
		t.reg.repeats.note(time.Now())
	}
}

// handleEager claims the message, and handles it in a transaction that turns the claim into the mark.
func (t *track) handleEager(ctx context.Context, current task, res *attemptResult) error {
	session := t.p.s
	// The claim comes before the transaction, because it has to be visible to other members while the handler runs.
	claim, err := session.claimMessage(ctx, t.inboxEntry(current))
	// The message was handled before, so only its document or its watermark is left to change.
	if errors.Is(err, inbox.ErrDuplicate) {
		*res = attemptResult{duplicates: 1}
		if t.waiting != nil {
			_, err := session.c.waiting.Remove(ctx, t.waiting)
			return err
		}
		if err := t.checkOrder(ctx, []task{current}, []bool{false}); err != nil {
			return err
		}
		return t.passWatermark(ctx, current)
	}
	if err != nil {
		return &inboxFailure{fmt.Errorf("claiming a message: %w", err)}
	}

	defer func() {
		// The claim is released even if the session ends.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		if err := claim.Release(ctx); err != nil {
			session.reportTrouble("cannot release a claim; it expires", fmt.Errorf("releasing the claim of message %s: %w", current.entry.m.ID, err))
		}
	}()

	if err := checkOrphans([]task{current}); err != nil {
		return err
	}
	return claim.Hold(ctx, func(ctx context.Context) error {
		return t.runTransaction(ctx, []task{current}, func(ctx context.Context) error {
			if taken, err := t.takeWaiting(ctx, res); !taken || err != nil {
				return err
			}
			if err := t.runHandler(ctx, []task{current}, nil, res); err != nil {
				return err
			}
			if err := claim.Handled(ctx); err != nil {
				return &inboxFailure{fmt.Errorf("marking a message as handled: %w", err)}
			}
			return nil
		})
	})
}

// claimMessage claims a message in the inbox. It blocks for at most commitTimeout.
func (s *session) claimMessage(ctx context.Context, entry inbox.Entry) (*inbox.Claim, error) {
	// The end of a drain must not cut this call off. A claim that was stored without a response would block all members
	// from the message until its lease expires.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	return s.inbox.Claim(ctx, entry, 0)
}

// passWatermark moves the watermark of the inbox past the message of current. It returns errOrphan, and moves nothing, if the topic was
// deleted and created again.
func (t *track) passWatermark(ctx context.Context, current task) error {
	// A message that was never tried may be the first one of the handler. Without the id of its topic, the inbox would take the
	// watermark for one of the topic that comes next.
	if _, err := t.attachHandler(ctx); err != nil {
		return err
	}
	return t.runTransaction(ctx, []task{current}, func(ctx context.Context) error {
		if err := t.p.s.inbox.Pass(ctx, []inbox.Entry{t.inboxEntry(current)}); err != nil {
			return &inboxFailure{fmt.Errorf("passing the watermark: %w", err)}
		}
		return checkOrphans([]task{current})
	})
}

// runHandler runs the handler in order for the messages that fresh marks as new, or for all of them if fresh is nil. It
// resets res first, because a transaction may run it again.
func (t *track) runHandler(ctx context.Context, list []task, fresh []bool, res *attemptResult) error {
	*res = attemptResult{}
	ctx = withHandlerName(ctx, t.reg.name)
	batch := &batchCollector{}
	// Has no effect if the batch ran, because its outcome is reported once.
	defer batch.reportOutcome(errBatchNotRun)

	// From here on the time is the handler's, and afterwards the commit's.
	if t.reg.mode.usesTransaction() {
		t.trouble.stopWatching()
		defer t.trouble.watchDatabase(t, maxCommitSilence)
	}
	// The inbox has responded.
	if t.reg.mode.usesInbox() {
		t.trouble.markBack(t)
	}

	began := time.Now()
	defer func() { t.lastRun = time.Since(began) }()
	mayEndEarly := t.reg.mode.usesTransaction() && t.reg.batch == nil
	for i, x := range list {
		// The server aborts long transactions, so a slow batch ends before that, and the next one is smaller.
		took := time.Since(began)
		if mayEndEarly && res.handled > 0 && took > 2*targetDuration {
			return &overrunError{after: took, handled: res.handled}
		}
		if fresh != nil && !fresh[i] {
			res.duplicates++
			continue
		}

		messageCtx := event.ContextWithCause(ctx, x.entry.m.Cause())
		if t.reg.batch != nil {
			messageCtx = context.WithValue(messageCtx, collectorKey{}, batch)
		}

		// The record could be decoded when it was first read, but not when it was fetched again.
		if x.entry.decodeErr != nil {
			return &handlerFailure{x.entry.decodeErr}
		}
		// A requeue may name any handler, and a handler may have lost a type since.
		if typ := x.entry.m.Name; !t.reg.system && !t.reg.takesType(typ) {
			return &handlerFailure{Reject(fmt.Errorf("handler %s does not take type %q: requeue the message to a handler that does", t.reg.name, typ))}
		}

		message := x.entry.m.copy()
		// The attempts of this process follow the attempts that the header counts.
		message.Attempt += x.share.attempts.Failed - x.share.attempts.Spared
		err := t.callWithTimeout(messageCtx, message, func(ctx context.Context) error { return t.reg.chained(ctx, message) })
		if err != nil {
			return t.wrapFailure(ctx, err)
		}
		res.handled++
	}
	if len(batch.messages) == 0 {
		return nil
	}

	ctx = event.ContextWithCause(ctx, causeOfBatch(batch.messages))
	err := t.callWithTimeout(ctx, batch.messages[0], func(ctx context.Context) error {
		return t.reg.batch(ctx, slices.Clip(batch.messages))
	})

	// If ctx ended, the error may come from the interruption and is not an outcome of the batch.
	if ctx.Err() == nil {
		batch.reportOutcome(err)
	}

	if err != nil {
		return t.wrapFailure(ctx, err)
	}
	return nil
}

// wrapFailure returns err as a failure of the handler. If the handler was stopped because its claim was lost, it returns a
// failure of the inbox instead.
func (t *track) wrapFailure(ctx context.Context, err error) error {
	if lost := context.Cause(ctx); errors.Is(lost, inbox.ErrClaimLost) {
		return &inboxFailure{lost}
	}
	return &handlerFailure{err}
}

// callWithTimeout calls callback with the handler's timeout. It returns a panic as an error, and an error after the timeout as
// a *timeoutError. message is the first one of the call.
func (t *track) callWithTimeout(ctx context.Context, message *Message, callback func(ctx context.Context) error) (err error) {
	defer recoverPanic(&err)
	// A handler that ignores its context blocks its lane, and returns no error that would show it.
	if t.reg.timeout > 0 {
		overdue := time.AfterFunc(t.reg.timeout+overdueAfter, func() { t.p.s.reportOverdue(t.reg, message) })
		defer overdue.Stop()
	}
	return callLimited(ctx, t.reg.timeout, "handler "+t.reg.name, callback)
}

// batchCollector collects the messages that pass the middlewares of a batch handler.
type batchCollector struct {
	messages  []*Message
	callbacks []func(err error)
}

// reportOutcome passes the outcome of the batch to the callbacks of AfterBatch. Only the first call has an effect.
func (b *batchCollector) reportOutcome(err error) {
	callbacks := b.callbacks
	b.callbacks = nil
	for _, f := range callbacks {
		f(err)
	}
}

// errBatchNotRun is the outcome of a batch that was not run.
var errBatchNotRun = Discard(errors.New("the batch was not run"))

type collectorKey struct{}

// collectMessage is the innermost handler in the chain of a batch handler. It adds the message to the batch.
func collectMessage(ctx context.Context, message *Message) error {
	collector, ok := ctx.Value(collectorKey{}).(*batchCollector)
	if !ok {
		return errors.New("consumer: a middleware replaced the context of a batch handler")
	}
	collector.messages = append(collector.messages, message)
	return nil
}

// assignBlame reports whether the message is to blame for err. If so, Retry decides about cause. Otherwise the
// cause is an unavailable database, a conflict of transactions, the claim of another member, or a partition that has
// changed. The consumer waits until these are over, and they cost no attempts.
//
// A failure of the handler is judged by the error that the handler returned. The driver may wrap it, for example as a
// timeout of the whole transaction. Such a wrapper gives no information about the message. The error may look like an
// unavailable database, but the database has responded to the consumer right before.
func (t *track) assignBlame(err error) (blamed bool, cause error) {
	failure, ofHandler := errors.AsType[*handlerFailure](err)

	// The handler has decided about the message.
	if _, asked := errors.AsType[*requestError](err); asked && ofHandler {
		return true, failure.error
	}

	// Its label would be that of a conflict with another transaction.
	if errors.Is(err, transaction.ErrDiscarded) {
		return true, err
	}

	for _, outside := range []error{outbox.ErrStandalone, inbox.ErrClaimLost, inbox.ErrInProgress, inbox.ErrStale} {
		if errors.Is(err, outside) && (!ofHandler || !errors.Is(failure.error, outside)) {
			return false, nil
		}
	}

	if ofHandler {
		return true, failure.error
	}
	if _, ok := errors.AsType[*inboxFailure](err); ok && !errors.Is(err, inbox.ErrInvalid) {
		return false, nil
	}
	return !isTransient(err), err
}
