package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/base/glob"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
)

// Handler names types of events and the function that handles them. For, Func, Batch, BatchFor and Mux return one. The zero value is
// invalid.
type Handler struct {
	names    []string
	handle   HandlerFunc
	batch    func(ctx context.Context, ms []*Message) error
	size     int                               // of a batch
	prepares []func(ctx context.Context) error // before the first message; each may run more than once
	problems []error
}

// HandlerFunc handles one message. Many goroutines call it at once, but messages of one key one after another, in order.
//
// By default ctx carries the session of the message's transaction. Writes with ctx, and events that are appended to the
// outbox with it, commit together with the mark of the message, or not at all. The events get the cause of the message: see
// event.Cause. The function may run more than once before
// a commit, so effects outside of the transaction must be repeatable. ctx ends when the handler must stop.
//
// Nil commits. An error rolls back. Then Retry decides, unless the error is one of RetryIn, Suspend, Reject or Discard.
type HandlerFunc func(ctx context.Context, m *Message) error

// For returns a handler of events of type eventType, which decodes the payload and passes it to handle. For a tombstone, payload is the
// zero value and message.Tombstone is true.
//
// A payload that cannot be decoded fails with ErrMalformed, so by default the message becomes a dead letter at once. If
// the codec cannot reach its schema registry (codec.ErrUnavailable), the handler is suspended for Retry.Min up to Retry.Max, until
// it can. That spends no attempt.
func For[T any](eventType event.Type[T], handle func(ctx context.Context, message *Message, payload T) error) Handler {
	if handle == nil {
		return Func(nil, eventType.Name)
	}
	return Func(func(ctx context.Context, message *Message) error {
		payload, err := decodePayload(ctx, eventType, message)
		if err != nil {
			return err
		}
		return handle(ctx, message, payload)
	}, eventType.Name)
}

// decodePayload returns the payload of message, or the zero value for a tombstone.
func decodePayload[T any](ctx context.Context, eventType event.Type[T], message *Message) (payload T, err error) {
	if message.Tombstone() {
		return payload, nil
	}
	payload, err = eventType.Decode(ctx, message.Value)
	if err != nil && !errors.Is(err, codec.ErrUnavailable) {
		err = fmt.Errorf("%w: message %s of type %q is invalid: %w", ErrMalformed, message.ID, message.Name, err)
	}
	return payload, err
}

// Func returns a handler of the events with these names. It does not decode payloads. In a name, * stands for any
// characters and ? for one character, as in "order.*" or "*".
func Func(handler HandlerFunc, names ...string) Handler {
	built := Handler{names: slices.Clone(names), handle: handler}
	if handler == nil {
		built.addProblem("the function is nil")
	}
	built.checkNames()
	return built
}

// Batch returns a handler that gets up to n messages that wait at once, in order, in one transaction. n defaults to 100, and is at
// most 500. Names are those of Func. Its size replaces WithSharedTransaction. If handle fails for more than one message, it is called
// again for each message alone, so that Retry decides only about the message that fails.
func Batch(n int, handle func(ctx context.Context, ms []*Message) error, names ...string) Handler {
	handler := Handler{names: slices.Clone(names), handle: collectMessage, batch: handle, size: cmp.Or(n, defaultBatch)}
	if handler.size < 1 || handler.size > maxBatch {
		handler.addProblem("a batch of %d messages: it must have from 1 to %d", n, maxBatch)
	}
	if handle == nil {
		handler.addProblem("the function is nil")
	}
	handler.checkNames()
	return handler
}

// Typed is a message with its decoded payload.
type Typed[T any] struct {
	*Message
	Payload T
}

// BatchFor is Batch for events of type eventType, with their payloads, which are decoded as in For. If one of them cannot be decoded,
// that message fails alone.
func BatchFor[T any](n int, eventType event.Type[T], handle func(ctx context.Context, messages []Typed[T]) error) Handler {
	if handle == nil {
		return Batch(n, nil, eventType.Name)
	}
	return Batch(n, func(ctx context.Context, messages []*Message) error {
		typed := make([]Typed[T], len(messages))
		for i, message := range messages {
			payload, err := decodePayload(ctx, eventType, message)
			if err != nil {
				return err
			}
			typed[i] = Typed[T]{message, payload}
		}
		return handle(ctx, typed)
	}, eventType.Name)
}

// Mux joins handlers of different types under one name: they share one place in the inbox, and one order of each key over
// all their types. Handle rejects two handlers for one type, and a Batch.
func Mux(hs ...Handler) Handler {
	var joined Handler
	// All problems are collected, and Handle reports them with the name.
	for i, h := range hs {
		joined.problems = append(joined.problems, h.problems...)
		if h.batch != nil {
			joined.addProblem("a Batch cannot be part of a Mux: give it a separate name")
		}
		for _, other := range hs[:i] {
			if overlap, ok := findOverlap(h.names, other.names); ok {
				joined.addProblem("two handlers of the Mux take %q", overlap)
			}
		}
		joined.names = append(joined.names, h.names...)
		joined.prepares = append(joined.prepares, h.prepares...)
	}

	joined.checkNames()
	joined.handle = func(ctx context.Context, message *Message) error {
		for i := range hs {
			if hs[i].takesType(message.Name) {
				return hs[i].handle(ctx, message)
			}
		}
		return fmt.Errorf("%w of the Mux takes type %q", ErrNoHandler, message.Name)
	}
	return joined
}

// Handle calls the function of h for one message: without a consumer, an inbox, a transaction and middleware. Use it in
// unit tests.
func (h Handler) Handle(ctx context.Context, message *Message) error {
	if err := errors.Join(h.problems...); err != nil {
		return err
	}
	if err := h.prepare(ctx); err != nil {
		return err
	}
	ctx = event.ContextWithCause(ctx, message.Cause())
	if h.batch != nil {
		return h.batch(ctx, []*Message{message})
	}
	return h.handle(ctx, message)
}

// prepare creates the collections and indexes that the handler needs.
func (h *Handler) prepare(ctx context.Context) error {
	for _, prepare := range h.prepares {
		if err := prepare(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (h *Handler) addProblem(format string, args ...any) {
	h.problems = append(h.problems, fmt.Errorf(format, args...))
}

// checkNames adds the problems of the names.
func (h *Handler) checkNames() {
	if len(h.names) == 0 {
		h.addProblem("it takes no events: name them, or use \"*\" for all")
	}
	if slices.Contains(h.names, "") {
		h.addProblem("the name of an event is empty: \"*\" matches every name")
	}
}

// takesType reports whether some name of h matches typ.
func (h *Handler) takesType(typ string) bool {
	return slices.ContainsFunc(h.names, func(pattern string) bool { return glob.Match(pattern, typ) })
}

// findOverlap returns a pattern that has a type in common with one of others.
func findOverlap(patterns, others []string) (string, bool) {
	for _, p := range patterns {
		if slices.ContainsFunc(others, func(other string) bool { return glob.Overlap(p, other) }) {
			return p, true
		}
	}
	return "", false
}

// Middleware wraps a handler. It runs for each message, in the transaction of the message. The first of a list is the
// outermost. If it returns nil without calling next, the message counts as handled.
type Middleware func(next HandlerFunc) HandlerFunc

// chainMiddlewares wraps handler in the middlewares. The first is the outermost.
func chainMiddlewares(handler HandlerFunc, mws []Middleware) HandlerFunc {
	for i := len(mws) - 1; i >= 0; i-- {
		handler = mws[i](handler)
	}
	return handler
}

type handlerNameKey struct{}

// withHandlerName returns a context from which HandlerName returns name.
func withHandlerName(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, handlerNameKey{}, name)
}

// HandlerName returns the name of the handler that runs with this context, or "" outside of a handler.
func HandlerName(ctx context.Context) string {
	name, _ := ctx.Value(handlerNameKey{}).(string)
	return name
}

// messageDisposer carries out a verdict on a message that the consumer does not handle now. It moves the message to a retry
// topic or to the dead letters. With actDiscard it moves nothing. When Dispose returns nil, the message is finished and its
// offset passes. After an error the consumer calls Dispose again, with backoff, and commits nothing until then. handler is the
// name of the handler. It is "" for a message without a handler, and for a record that could not be decoded. givenUp is nil if
// no dead letter was stored. The caller passes it to WithGivenUpHook when nothing can roll the letter back any more.
type messageDisposer interface {
	Dispose(ctx context.Context, m *Message, handler string, v verdict, cause error) (givenUp *GivenUp, err error)
}
