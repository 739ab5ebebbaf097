package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/base/glob"
)

// registration is one handler with its name and its settings.
type registration struct {
	handling
	Handler

	chained HandlerFunc   // the function of Handler with its middlewares
	slots   chan struct{} // of WithLimit; nil without a limit

	rateLimiter *rateLimiter // nil without WithRate
	removed     atomic.Bool
	pace        pace

	decider    decider
	suspension suspension
	running    atomic.Int32           // attempts
	lastError  atomic.Pointer[string] // of the last attempt; nil after a success

	repeatNoted atomic.Bool // a repeated transaction was logged
	repeats     repeats

	hasHandled atomic.Bool                     // a message, in this process
	unprepared atomic.Pointer[unpreparedError] // nil: what the handler needs exists

	system bool // a handler of the consumer: for messages without a handler or that cannot be decoded
}

// registry has the handlers of a consumer. The lookup for a message uses an immutable list and
// takes no lock.
type registry struct {
	mu         sync.Mutex
	current    atomic.Pointer[handlers]
	watches    []*watch
	watchCount atomic.Int32
	changed    chan struct{} // closed when a handler is added; nil while no goroutine waits
}

// handlers is a snapshot of the registrations, in their order, with a cache of the handlers of each type.
type handlers struct {
	all       []*registration
	cache     sync.Map // type to []*registration
	cacheSize atomic.Int32
}

// maxCachedTypes bounds the cache, because producers choose the types.
const maxCachedTypes = 4096

// forType returns the handlers that take the type.
func (h *handlers) forType(typ string) []*registration {
	if got, ok := h.cache.Load(typ); ok {
		return got.([]*registration)
	}

	var out []*registration
	for _, r := range h.all {
		if r.takesType(typ) {
			out = append(out, r)
		}
	}

	// Producers choose the types, so the cache is bounded.
	if h.cacheSize.Load() < maxCachedTypes {
		h.cacheSize.Add(1)
		h.cache.Store(strings.Clone(typ), out)
	}
	return out
}

// snapshot returns the current handlers, which do not change any more.
func (g *registry) snapshot() *handlers {
	if handlers := g.current.Load(); handlers != nil {
		return handlers
	}
	return &handlers{}
}

// names returns the names of the handlers in the order of their registration.
func (h *handlers) names() []string {
	names := make([]string, len(h.all))
	for i, r := range h.all {
		names[i] = r.name
	}
	return names
}

// find returns the handler of that name, or nil.
func (g *registry) find(name string) *registration {
	all := g.snapshot().all
	if i := slices.IndexFunc(all, func(registration *registration) bool { return registration.name == name }); i >= 0 {
		return all[i]
	}
	return nil
}

// addHandler adds registration. It returns an error if the name is taken.
func (g *registry) addHandler(registration *registration) error {
	g.mu.Lock()
	defer g.mu.Unlock()

	all := g.snapshot().all
	for _, other := range all {
		if other.name == registration.name {
			return fmt.Errorf("consumer: a handler named %q is registered already: choose another name", registration.name)
		}
	}

	g.current.Store(&handlers{all: append(slices.Clone(all), registration)})
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
	return nil
}

// nextChange returns a channel that is closed when the next handler is added.
func (g *registry) nextChange() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	return g.changed
}

// Handle registers a handler under a name. Group and name identify the handler in the inbox as "<group>/<name>", so they must
// not change during the life of the service. All handlers that take a type get its messages, in no fixed order, and each
// has its own attempts and outcome.
//
// Handle may be called while the consumer runs. Messages that are fetched later reach the handler. If its collections or indexes
// cannot be created then, its messages are set aside until they can. The error lists all invalid arguments.
//
// A new handler of a running group gets the messages that follow the start of the last member with the old version: during a rolling
// update, the messages of old members that have no handler for them become dead letters, or pass with WithSkip. To give it all messages,
// start it under a new group.
func (c *Consumer) Handle(name string, handler Handler, opts ...HandlerOption) error {
	registration := &registration{Handler: handler, handling: c.s.handling}
	registration.name = name
	// New has reported its problems, and its rules are added below.
	registration.handling.problems, registration.retryRules = nil, nil
	for _, o := range opts {
		if o != nil {
			o.applyToHandler(&registration.handling)
		}
	}

	bad := slices.Clone(handler.problems)
	if handler.handle == nil && len(bad) == 0 {
		bad = append(bad, errors.New("the handler is the zero value: use For, Func, Batch or Mux"))
	}
	if name == "" || strings.Contains(name, "/") {
		bad = append(bad, errors.New("a name must not be empty or contain a slash"))
	}
	bad = append(bad, registration.validate(), c.checkRetryTopics(len(registration.retryTopics)))
	if registration.rate.PerSecond > 0 && c.rates == nil {
		bad = append(bad, errors.New("WithRate needs a database"))
	}
	if err := errors.Join(bad...); err != nil {
		return fmt.Errorf("consumer: handler %q: %w", name, err)
	}

	if handler.batch != nil {
		registration.batchSize = handler.size
	}
	// The rules of the handler come before the rules of New.
	registration.retryRules = append(registration.retryRules, c.s.retryRules...)
	c.prepareHandler(registration)
	return c.reg.addHandler(registration)
}

// Remove removes the handler of that name, and reports whether there was one. The handler still gets the messages that were fetched
// before, and none that is fetched later. Its messages that are set aside wait until there is a handler of that name again. Remove may
// be called while the consumer runs. It does not wait for the handler.
func (c *Consumer) Remove(name string) bool {
	registry := &c.reg
	registry.mu.Lock()
	defer registry.mu.Unlock()

	all := registry.snapshot().all
	i := slices.IndexFunc(all, func(registration *registration) bool { return registration.name == name })
	if i < 0 {
		return false
	}
	all[i].removed.Store(true)
	registry.current.Store(&handlers{all: slices.Delete(slices.Clone(all), i, i+1)})
	return true
}

// prepareHandler sets the decider, the slots and the middleware chain of registration.
func (c *Consumer) prepareHandler(registration *registration) {
	registration.retry = registration.retry.withDefaults()
	registration.decider = decider{retry: registration.retry, rules: registration.retryRules, topics: registration.handling.retryTopics}
	if registration.limit > 0 {
		registration.slots = make(chan struct{}, registration.limit)
	}
	registration.rateLimiter = newRateLimiter(c.rates, c.inboxConsumer(registration), registration.rate)
	registration.chained = chainMiddlewares(registration.handle, registration.middlewares)
}

// watch is the state of one call of waitFor.
type watch struct {
	pattern string
	cond    func(m *Message) bool
	got     chan *Message
}

// waitFor is outboxtest.WaitFor.
func (c *Consumer) waitFor(ctx context.Context, pattern string, cond func(message *Message) bool) (*Message, error) {
	watch := &watch{pattern: pattern, cond: cond, got: make(chan *Message, 1)}
	registry := &c.reg
	registry.mu.Lock()
	// The counter lets finished messages skip the lock while there are no watches.
	registry.watches = append(registry.watches, watch)
	registry.watchCount.Add(1)
	registry.mu.Unlock()

	defer func() {
		registry.mu.Lock()
		defer registry.mu.Unlock()
		if i := slices.Index(registry.watches, watch); i >= 0 {
			registry.watches = slices.Delete(registry.watches, i, i+1)
			registry.watchCount.Add(-1)
		}
	}()

	select {
	case message := <-watch.got:
		return message, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a message of type %q: %w", pattern, context.Cause(ctx))
	}
}

// matchesMessage reports whether message satisfies the watch. It returns false if the condition panics.
func (w *watch) matchesMessage(message *Message) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	return glob.Match(w.pattern, message.Name) && (w.cond == nil || w.cond(message))
}

// notifyWatches passes a copy of a finished message to the watches that match it. It calls their
// conditions and does not block.
func (g *registry) notifyWatches(message *Message) {
	if g.watchCount.Load() == 0 || message == nil {
		return
	}
	g.mu.Lock()
	list := slices.Clone(g.watches)
	g.mu.Unlock()

	for _, w := range list {
		if !w.matchesMessage(message) {
			continue
		}
		// A watch needs only the first message.
		select {
		case w.got <- message.Clone():
		default:
		}
	}
}
