package consumer

import "context"

// Handler handles messages. Many goroutines call it at once. Messages of one key are handled one after another, in order.
//
// In a transactional mode ctx carries the session of the message's transaction. Writes with ctx, and events that are appended
// to the outbox with it, commit together with the mark of the message, or not at all. Such a handler may run more than once
// for one message, like the callback of outbox.Box.Transaction. Effects outside of the transaction must therefore be repeatable.
// If Handle returns an error, the handler's policy decides about the message.
type Handler interface {
	Handle(ctx context.Context, m *Message) error
}

// HandlerFunc is a function that implements Handler.
type HandlerFunc func(ctx context.Context, m *Message) error

// Handle calls f.
func (f HandlerFunc) Handle(ctx context.Context, m *Message) error { return f(ctx, m) }

// BatchHandlerFunc handles messages of one lane together, in their order, in one transaction. If it fails for more than
// one message, it is called again for each message alone, so that the policy decides only about the message that fails.
type BatchHandlerFunc func(ctx context.Context, ms []*Message) error

// Middleware wraps a handler. The first middleware of a list is the outermost.
type Middleware func(next Handler) Handler

// chainMiddlewares wraps h in the middlewares. The first is the outermost.
func chainMiddlewares(h Handler, mws []Middleware) Handler {
	for i := len(mws) - 1; i >= 0; i-- {
		h = mws[i](h)
	}
	return h
}

// Publisher writes messages to topics. Publish blocks until all in-sync replicas have all messages. After an error, any of
// the messages may have been written. Headers, key and value are written unchanged, a nil value as a tombstone. The key
// selects the partition in the same way as in the Java client.
type Publisher interface {
	Publish(ctx context.Context, topic string, ms []*Message) error
}

// Disposer carries out the verdict of a policy for a message that the consumer does not handle now. It moves the message to a
// retry topic, to the end of its topic, into the outbox, or to the dead letters. With Discard it moves nothing. When Dispose
// returns nil, the message is finished and its offset passes. After an error the consumer calls Dispose again, with backoff,
// and commits nothing until then. handler is the name of the handler. It is "" for a message without a handler, and for a
// record that could not be decoded.
type Disposer interface {
	Dispose(ctx context.Context, m *Message, handler string, v Verdict, cause error) error
}

// Decider decides what happens to a message whose handler failed. *Policy implements it. Many goroutines call it at once.
type Decider interface {
	Decide(err error, m *Message, a Attempts) Verdict
}
