package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// handler handles the messages of a Saga. It has a copy of its definition.
type handler[S any, I Identifier] struct {
	saga     *Saga[S, I]
	routes   map[string]route[S, I]
	notFound map[string]func(context.Context, I, *consumer.Message) error

	// failedHeld contains held messages whose step has aborted the transaction. The next attempt
	// leaves them out. The key is id/number, the value the error text.
	failedHeld sync.Map
}

// Handle runs the step for one message in a transaction. It joins the transaction of ctx, if there
// is one. It returns nil if the step dropped the message.
func (h *handler[S, I]) Handle(ctx context.Context, m *consumer.Message) error {
	err := h.handleMessage(ctx, m)
	if errors.Is(err, ErrDrop) {
		return nil
	}
	return err
}

func (h *handler[S, I]) handleMessage(ctx context.Context, m *consumer.Message) error {
	rt, ok := h.routes[m.Name]
	if !ok {
		return fmt.Errorf("saga %s: message %s of type %q: %w", h.saga.name, m.ID, m.Name, ErrUnknownMessage)
	}

	id, err := h.correlateMessage(rt, m)
	if err != nil {
		return err
	}

	// In the transaction of the caller, the policy of the caller retries conflicts.
	once := func(ctx context.Context) error { return h.handleOnce(ctx, rt, id, m) }
	reg := h.saga.reg
	switch {
	case reg.store.InTransaction(ctx):
		return h.runInTransaction(ctx, once)
	case reg.plain:
		return h.retryConflicts(ctx, once)
	}

	return h.retryConflicts(ctx, func(ctx context.Context) error { return h.runInTransaction(ctx, once) })
}

// runInTransaction runs f in the transaction of ctx, or in a new one. If f fails, the transaction
// can only roll back, so that no half of a step is committed. If f drops the message, the writes
// before that are committed.
func (h *handler[S, I]) runInTransaction(ctx context.Context, f func(context.Context) error) error {
	var dropped error
	err := h.saga.reg.store.Transaction(ctx, func(ctx context.Context) error {
		// The transaction may run again.
		dropped = nil

		err := f(ctx)
		if errors.Is(err, ErrDrop) {
			dropped = err
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}

	return dropped
}

// correlateMessage returns the id of the saga. It uses the correlation function first, and then the
// header.
func (h *handler[S, I]) correlateMessage(rt route[S, I], m *consumer.Message) (I, error) {
	id, err := rt.by(m)
	switch {
	case err == nil && !isMissingID(id):
		return id, nil
	case err != nil && !errors.Is(err, ErrNoSagaID):
		return id, fmt.Errorf("saga %s: correlating message %s of type %s: %w", h.saga.name, m.ID, m.Name, err)
	}

	missing := &CorrelationError{Saga: h.saga.name, Type: m.Name, Message: m.ID}
	text, ok := m.Header(HeaderID)
	if !ok {
		return id, missing
	}

	id, err = parseID[I](string(text))
	if err != nil {
		missing.Err = fmt.Errorf("header %s: %w", HeaderID, err)
		return id, missing
	}

	return id, nil
}

// retryConflicts runs f, and again after each conflict until the retries of the registry are used
// up.
func (h *handler[S, I]) retryConflicts(ctx context.Context, f func(context.Context) error) error {
	for _, wait := range h.saga.reg.retries {
		err := f(ctx)
		if !errors.Is(err, ErrConflict) {
			return err
		}
		if retry.Sleep(ctx, wait) != nil {
			return err
		}
	}

	return f(ctx)
}

// handleOnce loads the saga, runs the step of m and stores the result. It is one attempt.
func (h *handler[S, I]) handleOnce(ctx context.Context, rt route[S, I], id I, m *consumer.Message) error {
	rec, found, err := h.saga.reg.store.Load(ctx, h.saga.name, id)
	switch {
	case err != nil:
		return err
	case found && rec.Completed(), !found && rt.timeout != "":
		// The message comes too late.
		return nil
	case !found && rt.start == nil && !comesEarly(rt.sequence, m):
		return h.handleNotFound(ctx, id, m)
	}

	in, err := h.newInstance(rec, found, id)
	if err != nil {
		return err
	}
	if rt.timeout != "" && !in.expireTimeout(m) {
		return nil
	}

	defer in.out.endStep()

	changed, err := h.handleInstance(in.out.stepContext(ctx), in, rt, m)
	dropped := errors.Is(err, ErrDrop)
	if !changed || err != nil && !dropped {
		return err
	}
	if commitErr := in.commitStep(ctx); commitErr != nil {
		return commitErr
	}

	return err
}

// handleNotFound runs the NotFound callback for a message whose saga does not exist. Without one it
// returns a *NotFoundError.
func (h *handler[S, I]) handleNotFound(ctx context.Context, id I, m *consumer.Message) error {
	f := h.notFound[m.Name]
	if f == nil {
		f = h.notFound[""]
	}
	if f == nil {
		return &NotFoundError{Saga: h.saga.name, ID: FormatID(id), Type: m.Name, Message: m.ID}
	}

	out := &outgoing{}
	defer out.endStep()

	if err := f(out.stepContext(ctx), id, m); err != nil {
		return err
	}

	return out.appendToOutbox(ctx, h.saga.reg.outbox)
}

// handleInstance runs the step of m, and then the steps of the held messages whose turn has come.
// changed reports whether the instance must be stored.
//
// If the step drops a message in sequence, the message has had its turn: otherwise the messages
// after it would wait forever. In this case changed is true and the error is ErrDrop.
func (h *handler[S, I]) handleInstance(
	ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message,
) (changed bool, err error) {
	var number int64
	if rt.sequence != nil {
		if number, err = rt.sequence(m); err != nil {
			return false, fmt.Errorf("saga %s: the number of message %s of type %s: %w", h.saga.name, m.ID, m.Name, err)
		}
	}

	switch {
	case number <= 0 && rt.timeout != "":
		// A timeout is used up even if its step drops it.
		err = h.runStepOrUndo(ctx, in, rt, m)
		return err == nil || errors.Is(err, ErrDrop), err

	case number <= 0:
		changed, err = h.runStep(ctx, in, rt, m)
		return changed && err == nil, err

	case number <= in.doc.Sequence:
		// The message was handled before.
		return false, nil

	case number > in.doc.Sequence+1:
		changed, err = in.holdMessage(number, m)
		if err != nil || in.doc.Stuck == nil {
			return changed, err
		}

		// The step that failed before may succeed by now.
		return true, h.releaseHeld(ctx, in)
	}

	err = h.runStepOrUndo(ctx, in, rt, m)
	if err != nil && !errors.Is(err, ErrDrop) {
		return false, err
	}

	in.doc.Sequence++
	if heldErr := h.releaseHeld(ctx, in); heldErr != nil {
		return false, heldErr
	}

	return true, err
}

// releaseHeld runs the steps of the held messages whose turn has come. If such a step fails, the
// message that arrived does not fail: it and the messages before it keep their effect. The held
// message stays as in.doc.Stuck until another message of the sequence arrives, or another one with
// its number.
//
// In a transaction, an error of the server has undone everything. Then releaseHeld returns the
// error, and the next attempt leaves the held message out.
func (h *handler[S, I]) releaseHeld(ctx context.Context, in *Instance[S, I]) error {
	for !in.completed {
		next, ok := in.nextHeld()
		if !ok {
			return nil
		}

		m := (*consumer.Message)(&next.Message)
		key := fmt.Sprintf("%s/%d", in.out.id, next.Number)

		// The previous attempt has failed in this step, and its transaction was aborted.
		if reason, refused := h.failedHeld.LoadAndDelete(key); refused {
			in.doc.Stuck = &stuckMessage{Number: next.Number, Message: m.ID, Reason: reason.(string)}
			return nil
		}

		// The definition may have changed since the message was held.
		err := fmt.Errorf("type %q: %w", m.Name, ErrUnknownMessage)
		if rt, known := h.routes[m.Name]; known {
			err = h.runStepOrUndo(ctx, in, rt, m)
		}

		if err == nil || errors.Is(err, ErrDrop) {
			in.doc.Held = slices.Delete(in.doc.Held, 0, 1)
			in.doc.Sequence = next.Number
			in.doc.Stuck = nil
			continue
		}

		// These errors do not come from the step, so the whole message is handled again.
		if ctx.Err() != nil || errors.Is(err, ErrConflict) {
			return err
		}

		reason := err.Error()
		reason = reason[:min(len(reason), maxStuckReason)]
		if h.saga.reg.store.InTransaction(ctx) && isServerError(err) {
			h.failedHeld.Store(key, reason)
			return fmt.Errorf("saga %s: held message %s, number %d of %s: %w", h.saga.name, m.ID, next.Number, in.out.id, err)
		}

		in.doc.Stuck = &stuckMessage{Number: next.Number, Message: m.ID, Reason: reason}
		return nil
	}

	return nil
}

// maxStuckReason limits the stored error text of a held message, in bytes.
const maxStuckReason = 512

// isServerError reports whether err comes from a MongoDB server. Such an error aborts its
// transaction.
func isServerError(err error) bool {
	_, labeled := errors.AsType[mongo.LabeledError](err)
	_, server := errors.AsType[mongo.ServerError](err)
	return labeled || server
}

// comesEarly reports whether m must wait for earlier messages of its sequence, even if its saga
// does not exist.
func comesEarly(number Sequence, m *consumer.Message) bool {
	if number == nil {
		return false
	}

	n, err := number(m)
	return err == nil && n > 1
}

// runStepOrUndo runs the step of m. If the step fails or drops the message, the instance is
// restored.
func (h *handler[S, I]) runStepOrUndo(ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message) error {
	// A failed step may have changed a part of the instance.
	before, err := in.newSavepoint()
	if err != nil {
		return err
	}

	_, err = h.runStep(ctx, in, rt, m)
	if err != nil {
		if restoreErr := before.restoreTo(in); restoreErr != nil {
			return restoreErr
		}
	}
	return err
}

// runStep runs the callback for m. changed reports whether the instance must be stored.
func (h *handler[S, I]) runStep(
	ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message,
) (changed bool, err error) {
	f := rt.handle
	if in.doc.Waiting {
		f = rt.start
	}

	switch {
	case f != nil:
		in.doc.Waiting = false
		return true, f(ctx, in, m)
	case in.doc.Waiting:
		return false, h.handleNotFound(ctx, in.id, m)
	default:
		// Another message has started the saga before.
		return false, nil
	}
}
