package consumer

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/record"
)

// Chain is a list of middlewares that may grow while messages are handled. Each message uses the
// list as it is when its handling begins. The zero value is an empty chain. A Chain is safe for
// concurrent use, and handling takes no lock.
type Chain struct {
	mu          sync.Mutex // serializes Use and Clear
	middlewares atomic.Pointer[[]Middleware]
}

// Use adds middlewares inside the existing ones: the first middleware of the chain is the outermost.
func (c *Chain) Use(mws ...Middleware) {
	c.mu.Lock()
	defer c.mu.Unlock()

	// The old list stays unchanged, because messages in progress use it.
	grown := append(slices.Clone(c.snapshot()), mws...)
	c.middlewares.Store(&grown)
}

// Clear removes all middlewares. Messages whose handling has begun keep the old list.
func (c *Chain) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.middlewares.Store(nil)
}

func (c *Chain) snapshot() []Middleware {
	if l := c.middlewares.Load(); l != nil {
		return *l
	}
	return nil
}

// Middleware returns a middleware that runs the whole chain.
func (c *Chain) Middleware() Middleware {
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			return chainMiddlewares(next, c.snapshot()).Handle(ctx, m)
		})
	}
}

// DefaultMiddlewareConcurrency is the limit of Bounded(0).
const DefaultMiddlewareConcurrency = 10

// Bounded limits how many messages run at once in the middlewares and the handler inside it to n.
// Other messages wait. If n is 0, the limit is DefaultMiddlewareConcurrency. If n is negative, the
// limit is 1.
func Bounded(n int) Middleware {
	slots := newSemaphore(n)
	return func(next Handler) Handler {
		return HandlerFunc(func(ctx context.Context, m *Message) error {
			if err := slots.acquire(ctx); err != nil {
				return err
			}
			defer slots.release()
			return next.Handle(ctx, m)
		})
	}
}

// semaphore limits concurrency. Waiting for it ends with a context.
type semaphore chan struct{}

func newSemaphore(n int) semaphore {
	if n == 0 {
		n = DefaultMiddlewareConcurrency
	}
	return make(semaphore, max(n, 1))
}

func (s semaphore) acquire(ctx context.Context) error {
	select {
	case s <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s semaphore) release() { <-s }

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

// WithHandlerName returns a context as a consumer passes it to the handler of that name, for tests
// of middlewares.
func WithHandlerName(ctx context.Context, name string) context.Context {
	return withHandlerName(ctx, name)
}

// HeaderDedupKey is the header whose value replaces the event's id for deduplication: of two events
// with the same value, the second has no effect. Set it with event.WithDedupKey.
const HeaderDedupKey = record.HeaderDedupKey

// dedupID returns the id of m in an inbox, bounded in length.
func dedupID(m *Message) string { return boundIdentity(dedupText(m)) }

func dedupText(m *Message) string {
	if v, ok := m.Header(HeaderDedupKey); ok && len(v) > 0 {
		return "dedup:" + string(v)
	}
	return identity(m)
}
