package consumer

import (
	"context"
)

// Handler handles messages. It is called by many goroutines at once, for one key by one at a time and in order.
//
// In a transactional mode ctx carries the session of the message's transaction: what is written with it, events that are
// appended to the outbox included, is committed together with the mark that the message was handled, or not at all. Such a
// handler may run more than once for one message, as the callback of outbox.Transaction may; it must have no effect
// outside of the transaction that may not be repeated. An error is decided about by the handler's policy.
type Handler interface {
	Handle(ctx context.Context, m *Message) error
}

// HandlerFunc is a function as a Handler.
type HandlerFunc func(ctx context.Context, m *Message) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, m *Message) error { return f(ctx, m) }

// BatchHandlerFunc handles messages of one lane together, in their order, in one transaction. If it fails for more than
// one message, it is called again for each of them alone, so that only the one at fault meets its policy.
type BatchHandlerFunc func(ctx context.Context, ms []*Message) error

// Middleware wraps a handler. The first given is the outermost.
type Middleware func(next Handler) Handler

// chainMiddlewares wraps h, the first middleware outermost.
func chainMiddlewares(h Handler, mws []Middleware) Handler {
	for i := len(mws) - 1; i >= 0; i-- {
		h = mws[i](h)
	}
	return h
}

// Publisher writes messages to topics. It returns when all of them are on all in-sync replicas, or an error; then any of
// them may have been written. Headers, key and value are written as they are, a nil value as a tombstone; the partition is
// that of the key, as Java's client chooses it.
type Publisher interface {
	Publish(ctx context.Context, topic string, ms []*Message) error
}

// Disposer carries out what a policy decided for a message that its consumer does not handle now: it moves it to a retry
// topic, to the end of its topic, into the outbox, to the dead letters, or nowhere (Discard). When it returns nil the
// message is finished and its offset passes; on an error the consumer asks again, with backoff, and nothing is committed.
// handler is the name of the handler, "" for a message that no handler took or that could not be decoded.
type Disposer interface {
	Dispose(ctx context.Context, m *Message, handler string, v Verdict, cause error) error
}

// Decider decides what becomes of a message whose handler failed. *Policy is one. It is called from many goroutines.
type Decider interface {
	Decide(err error, m *Message, a Attempts) Verdict
}
