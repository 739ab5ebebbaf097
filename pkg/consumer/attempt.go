package consumer

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// attemptResult is what became of the messages of one attempt.
type attemptResult struct {
	handled, duplicates, dropped int
	took                         time.Duration
}

// handlerFailure is a failure of the handler, as opposed to one of the inbox or the transaction.
type handlerFailure struct{ error }

func (e *handlerFailure) Unwrap() error { return e.error }

// inboxFailure is a failure of the inbox.
type inboxFailure struct{ error }

func (e *inboxFailure) Unwrap() error { return e.error }

// TimeoutError says that a handler took longer than its Timeout.
type TimeoutError struct {
	Handler string
	After   time.Duration
	Err     error // what it returned then
}

func (e *TimeoutError) Error() string {
	return fmt.Sprintf("handler %s did not end within %v: %v", e.Handler, e.After, e.Err)
}

// Unwrap is context.DeadlineExceeded and what the handler returned. That says nothing about the database: Transient does not
// match it.
func (e *TimeoutError) Unwrap() []error { return []error{context.DeadlineExceeded, e.Err} }

// recoverPanic turns a panic into an error.
func recoverPanic(err *error) {
	if v := recover(); v != nil {
		*err = &PanicError{Value: v, Stack: debug.Stack()}
	}
}

// errOrphan says that a message is of a topic that was created anew since it was read.
var errOrphan = errors.New("the topic was created anew")

// attemptTasks handles the messages once, by the handler's mode. A *taskError is the handler's own failure.
func (t *track) attemptTasks(list []task) (res attemptResult, err error) {
	if t.reg.system {
		return res, &handlerFailure{t.noHandlerCause(list[0])}
	}
	defer recoverPanic(&err)
	for _, x := range list {
		if x.entry.orphan.Load() {
			return res, errOrphan
		}
	}
	ctx := t.contextOf()
	if t.transactional() {
		t.trouble.awaits(t, silence)
		defer t.trouble.answered()
	}
	if t.reg.mode != inbox.None {
		if err := t.p.attachHandler(ctx, t.reg); err != nil {
			return res, err
		}
	}
	if trace := t.p.s.c.s.trace; trace != nil {
		within, end, broken := startTrace(ctx, trace, t.reg.name, messagesOf(list))
		if broken != nil {
			return res, &handlerFailure{broken}
		}
		ctx = within
		defer func() { t.endTrace(end, err) }()
	}
	began := time.Now()
	err = t.handleByMode(ctx, list, &res)
	res.took = time.Since(began)
	return res, err
}

// handleByMode does it by the handler's mode. A panic is an error: inbox and transactions may be a user's too.
func (t *track) handleByMode(ctx context.Context, list []task, res *attemptResult) (err error) {
	defer recoverPanic(&err)
	switch {
	case t.reg.mode == inbox.Eager:
		return t.handleEager(ctx, list[0], res)
	case t.reg.mode == inbox.Optimistic:
		return t.handleOptimistic(ctx, list, res)
	case t.reg.inTx:
		return t.runTransaction(ctx, list, func(ctx context.Context) error { return t.runHandler(ctx, list, nil, res) })
	}
	return t.runHandler(ctx, list, nil, res)
}

// runTransaction runs f in a transaction. The driver runs f again after a transient failure, for up to two minutes. That ends at
// once if the server aborted a transaction that was open for long or had several messages: the same messages would take as
// long again.
func (t *track) runTransaction(ctx context.Context, list []task, f func(ctx context.Context) error) error {
	began := time.Now()
	ran, last := false, error(nil)
	gaveUp := func(cause error) bool { return expired(cause) && (len(list) > 1 || t.handlerRanLong()) }

	err := t.p.s.transact(ctx, func(ctx context.Context) error {
		// If the last run had no error, its commit failed, and only the driver has the cause. Fewer messages take less
		// time, so for several of them all runs count together.
		refused := last == nil && (t.handlerRanLong() || len(list) > 1 && time.Since(began) > span/2)
		if ran && (refused || gaveUp(last)) {
			return &overrunError{after: time.Since(began), err: last}
		}
		t.ran = 0
		ran, last = true, f(ctx)
		return last
	})

	// The driver does not run f again, and returns the cause, if that took longer than its own limit.
	if _, known := errors.AsType[*overrunError](err); !known && len(list) == 1 && gaveUp(err) {
		return &overrunError{after: time.Since(began), err: err}
	}
	return err
}

// handlerRanLong reports whether the handler was the larger part of a long transaction.
func (t *track) handlerRanLong() bool { return t.ran > span/2 }

// endTrace calls the end of a trace. A panic there is reported, and changes nothing of what became of the messages.
func (t *track) endTrace(end func(error), outcome error) {
	var broken error
	func() {
		defer recoverPanic(&broken)
		end(outcome)
	}()
	if broken != nil {
		t.p.s.report(fmt.Errorf("ending the trace of handler %s: %w", t.reg.name, broken))
	}
}

// startTrace calls a tracer, which is a user's.
func startTrace(ctx context.Context, trace Tracer, handler string, ms []*Message) (_ context.Context, end func(error), err error) {
	defer recoverPanic(&err)
	ctx, end = trace(ctx, handler, ms)
	if ctx == nil || end == nil {
		return nil, nil, errors.New("the tracer returned nil")
	}
	return ctx, end, nil
}

// noHandlerCause is why nobody handles the message.
func (t *track) noHandlerCause(x task) error {
	if x.entry.cause != nil {
		return x.entry.cause
	}
	return fmt.Errorf("%w takes type %q: register one, or say AckUnknown", ErrNoHandler, x.entry.m.Type)
}

func messagesOf(list []task) []*Message {
	out := make([]*Message, len(list))
	for i, x := range list {
		out[i] = x.entry.m
	}
	return out
}

// handleOptimistic marks and handles in one transaction.
func (t *track) handleOptimistic(ctx context.Context, list []task, res *attemptResult) error {
	entries := make([]inbox.Entry, len(list))
	for i, x := range list {
		entries[i] = t.inboxEntry(x)
	}
	return t.runTransaction(ctx, list, func(ctx context.Context) error {
		ctx = inbox.Remember(ctx)
		fresh, err := t.p.s.inbox.Admit(ctx, entries)
		if err != nil {
			return &inboxFailure{fmt.Errorf("admitting %d messages to the inbox: %w", len(entries), err)}
		}
		return t.runHandler(ctx, list, fresh, res)
	})
}

// handleEager claims the message, and handles it in a transaction that turns the claim into the mark.
func (t *track) handleEager(ctx context.Context, x task, res *attemptResult) error {
	s := t.p.s
	claim, err := s.claimMessage(ctx, t.inboxEntry(x))
	if errors.Is(err, inbox.ErrDuplicate) {
		*res = attemptResult{duplicates: 1}
		return s.passWatermark(ctx, t.inboxEntry(x))
	}
	if err != nil {
		return &inboxFailure{fmt.Errorf("claiming a message: %w", err)}
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
		defer cancel()
		if err := claim.Release(ctx); err != nil {
			s.report(fmt.Errorf("releasing the claim of message %s: %w", x.entry.m.ID, err))
		}
	}()
	return claim.Hold(ctx, func(ctx context.Context) error {
		return t.runTransaction(ctx, []task{x}, func(ctx context.Context) error {
			if err := t.runHandler(ctx, []task{x}, nil, res); err != nil {
				return err
			}
			if err := claim.Handled(ctx); err != nil {
				return &inboxFailure{fmt.Errorf("marking a message as handled: %w", err)}
			}
			return nil
		})
	})
}

// claimMessage takes a message. It is not cut off by the end of a drain: a claim that was taken without our knowing would keep
// everybody from the message until its lease is over.
func (s *session) claimMessage(ctx context.Context, e inbox.Entry) (inbox.Claim, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	return s.inbox.Claim(ctx, e, 0)
}

// passWatermark moves a watermark.
func (s *session) passWatermark(ctx context.Context, e inbox.Entry) error {
	if err := s.inbox.Pass(ctx, []inbox.Entry{e}); err != nil {
		return &inboxFailure{fmt.Errorf("passing the watermark: %w", err)}
	}
	return nil
}

// runHandler runs the handler for those that are fresh (nil: all), in order. It counts anew: a transaction may run it again.
func (t *track) runHandler(ctx context.Context, list []task, fresh []bool, res *attemptResult) error {
	*res = attemptResult{}
	ctx = withHandlerName(ctx, t.reg.name)
	batch := &batchCollector{}
	defer batch.reportOutcome(ErrDrop) // unless the batch was run

	if t.transactional() { // what takes long from here on is the handler, and behind it the commit
		t.trouble.answered()
		defer t.trouble.awaits(t, commitSilence)
	}

	began := time.Now()
	defer func() { t.ran = time.Since(began) }()
	for i, x := range list {
		if n := res.handled + res.dropped; n > 0 && t.transactional() && t.reg.batched == nil && time.Since(began) > 2*span {
			return &overrunError{after: time.Since(began), handled: n}
		}
		if fresh != nil && !fresh[i] {
			res.duplicates++
			continue
		}
		on := ctx
		if t.reg.batched != nil {
			on = context.WithValue(ctx, collectorKey{}, batch)
		}
		if x.entry.cause != nil { // it could be decoded when it was read at first
			return &handlerFailure{x.entry.cause}
		}
		m := x.entry.m.Copy()
		m.Attempt += x.part.at.Failed - x.part.at.Spared
		err := t.callWithTimeout(on, func(ctx context.Context) error { return t.reg.chained.Handle(ctx, m) })
		switch {
		case err == nil:
			res.handled++
		case errors.Is(err, ErrDrop):
			res.dropped++
		default:
			return t.wrapFailure(ctx, err)
		}
	}
	if len(batch.messages) == 0 {
		return nil
	}
	err := t.callWithTimeout(ctx, func(ctx context.Context) error { return t.reg.batched(ctx, slices.Clip(batch.messages)) })
	if ctx.Err() == nil { // else it was told to stop, which says nothing
		batch.reportOutcome(err)
	}
	switch {
	case err == nil:
	case errors.Is(err, ErrDrop):
		res.dropped, res.handled = res.dropped+res.handled, 0
	default:
		return t.wrapFailure(ctx, err)
	}
	return nil
}

// wrapFailure is a failure of the handler, unless the handler was cut off because its claim was lost.
func (t *track) wrapFailure(ctx context.Context, err error) error {
	if lost := context.Cause(ctx); errors.Is(lost, inbox.ErrClaimLost) {
		return &inboxFailure{lost}
	}
	return &handlerFailure{err}
}

// callWithTimeout calls f within the handler's time, and turns a panic into an error.
func (t *track) callWithTimeout(ctx context.Context, f func(ctx context.Context) error) (err error) {
	within, cancel := context.WithTimeout(ctx, t.reg.timeout)
	defer cancel()
	defer recoverPanic(&err)
	err = f(within)
	if err != nil && within.Err() != nil && ctx.Err() == nil && !errors.Is(err, ErrDrop) {
		err = &TimeoutError{Handler: t.reg.name, After: t.reg.timeout, Err: err}
	}
	return err
}

// batchCollector gathers what middleware lets through to a batch handler.
type batchCollector struct {
	messages  []*Message
	callbacks []func(err error)
}

// reportOutcome hands the outcome of the batch to those who asked for it, once.
func (b *batchCollector) reportOutcome(err error) {
	after := b.callbacks
	b.callbacks = nil
	for _, f := range after {
		f(err)
	}
}

// AfterBatch lets a middleware of a batch handler see what becomes of the batch: f is called, once and before the
// transaction is committed, with the outcome of the batch that the message is part of, or with ErrDrop if the batch was
// never run. A middleware runs for each message on its way into the batch, so its next handler has returned by then. It
// returns false, and f is never called, if ctx is not that of a batch handler.
func AfterBatch(ctx context.Context, f func(err error)) bool {
	b, ok := ctx.Value(collectorKey{}).(*batchCollector)
	if ok {
		b.callbacks = append(b.callbacks, f)
	}
	return ok
}

type collectorKey struct{}

// collectMessage is the innermost handler of a batch handler's chain.
func collectMessage(ctx context.Context, m *Message) error {
	b, ok := ctx.Value(collectorKey{}).(*batchCollector)
	if !ok {
		return errors.New("consumer: a middleware replaced the context of a batch handler")
	}
	b.messages = append(b.messages, m)
	return nil
}

// assignBlame tells a failure that the policy decides about from trouble that the message is not to blame for: the database away,
// transactions that met, somebody else's claim, a partition that has changed. Trouble costs no attempts and is waited out.
//
// A handler's failure is judged by what the handler returned. What the driver makes of that around it, as the time-out of the
// whole transaction, says nothing about the message.
func (t *track) assignBlame(err error) (blamed bool, cause error) {
	failed, ofHandler := errors.AsType[*handlerFailure](err)
	for _, trouble := range []error{outbox.ErrStandalone, inbox.ErrClaimLost, inbox.ErrClaimed, inbox.ErrStale} {
		if errors.Is(err, trouble) && (!ofHandler || !errors.Is(failed.error, trouble)) {
			return false, nil
		}
	}
	if ofHandler {
		return !t.transactional() || !transient(failed.error), failed.error
	}
	if _, ok := errors.AsType[*inboxFailure](err); ok && !errors.Is(err, inbox.ErrInvalid) {
		return false, nil
	}
	return !transient(err), err
}
