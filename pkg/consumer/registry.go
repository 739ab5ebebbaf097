package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/outrelay/outrelay/internal/glob"
)

// registration is one handler with its patterns. It has either a handler or a batchHandler.
type registration struct {
	handling
	patterns     []string
	handler      Handler
	batchHandler BatchHandlerFunc
	once         bool

	chained Handler       // handler, or the collector of batchHandler, with its middlewares
	slots   chan struct{} // of Limit; nil without a limit
	fired   atomic.Bool   // a Once handler has accepted its message
	removed atomic.Bool
	pace    pace

	suspension suspension

	system bool // a handler of the consumer: for messages without a handler or that cannot be decoded
}

// HandlerInfo describes a registered handler.
type HandlerInfo struct {
	Name     string
	Patterns []string
	Mode     Mode
	Batched  bool
	Once     bool
}

// registry has the handlers of a consumer. The lookup for a message uses an immutable list and
// takes no lock.
type registry struct {
	mu            sync.Mutex
	strict        bool
	current       atomic.Pointer[handlers]
	watches       []*watch
	watchCount    atomic.Int32
	changed       chan struct{}       // closed when a handler is added; nil while no goroutine waits
	reportedTypes map[string]struct{} // types skipped by AckUnknown that were reported
}

// handlers is a snapshot of the registrations, in their order, with a cache of the handlers of each type.
type handlers struct {
	all       []*registration
	cache     sync.Map // type to []*registration
	cacheSize atomic.Int32
}

// maxCachedTypes bounds the cache, because producers choose the types.
const maxCachedTypes = 4096

// types returns the handlers that take the type.
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

	if h.cacheSize.Load() < maxCachedTypes {
		h.cacheSize.Add(1)
		h.cache.Store(strings.Clone(typ), out)
	}
	return out
}

// reportUnknownOnce reports, once for each type, that AckUnknown skips messages. It stops at
// maxCachedTypes types.
func (g *registry) reportUnknownOnce(typ string, report func(err error)) {
	g.mu.Lock()
	_, reported := g.reportedTypes[typ]
	first := !reported && len(g.reportedTypes) < maxCachedTypes
	if first {
		if g.reportedTypes == nil {
			g.reportedTypes = map[string]struct{}{}
		}
		g.reportedTypes[strings.Clone(typ)] = struct{}{}
	}
	g.mu.Unlock()

	// report may call a function of the user, so it is called without the lock.
	if first {
		report(fmt.Errorf("%w: AckUnknown skips all messages of that type", &NoHandlerError{Type: typ}))
	}
}

// takesType reports whether some pattern of r matches typ.
func (r *registration) takesType(typ string) bool {
	return slices.ContainsFunc(r.patterns, func(p string) bool { return glob.Match(p, typ) })
}

// snapshot returns the current handlers, which do not change any more.
func (g *registry) snapshot() *handlers {
	if h := g.current.Load(); h != nil {
		return h
	}
	return &handlers{}
}

// addHandler adds r. If a name or, with Strict, a type is taken, it adds nothing and returns a
// *DuplicateHandlerError.
func (g *registry) addHandler(r *registration) error {
	g.mu.Lock()
	defer g.mu.Unlock()

	all := g.snapshot().all
	for _, other := range all {
		if other.name == r.name {
			return &DuplicateHandlerError{Name: r.name}
		}

		if !g.strict {
			continue
		}
		for _, p := range r.patterns {
			if slices.ContainsFunc(other.patterns, func(q string) bool { return glob.Overlap(p, q) }) {
				return &DuplicateHandlerError{Pattern: p, Name: other.name}
			}
		}
	}

	g.current.Store(&handlers{all: append(slices.Clone(all), r)})
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

// removeIf removes the registrations for which cond is true, and returns their number.
func (g *registry) removeIf(cond func(r *registration) bool) int {
	g.mu.Lock()
	defer g.mu.Unlock()

	var keep []*registration
	n := 0
	for _, r := range g.snapshot().all {
		if cond(r) {
			r.removed.Store(true)
			n++
			continue
		}
		keep = append(keep, r)
	}

	if n > 0 {
		g.current.Store(&handlers{all: keep})
	}
	return n
}

// Handle registers a handler for the messages whose type matches the pattern. A pattern is a type
// in which * stands for any characters and ? for one character, such as "order.*" or "*". All
// handlers that match a type get its messages, in no fixed order. Each handler has its own name,
// and therefore its own place in the inbox, attempts and outcome.
//
// Handle may be called while the consumer runs. Messages that are fetched later reach the handler.
// The error lists all invalid arguments.
func (c *Consumer) Handle(pattern string, h Handler, opts ...HandlerOption) error {
	return c.Subscribe([]string{pattern}, h, opts...)
}

// HandleBatch registers a handler that gets several messages of one lane at once. Otherwise it is
// like Handle.
func (c *Consumer) HandleBatch(pattern string, f BatchHandlerFunc, opts ...HandlerOption) error {
	if f == nil {
		return errors.New("consumer: HandleBatch: the handler is nil")
	}
	return c.registerHandler(&registration{patterns: []string{pattern}, batchHandler: f}, opts)
}

// On is like Handle with a function. off removes the handler.
func (c *Consumer) On(pattern string, f HandlerFunc, opts ...HandlerOption) (off func(), err error) {
	if f == nil {
		return func() {}, errors.New("consumer: On: the handler is nil")
	}
	r := &registration{patterns: []string{pattern}, handler: f}
	if err := c.registerHandler(r, opts); err != nil {
		return func() {}, err
	}
	return func() { c.reg.removeIf(func(x *registration) bool { return x == r }) }, nil
}

// Once registers a handler for the first message that matches. The handler is removed when that
// message is finished. Each member and each generation of the group has its own first message.
func (c *Consumer) Once(pattern string, f HandlerFunc, opts ...HandlerOption) (off func(), err error) {
	if f == nil {
		return func() {}, errors.New("consumer: Once: the handler is nil")
	}
	r := &registration{patterns: []string{pattern}, handler: f, once: true}
	if err := c.registerHandler(r, opts); err != nil {
		return func() {}, err
	}
	return func() { c.reg.removeIf(func(x *registration) bool { return x == r }) }, nil
}

// Off removes the handler of that name, and reports whether there was one. Messages that were
// fetched for it and not started are skipped.
func (c *Consumer) Off(name string) bool {
	return c.reg.removeIf(func(r *registration) bool { return r.name == name }) > 0
}

// OffAll removes all handlers that were registered with exactly that pattern, and returns their
// number. OffAll("") removes all handlers.
func (c *Consumer) OffAll(pattern string) int {
	return c.reg.removeIf(func(r *registration) bool { return pattern == "" || slices.Contains(r.patterns, pattern) })
}

// Subscribe registers one handler for several patterns. If one of them is invalid or taken, it
// registers none. Without patterns it does nothing and returns nil.
func (c *Consumer) Subscribe(patterns []string, h Handler, opts ...HandlerOption) error {
	if f, ok := h.(HandlerFunc); h == nil || ok && f == nil {
		return errors.New("consumer: the handler is nil")
	}
	if len(patterns) == 0 {
		return nil
	}
	return c.registerHandler(&registration{patterns: slices.Clone(patterns), handler: h}, opts)
}

// registerHandler applies the options to r, validates it and adds it.
func (c *Consumer) registerHandler(r *registration, opts []HandlerOption) error {
	r.handling = c.s.handling
	r.name = strings.Join(r.patterns, ",")
	r.problems, r.retryRules = nil, nil
	for _, o := range opts {
		if o != nil {
			o.applyToHandler(&r.handling)
		}
	}

	var bad []error
	if slices.Contains(r.patterns, "") {
		bad = append(bad, errors.New("a pattern is empty: \"*\" matches every type"))
	}
	if r.name == "" || strings.Contains(r.name, "/") {
		bad = append(bad, fmt.Errorf("name %q of a handler: it must not be empty or contain a slash", r.name))
	}
	bad = append(bad, r.validate())
	if err := errors.Join(bad...); err != nil {
		return fmt.Errorf("consumer: handler %q: %w", r.name, err)
	}

	// The rules of the handler come before those of New.
	r.retryRules = append(r.retryRules, c.s.retryRules...)
	c.prepareHandler(r)
	return c.reg.addHandler(r)
}

// prepareHandler sets the decider, the slots and the middleware chain of r.
func (c *Consumer) prepareHandler(r *registration) {
	r.retry = r.retry.withDefaults()
	if r.decider == nil {
		r.decider = &retryDecider{base: r.retry, rules: r.retryRules}
	}
	if r.limit > 0 {
		r.slots = make(chan struct{}, r.limit)
	}

	inner := r.handler
	if inner == nil {
		inner = HandlerFunc(collectMessage)
	}
	r.chained = chainMiddlewares(inner, r.middlewares)
}

// Handlers returns the registered handlers, in the order of their registration.
func (c *Consumer) Handlers() []HandlerInfo {
	all := c.reg.snapshot().all
	out := make([]HandlerInfo, len(all))
	for i, r := range all {
		out[i] = HandlerInfo{
			Name: r.name, Patterns: slices.Clone(r.patterns), Mode: r.mode, Batched: r.batchHandler != nil, Once: r.once,
		}
	}
	return out
}

// Patterns returns the distinct patterns of all handlers, sorted.
func (c *Consumer) Patterns() []string {
	var out []string
	for _, r := range c.reg.snapshot().all {
		out = append(out, r.patterns...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Count returns how many handlers match the type.
func (c *Consumer) Count(typ string) int {
	n := 0
	for _, r := range c.reg.snapshot().all {
		if r.takesType(typ) {
			n++
		}
	}
	return n
}

// watch is the state of one call of WaitFor.
type watch struct {
	pattern string
	cond    func(m *Message) bool
	got     chan *Message
}

// WaitFor blocks until this consumer has finished a message whose type matches the pattern and for
// which cond, if not nil, is true. It returns a copy of the message as it was read. WaitFor only
// observes: it does not count as a handler. Messages that were finished before the call do not
// match. If ctx ends first, the error has its cause.
func (c *Consumer) WaitFor(ctx context.Context, pattern string, cond func(m *Message) bool) (*Message, error) {
	w := &watch{pattern: pattern, cond: cond, got: make(chan *Message, 1)}
	g := &c.reg
	g.mu.Lock()
	g.watches = append(g.watches, w)
	g.watchCount.Add(1)
	g.mu.Unlock()

	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if i := slices.Index(g.watches, w); i >= 0 {
			g.watches = slices.Delete(g.watches, i, i+1)
			g.watchCount.Add(-1)
		}
	}()

	select {
	case m := <-w.got:
		return m, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a message of type %q: %w", pattern, context.Cause(ctx))
	}
}

// matchesMessage reports whether m satisfies the watch. It returns false if the condition panics.
func (w *watch) matchesMessage(m *Message) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	return glob.Match(w.pattern, m.Name) && (w.cond == nil || w.cond(m))
}

// notifyWatches passes a copy of a finished message to the watches that match it. It calls their
// conditions and does not block.
func (g *registry) notifyWatches(m *Message) {
	if g.watchCount.Load() == 0 || m == nil {
		return
	}
	g.mu.Lock()
	list := slices.Clone(g.watches)
	g.mu.Unlock()

	for _, w := range list {
		if !w.matchesMessage(m) {
			continue
		}
		// A watch needs only the first message.
		select {
		case w.got <- m.Clone():
		default:
		}
	}
}
