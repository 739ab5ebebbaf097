package saga

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/service/sagas"
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

	// failedHeld contains held messages whose step has aborted the transaction, as failures. The key is id/number.
	failedHeld sync.Map
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
func (h *handler[S]) handleMessage(ctx context.Context, m *consumer.Message) error {
	rt, ok := h.saga.routes[m.Name]
	if !ok {
		return fmt.Errorf("saga %s: %w takes type %q", h.saga.name, consumer.ErrNoHandler, m.Name)
	}

	payload, err := rt.decodePayload(ctx, m)
	if err != nil {
		return fmt.Errorf("saga %s: %w", h.saga.name, err)
	}
	id, err := h.findID(rt, payload, m)
	if err != nil {
		return fmt.Errorf("saga %s: %w: message %s of type %s: %w", h.saga.name, consumer.ErrMalformed, m.ID, m.Name, err)
	}

	return h.box.Transaction(ctx, func(ctx context.Context) error { return h.handleOnce(ctx, rt, id, payload, m) })
}

// findID returns the id of the saga of m.
func (h *handler[S]) findID(rt *route[S], payload any, m *consumer.Message) (any, error) {
	// The function of By comes first: it selects the field that identifies the saga.
	text := ""
	if rt.id != nil {
		text = rt.id(payload)
	}
	// Messages that a saga caused carry the id in a header.
	if text == "" {
		header, _ := m.Header(HeaderID)
		text = string(header)
	}
	// Without By, the events of an aggregate belong to the saga of that aggregate.
	if text == "" && rt.id == nil {
		text = cmp.Or(m.Aggregate.ID, string(m.Key))
	}

	if text == "" {
		return nil, fmt.Errorf("%w: By found none, and there is no header %s", ErrNoID, HeaderID)
	}
	return sagas.ParseID(h.saga.settings.ids, text)
}

// handleOnce loads the saga, runs the step of m and stores the result. It is one attempt.
func (h *handler[S]) handleOnce(ctx context.Context, rt *route[S], id, payload any, m *consumer.Message) error {
	rec, found, err := h.store.Load(ctx, h.saga.name, id)
	switch {
	case err != nil:
		return err
	case found && rec.Completed(), !found && rt.timeout != "":
		// The message comes too late.
		return nil
	case !found && rt.start == nil && rt.numberOf(payload) <= 1:
		return h.handleMissing(ctx, rt, id, payload, m)
	}

	in, err := h.newInstance(rec, found, id)
	if err != nil {
		return err
	}
	if rt.timeout != "" && !in.expireTimeout(m) {
		return nil
	}

	changed, err := h.handleInstance(ctx, in, rt, payload, m)
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
func (h *handler[S]) handleMissing(ctx context.Context, rt *route[S], id, payload any, m *consumer.Message) error {
	text := sagas.FormatID(id)
	if rt.missing != nil {
		return rt.missing(ctx, text, payload)
	}
	return fmt.Errorf("%w: %s %s for message %s of type %s, which does not start a saga; "+
		"if this can happen, define a callback with Missing", ErrNotFound, h.saga.name, text, m.ID, m.Name)
}

// handleInstance runs the step of m, and then the steps of the held messages whose turn has come.
// changed reports whether the instance must be stored.
func (h *handler[S]) handleInstance(
	ctx context.Context, in *Instance[S], rt *route[S], payload any, m *consumer.Message,
) (changed bool, err error) {
	number := rt.numberOf(payload)
	switch {
	case number <= 0:
		return h.runStep(ctx, in, rt, payload, m)

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

	// From here on, the message has the next number of its sequence.
	if _, err = h.runStep(ctx, in, rt, payload, m); err != nil {
		return false, err
	}

	in.doc.Sequence++
	return true, h.releaseHeld(ctx, in)
}

// releaseHeld runs the steps of the held messages whose turn has come. If such a step fails, the
// message that arrived does not fail: it and the messages before it keep their effect. The held
// message stays as in.doc.Stuck until another message of the sequence arrives, or another one with
// its number.
//
// An error of the server has undone the whole transaction. Then releaseHeld returns the error, and
// the next attempt leaves the held message out. A transient error, for example a write conflict, says
// nothing about the message, so only maxTransient of them in a row do the same.
func (h *handler[S]) releaseHeld(ctx context.Context, in *Instance[S]) error {
	for !in.completed {
		next, ok := in.nextHeld()
		if !ok {
			return nil
		}

		m := (*consumer.Message)(&next.Message)
		key := fmt.Sprintf("%s/%d", in.ID(), next.Number)

		// The previous attempt has failed in this step, and its transaction was aborted.
		before, _ := h.failedHeld.LoadAndDelete(key)
		failed, _ := before.(failures)
		if failed.decided() {
			in.doc.Stuck = &stuckMessage{Number: next.Number, Message: m.ID, Reason: failed.reason}
			return nil
		}

		err := h.runHeld(ctx, in, m)
		if err == nil {
			in.doc.Held = slices.Delete(in.doc.Held, 0, 1)
			in.doc.Sequence = next.Number
			in.doc.Stuck = nil
			continue
		}

		// These errors do not come from the step, so the whole message is handled again.
		if ctx.Err() != nil || errors.Is(err, ErrConflict) {
			return err
		}

		reason := record.Clip(err.Error(), maxStuckReason)
		if isServerError(err) {
			h.failedHeld.Store(key, failed.add(err, reason))
			return fmt.Errorf("saga %s: held message %s, number %d of %s: %w", h.saga.name, m.ID, next.Number, in.ID(), err)
		}

		in.doc.Stuck = &stuckMessage{Number: next.Number, Message: m.ID, Reason: reason}
		return nil
	}

	return nil
}

const (
	// maxStuckReason limits the stored error text of a held message, in bytes.
	maxStuckReason = 512
	// maxTransient is how many transient errors in a row leave a held message out. Without a limit, a step that never fits
	// into the lifetime of a transaction would fail the messages before it forever.
	maxTransient = 10
)

// failures describes the attempts at a held message that have aborted their transactions.
type failures struct {
	transient int    // in a row
	permanent bool   // the last error was not transient
	reason    string // of the last one
}

// add returns f with one more error of the server.
func (f failures) add(err error, reason string) failures {
	f.permanent, f.reason = !isTransient(err), reason
	f.transient++
	return f
}

// decided reports whether the next attempt leaves the message out.
func (f failures) decided() bool { return f.permanent || f.transient >= maxTransient }

// isServerError reports whether err comes from a MongoDB server, or from the connection to it. Such an error aborts its
// transaction.
func isServerError(err error) bool {
	_, labeled := errors.AsType[mongo.LabeledError](err)
	_, server := errors.AsType[mongo.ServerError](err)
	return labeled || server || isTransient(err)
}

// isTransient reports whether the same transaction may succeed when it runs again.
func isTransient(err error) bool {
	labeled, ok := errors.AsType[mongo.LabeledError](err)
	return ok && labeled.HasErrorLabel("TransientTransactionError") || mongodb.IsDriverTimeout(err) || mongodb.IsConnectionLost(err)
}

// runHeld runs the step of a held message. If the step fails, the instance is restored.
func (h *handler[S]) runHeld(ctx context.Context, in *Instance[S], m *consumer.Message) error {
	// The definition may have changed since the message was held.
	rt, ok := h.saga.routes[m.Name]
	if !ok {
		return fmt.Errorf("%w takes type %q", consumer.ErrNoHandler, m.Name)
	}
	payload, err := rt.decodePayload(ctx, m)
	if err != nil {
		return err
	}

	// A failed step may have changed a part of the instance.
	before, err := in.newSavepoint()
	if err != nil {
		return err
	}
	if _, err = h.runStep(ctx, in, rt, payload, m); err != nil {
		return errors.Join(err, before.restoreTo(in))
	}
	return nil
}

// runStep runs the step for m. changed reports whether the instance must be stored.
func (h *handler[S]) runStep(
	ctx context.Context, in *Instance[S], rt *route[S], payload any, m *consumer.Message,
) (changed bool, err error) {
	step := rt.on
	if in.doc.Waiting {
		step = rt.start
	}

	switch {
	case step != nil:
		in.doc.Waiting = false
		in.message = m
		err := errors.Join(step(ctx, in, payload), errors.Join(in.problems...))
		in.problems = nil
		return err == nil, err
	case in.doc.Waiting:
		return false, h.handleMissing(ctx, rt, in.id, payload, m)
	default:
		// Another message has started the saga before.
		return false, nil
	}
}
