package saga

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// handler handles the messages of a Saga.
type handler[S any] struct {
	saga  *Saga[S]
	box   *outbox.Box
	store sagas.Store

	preparing sync.Mutex // held by prepare
	prepared  atomic.Bool

	failedHeld failedSteps
}

// prepare creates the collection of the saga and stores its type, once.
func (h *handler[S]) prepare(ctx context.Context) error {
	if h.prepared.Load() {
		return nil
	}

	// Concurrent first messages wait for one of them. If each created the index, it would wait for the steps of the others.
	h.preparing.Lock()
	defer h.preparing.Unlock()
	if h.prepared.Load() {
		return nil
	}

	want := sagas.Type{Name: h.saga.name, Owner: h.saga.settings.owner, ID: h.saga.settings.ids}
	// A transaction cannot create indexes.
	found, err := h.store.Prepare(outbox.Outside(ctx), want)
	if errors.Is(err, sagas.ErrOccupied) {
		err = fmt.Errorf("%w: %w", ErrDefinition, err)
	}
	if err == nil && found != want {
		return fmt.Errorf("%w: collection %s contains sagas of %s with %s ids, but this program defines it for %s with %s ids; "+
			"choose another name, or if both are the same saga, set WithOwner(%q)",
			ErrDefinition, want.Name, found.Owner, found.ID, want.Owner, want.ID, found.Owner)
	}

	// After an error, the next message prepares again.
	h.prepared.Store(err == nil)
	return err
}

// handleMessage runs the step for one message. If ctx has a transaction, the step joins it. If the step fails, that
// transaction can only roll back, so that no half of a step is committed.
func (h *handler[S]) handleMessage(ctx context.Context, message *consumer.Message) error {
	rt, ok := h.saga.routes[message.Name]
	if !ok {
		return fmt.Errorf("saga %s: %w takes type %q", h.saga.name, consumer.ErrNoHandler, message.Name)
	}

	payload, err := rt.decodePayload(ctx, message)
	if err != nil {
		return fmt.Errorf("saga %s: %w", h.saga.name, err)
	}
	id, err := h.findID(rt, payload, message)
	if err != nil {
		return fmt.Errorf("saga %s: %w: message %s of type %s: %w", h.saga.name, consumer.ErrMalformed, message.ID, message.Name, err)
	}

	return h.box.Transaction(ctx, func(ctx context.Context) error { return h.handleOnce(ctx, rt, id, payload, message) })
}

// findID returns the id of the saga of message.
func (h *handler[S]) findID(rt *route[S], payload any, message *consumer.Message) (any, error) {
	// The function of By comes first: it selects the field that identifies the saga.
	text := ""
	if rt.id != nil {
		text = rt.id(payload)
	}
	// Messages that a saga caused carry the id in a header.
	if text == "" {
		header, _ := message.Header(HeaderID)
		text = string(header)
	}
	// Without By, the events of an aggregate belong to the saga of that aggregate.
	if text == "" && rt.id == nil {
		text = cmp.Or(message.Aggregate.ID, string(message.Key))
	}

	if text == "" {
		return nil, fmt.Errorf("%w: By found none, and there is no header %s", ErrNoID, HeaderID)
	}
	return sagas.ParseID(h.saga.settings.ids, text)
}

// handleOnce loads the saga, runs the step of message and stores the result. It is one attempt.
func (h *handler[S]) handleOnce(ctx context.Context, rt *route[S], id, payload any, message *consumer.Message) error {
	rec, found, err := h.store.Load(ctx, h.saga.name, id)
	switch {
	case err != nil:
		return err
	case found && rec.Completed(), !found && rt.timeout != "":
		// The message comes too late.
		return nil
	case !found && rt.start == nil && rt.numberOf(payload) <= 1:
		return h.handleMissing(ctx, rt, id, payload, message)
	}

	in, err := h.newInstance(rec, found, id)
	if err != nil {
		return err
	}
	if rt.timeout != "" && !in.expireTimeout(message) {
		return nil
	}

	changed, err := h.handleInstance(ctx, in, rt, payload, message)
	if !changed || err != nil {
		return err
	}
	return in.commitStep(ctx)
}

// numberOf returns the number of a message in its sequence, or 0.
func (r *route[S]) numberOf(payload any) int64 {
	if r.number == nil {
		return 0
	}
	return r.number(payload)
}

// handleMissing runs the callback of Missing for a message whose saga does not exist. Without one it returns ErrNotFound.
func (h *handler[S]) handleMissing(ctx context.Context, rt *route[S], id, payload any, message *consumer.Message) error {
	text := sagas.FormatID(id)
	if rt.missing != nil {
		return rt.missing(ctx, text, payload)
	}
	return fmt.Errorf("%w: %s %s for message %s of type %s, which does not start a saga; "+
		"if this can happen, define a callback with Missing", ErrNotFound, h.saga.name, text, message.ID, message.Name)
}

// handleInstance runs the step of message, and then the steps of the held messages whose turn has come.
// changed reports whether the instance must be stored.
func (h *handler[S]) handleInstance(
	ctx context.Context, instance *Instance[S], rt *route[S], payload any, message *consumer.Message,
) (changed bool, err error) {
	number := rt.numberOf(payload)
	switch {
	case number <= 0:
		return h.runStep(ctx, instance, rt, payload, message)

	case number <= instance.doc.Sequence:
		// The message was handled before.
		return false, nil

	case number > instance.doc.Sequence+1:
		changed, err = instance.holdMessage(number, message)
		if err != nil || instance.doc.Stuck == nil {
			return changed, err
		}

		// The step that failed before may succeed by now.
		return true, h.releaseHeld(ctx, instance, message)
	}

	// From here on, the message has the next number of its sequence.
	if _, err = h.runStep(ctx, instance, rt, payload, message); err != nil {
		return false, err
	}

	instance.doc.Sequence++
	return true, h.releaseHeld(ctx, instance, message)
}

// releaseHeld runs the steps of the held messages whose turn has come. If such a step fails, the message that arrived does not
// fail: it and the messages before it keep their effect. The held message stays as in.doc.Stuck until another message of the
// sequence arrives, or another one with its number.
//
// The failed step may have written in the transaction, so releaseHeld returns an error with which the transaction runs again, and
// leaves the held message out then. A transient error, for example a write conflict, does not come from the message, so only
// maxTransient of them do the same.
func (h *handler[S]) releaseHeld(ctx context.Context, instance *Instance[S], arrived *consumer.Message) error {
	for !instance.completed {
		next, ok := instance.nextHeld()
		if !ok {
			return nil
		}

		message := (*consumer.Message)(&next.Message)
		key := heldKey{instance.ID(), next.Number, arrived.Source, arrived.ID}

		// A previous run has failed in this step, and its transaction was aborted.
		failed := h.failedHeld.get(key)
		if failed.decided() {
			instance.doc.Stuck = &stuckMessage{Number: next.Number, Message: message.ID, Reason: failed.reason}
			return nil
		}

		if err := h.runHeld(ctx, instance, message); err != nil {
			// These errors do not come from the step, so the whole message is handled again.
			if errors.Is(ctx.Err(), context.Canceled) || errors.Is(err, ErrConflict) || errors.Is(err, codec.ErrUnavailable) {
				return err
			}
			h.failedHeld.put(key, failed.add(ctx, err))
			return &heldError{fmt.Errorf("saga %s: held message %s, number %d of %s: %w", h.saga.name, message.ID, next.Number, instance.ID(), err)}
		}

		instance.doc.Held = slices.Delete(instance.doc.Held, 0, 1)
		instance.doc.Sequence = next.Number
		instance.doc.Stuck = nil
	}

	return nil
}

// runHeld runs the step of a held message. A panic is an error too, because it would be that of the message that arrived.
func (h *handler[S]) runHeld(ctx context.Context, instance *Instance[S], message *consumer.Message) (err error) {
	defer func() {
		if panicked := recover(); panicked != nil {
			err = fmt.Errorf("panic: %v\n%s", panicked, debug.Stack())
		}
	}()

	// The definition may have changed since the message was held.
	rt, ok := h.saga.routes[message.Name]
	if !ok {
		return fmt.Errorf("%w takes type %q", consumer.ErrNoHandler, message.Name)
	}
	payload, err := rt.decodePayload(ctx, message)
	if err != nil {
		return err
	}
	if _, err = h.runStep(ctx, instance, rt, payload, message); err != nil {
		return err
	}
	// A step may discard the error of a joined transaction. The commit would fail with it.
	return outbox.CheckTransaction(ctx)
}

// runStep runs the step for message. changed reports whether the instance must be stored.
func (h *handler[S]) runStep(
	ctx context.Context, instance *Instance[S], rt *route[S], payload any, message *consumer.Message,
) (changed bool, err error) {
	step := rt.on
	if instance.doc.Waiting {
		step = rt.start
	}

	switch {
	case step != nil:
		instance.doc.Waiting = false
		instance.message = message
		err := errors.Join(step(ctx, instance, payload), errors.Join(instance.problems...))
		instance.problems = nil
		return err == nil, err
	case instance.doc.Waiting:
		return false, h.handleMissing(ctx, rt, instance.id, payload, message)
	default:
		// Another message has started the saga before.
		return false, nil
	}
}
