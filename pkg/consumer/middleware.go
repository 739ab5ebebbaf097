package consumer

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
)

// Chain is a list of middlewares that may grow while messages run: each run takes the list as it is when the run begins.
// The zero value is an empty chain. It is safe for concurrent use; a run costs no lock.
type Chain struct {
	mu   sync.Mutex // of Use and Clear
	list atomic.Pointer[[]Middleware]
}

// Use adds middlewares inside of those that are there: the first ever given is the outermost.
func (c *Chain) Use(mws ...Middleware) {
	c.mu.Lock()
	defer c.mu.Unlock()
	grown := append(slices.Clone(c.snapshot()), mws...) // runs keep the list that they have
	c.list.Store(&grown)
}

// Clear takes all middlewares away, for runs that begin from now on.
func (c *Chain) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.list.Store(nil)
}

func (c *Chain) snapshot() []Middleware {
	if l := c.list.Load(); l != nil {
		return *l
	}
	return nil
}

// Middleware is the whole chain as one middleware.
func (c *Chain) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			return chainMiddlewares(next, c.snapshot()).Handle(ctx, m)
		})
	}
}

// DefaultMiddlewareConcurrency is what Bounded takes for 0.
const DefaultMiddlewareConcurrency = 10

// Bounded lets at most n messages at once into what is inside of it; the others wait. 0 means DefaultMiddlewareConcurrency;
// less counts as 1.
func Bounded(n int) Middleware {
	slots := limit(n)
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if err := slots.enter(ctx); err != nil {
				return err
			}
			defer slots.leave()
			return next.Handle(ctx, m)
		})
	}
}

// slots is a semaphore that a context can end the waiting for.
type slots chan struct{}

func limit(n int) slots {
	if n == 0 {
		n = DefaultMiddlewareConcurrency
	}
	return make(slots, max(n, 1))
}

func (s slots) enter(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s slots) leave() { <-s }

type handlerNameKey struct{}

// withHandlerName tells middlewares whose attempt this is.
func withHandlerName(ctx context.Context, name string) context.Context {
	return context.WithValue(ctx, handlerNameKey{}, name)
}

// HandlerName is the name of the handler that runs with this context; "" outside of one.
func HandlerName(ctx context.Context) string {
	name, _ := ctx.Value(handlerNameKey{}).(string)
	return name
}

// WithHandlerName is a context as a consumer hands it to the handler of that name, for tests of middlewares.
func WithHandlerName(ctx context.Context, name string) context.Context {
	return withHandlerName(ctx, name)
}

// HeaderDedupKey is the header with the key by which an event is known as handled already, in place of its id: of two
// events that mean the same thing, the second has no effect. Set it with event.WithHeader.
const HeaderDedupKey = "dedup-key"

// dedupID is the id of m's identity in an inbox.
func dedupID(m *Message) string { return boundIdentity(textID(m)) }

func textID(m *Message) string {
	if v, ok := m.Header(HeaderDedupKey); ok && len(v) > 0 {
		return "dedup:" + string(v)
	}
	return identity(m)
}
