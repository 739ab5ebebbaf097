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

// handler is a Saga that was defined.
type handler[S any, I Identifier] struct {
	saga     *Saga[S, I]
	routes   map[string]route[S, I]
	notFound map[string]func(context.Context, I, *consumer.Message) error
	refused  sync.Map // held messages that the next attempt does without: id/number to the reason
}

// Handle takes one message through its step.
func (h *handler[S, I]) Handle(ctx context.Context, m *consumer.Message) error {
	rt, ok := h.routes[m.Type]
	if !ok {
		return fmt.Errorf("saga %s: message %s of type %q: %w", h.saga.name, m.ID, m.Type, ErrUnknownMessage)
	}
	id, err := h.correlate(rt, m)
	if err != nil {
		return err
	}
	once := func(ctx context.Context) error { return h.once(ctx, rt, id, m) }
	reg := h.saga.reg
	switch {
	case reg.store.InTransaction(ctx):
		return h.inTransaction(ctx, once)
	case reg.plain:
		return h.repeat(ctx, once)
	}
	return h.repeat(ctx, func(ctx context.Context) error { return h.inTransaction(ctx, once) })
}

// inTransaction runs f in a transaction of its own, or joins that of ctx: then a step that failed halfway makes it
// rollback-only, so that nobody commits the half. A dropped message fails nothing: what was written until then stays.
func (h *handler[S, I]) inTransaction(ctx context.Context, f func(context.Context) error) error {
	var dropped error
	err := h.saga.reg.store.Transaction(ctx, func(ctx context.Context) error {
		dropped = nil
		err := f(ctx)
		if errors.Is(err, consumer.ErrDrop) {
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

// correlate asks the function, then the header.
func (h *handler[S, I]) correlate(rt route[S, I], m *consumer.Message) (I, error) {
	id, err := rt.by(m)
	switch {
	case err == nil && !missing(id):
		return id, nil
	case err != nil && !errors.Is(err, ErrNoSagaID):
		return id, fmt.Errorf("saga %s: which one message %s of type %s is for: %w", h.saga.name, m.ID, m.Type, err)
	}
	none := &CorrelationError{Saga: h.saga.name, Type: m.Type, Message: m.ID}
	text, ok := m.Header(HeaderID)
	if !ok {
		return id, none
	}
	id, err = parseID[I](string(text))
	if err != nil {
		none.Err = fmt.Errorf("header %s: %w", HeaderID, err)
		return id, none
	}
	return id, nil
}

// repeat runs f again after a conflict, as often as there are waits.
func (h *handler[S, I]) repeat(ctx context.Context, f func(context.Context) error) error {
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

// once loads the saga, takes the message and saves.
func (h *handler[S, I]) once(ctx context.Context, rt route[S, I], id I, m *consumer.Message) error {
	rec, found, err := h.saga.reg.store.Load(ctx, h.saga.name, id)
	switch {
	case err != nil:
		return err
	case found && rec.Completed(), !found && rt.timeout != "":
		return nil // late
	case !found && rt.start == nil && !early(rt.sequence, m):
		return h.missing(ctx, id, m)
	}
	in, err := h.instance(rec, found, id)
	if err != nil {
		return err
	}
	if rt.timeout != "" && !in.expire(m) {
		return nil
	}
	defer in.out.end()
	changed, err := h.take(in.out.context(ctx), in, rt, m)
	if !changed || err != nil && !errors.Is(err, consumer.ErrDrop) {
		return err
	}
	if failed := in.commit(ctx); failed != nil {
		return failed
	}
	return err
}

// missing is what becomes of a message for a saga that is not there.
func (h *handler[S, I]) missing(ctx context.Context, id I, m *consumer.Message) error {
	f := h.notFound[m.Type]
	if f == nil {
		f = h.notFound[""]
	}
	if f == nil {
		return &NotFoundError{Saga: h.saga.name, ID: FormatID(id), Type: m.Type, Message: m.ID}
	}
	out := &outgoing{}
	defer out.end()
	if err := f(out.context(ctx), id, m); err != nil {
		return err
	}
	return out.flush(ctx, h.saga.reg.outbox)
}

// take runs the step of m, and after it those of held messages whose turn has come. It reports whether there is something
// to save. A message in sequence that its step drops has had its turn all the same, else those behind it would wait for
// ever: then there is something to save beside consumer.ErrDrop.
func (h *handler[S, I]) take(ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message) (changed bool, err error) {
	var n int64
	if rt.sequence != nil {
		if n, err = rt.sequence(m); err != nil {
			return false, fmt.Errorf("saga %s: the number of message %s of type %s: %w", h.saga.name, m.ID, m.Type, err)
		}
	}
	switch {
	case n <= 0 && rt.timeout != "":
		// A timeout that its step drops has come all the same.
		err = h.undone(ctx, in, rt, m)
		return err == nil || errors.Is(err, consumer.ErrDrop), err
	case n <= 0:
		changed, err = h.step(ctx, in, rt, m)
		return changed && err == nil, err
	case n <= in.doc.Sequence:
		return false, nil // handled before
	case n > in.doc.Sequence+1:
		changed, err = in.hold(n, m)
		if err != nil || in.doc.Stuck == nil {
			return changed, err
		}
		return true, h.releaseHeld(ctx, in) // perhaps it succeeds by now
	}
	err = h.undone(ctx, in, rt, m)
	if err != nil && !errors.Is(err, consumer.ErrDrop) {
		return false, err
	}
	in.doc.Sequence++
	if failed := h.releaseHeld(ctx, in); failed != nil {
		return false, failed
	}
	return true, err
}

// releaseHeld runs the steps of the held messages whose turn has come. A step that fails is no failure of the message that
// came: that one and those before keep their effect, and the held one stays, as Stuck, until another message of the sequence
// comes or another one with its number.
//
// In a transaction an error of the server has undone everything. It is returned, and the attempt that follows does without
// the held message.
func (h *handler[S, I]) releaseHeld(ctx context.Context, in *Instance[S, I]) error {
	for !in.completed {
		next, ok := in.next()
		if !ok {
			return nil
		}
		m := next.Message.restore()
		key := fmt.Sprintf("%s/%d", in.out.id, next.Number)
		if reason, refused := h.refused.LoadAndDelete(key); refused {
			in.doc.Stuck = &stuck{Number: next.Number, Message: m.ID, Reason: reason.(string)}
			return nil
		}

		err := fmt.Errorf("type %q: %w", m.Type, ErrUnknownMessage)
		if rt, known := h.routes[m.Type]; known {
			err = h.undone(ctx, in, rt, m)
		}
		if err != nil && !errors.Is(err, consumer.ErrDrop) {
			if ctx.Err() != nil || errors.Is(err, ErrConflict) {
				return err
			}
			reason := err.Error()
			if reason = reason[:min(len(reason), maxStuckReason)]; h.saga.reg.store.InTransaction(ctx) && ofServer(err) {
				h.refused.Store(key, reason)
				return fmt.Errorf("saga %s: held message %s, number %d of %s: %w", h.saga.name, m.ID, next.Number, in.out.id, err)
			}
			in.doc.Stuck = &stuck{Number: next.Number, Message: m.ID, Reason: reason}
			return nil
		}
		in.doc.Held = slices.Delete(in.doc.Held, 0, 1)
		in.doc.Sequence, in.doc.Stuck = next.Number, nil
	}
	return nil
}

// maxStuckReason bounds what a saga keeps of the error of a held message, in bytes.
const maxStuckReason = 512

// ofServer reports whether err is of a MongoDB server, which ends the transaction it is in.
func ofServer(err error) bool {
	_, labeled := errors.AsType[mongo.LabeledError](err)
	_, server := errors.AsType[mongo.ServerError](err)
	return labeled || server
}

// early reports whether a message waits for others of its sequence whatever there is of the saga.
func early(number Sequence, m *consumer.Message) bool {
	if number == nil {
		return false
	}
	n, err := number(m)
	return err == nil && n > 1
}

// undone is step, and leaves the saga as it was before if the message fails or is dropped.
func (h *handler[S, I]) undone(ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message) error {
	before, err := in.savepoint()
	if err != nil {
		return err
	}
	_, err = h.step(ctx, in, rt, m)
	if err != nil {
		if failed := before.restore(in); failed != nil {
			return failed
		}
	}
	return err
}

// step runs the callback of one message.
func (h *handler[S, I]) step(ctx context.Context, in *Instance[S, I], rt route[S, I], m *consumer.Message) (changed bool, err error) {
	f := rt.handle
	if in.doc.Waiting {
		f = rt.start
	}
	switch {
	case f != nil:
		in.doc.Waiting = false
		return true, f(ctx, in, m)
	case in.doc.Waiting:
		return false, h.missing(ctx, in.id, m)
	}
	return false, nil // started before by another message
}
