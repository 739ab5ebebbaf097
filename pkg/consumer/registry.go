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
	"github.com/outrelay/outrelay/pkg/inbox"
)

// registration is one handler with its patterns.
type registration struct {
	handling
	patterns []string
	single   Handler          // one of these two
	batched  BatchHandlerFunc //
	once     bool

	chained Handler       // single, or the collector of batched, with its middleware
	slots   chan struct{} // of Limit; nil without
	fired   atomic.Bool   // of once
	removed atomic.Bool
	pace    pace
	system  bool // one of the consumer's own: for what nobody takes, and for what cannot be decoded
}

// HandlerInfo describes a registered handler.
type HandlerInfo struct {
	Name     string
	Patterns []string
	Mode     inbox.Mode
	Batched  bool
	Once     bool
}

// registry is the handlers of a consumer. What is looked up on the way of a message is an immutable list.
type registry struct {
	mu      sync.Mutex
	strict  bool
	list    atomic.Pointer[handlers]
	watches []*watch
	watched atomic.Int32
	changed chan struct{}       // closed when a handler is added; nil if nobody waits for that
	passed  map[string]struct{} // types that AckUnknown lets pass and that were reported
}

// handlers is a snapshot of the registrations, in their order, with a cache of what types they take.
type handlers struct {
	all   []*registration
	cache sync.Map // type to []*registration
	n     atomic.Int32
}

// maxCachedTypes bounds the cache: types come from outside.
const maxCachedTypes = 4096

// types returns the handlers that take the type.
func (h *handlers) of(typ string) []*registration {
	if got, ok := h.cache.Load(typ); ok {
		return got.([]*registration)
	}
	var out []*registration
	for _, r := range h.all {
		if r.takes(typ) {
			out = append(out, r)
		}
	}
	if h.n.Load() < maxCachedTypes {
		h.n.Add(1)
		h.cache.Store(strings.Clone(typ), out)
	}
	return out
}

// let reports, once for each type, that AckUnknown lets messages pass.
func (g *registry) let(typ string, report func(err error)) {
	g.mu.Lock()
	_, reported := g.passed[typ]
	first := !reported && len(g.passed) < maxCachedTypes
	if first {
		if g.passed == nil {
			g.passed = map[string]struct{}{}
		}
		g.passed[strings.Clone(typ)] = struct{}{}
	}
	g.mu.Unlock()
	if first {
		report(fmt.Errorf("%w: AckUnknown lets all messages of that type pass unhandled", &NoHandlerError{Type: typ}))
	}
}

func (r *registration) takes(typ string) bool {
	return slices.ContainsFunc(r.patterns, func(p string) bool { return glob.Match(p, typ) })
}

func (g *registry) snapshot() *handlers {
	if h := g.list.Load(); h != nil {
		return h
	}
	return &handlers{}
}

// add registers all or nothing.
func (g *registry) add(r *registration) error {
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
	g.list.Store(&handlers{all: append(slices.Clone(all), r)})
	if g.changed != nil {
		close(g.changed)
		g.changed = nil
	}
	return nil
}

// changes is closed when the next handler is added.
func (g *registry) changes() <-chan struct{} {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.changed == nil {
		g.changed = make(chan struct{})
	}
	return g.changed
}

// remove takes out what cond says and returns how many that were.
func (g *registry) remove(cond func(r *registration) bool) int {
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
		g.list.Store(&handlers{all: keep})
	}
	return n
}

// Handle registers a handler for the messages whose type matches the pattern: the type itself, or with * for any run of
// characters and ? for one, as "order.*" or "*". All handlers that match a type get its messages, each with a name and so with a place
// in the inbox, attempts and a fate of its own; the order among them is not fixed. It may be called while the consumer
// runs: messages that are read from then on see it. What is wrong, with any of the arguments, is returned at once.
func (c *Consumer) Handle(pattern string, h Handler, opts ...HandlerOption) error {
	return c.Subscribe([]string{pattern}, h, opts...)
}

// HandleBatch registers a handler that gets the messages of one lane together.
func (c *Consumer) HandleBatch(pattern string, f BatchHandlerFunc, opts ...HandlerOption) error {
	if f == nil {
		return errors.New("consumer: HandleBatch: the handler is nil")
	}
	return c.register(&registration{patterns: []string{pattern}, batched: f}, opts)
}

// On is Handle of a function that returns how to take it back.
func (c *Consumer) On(pattern string, f HandlerFunc, opts ...HandlerOption) (off func(), err error) {
	if f == nil {
		return func() {}, errors.New("consumer: On: the handler is nil")
	}
	r := &registration{patterns: []string{pattern}, single: f}
	if err := c.register(r, opts); err != nil {
		return func() {}, err
	}
	return func() { c.reg.remove(func(x *registration) bool { return x == r }) }, nil
}

// Once registers a handler for the first message that matches. It is taken back when that message is finished. Members of
// a group and generations of it each count for themselves.
func (c *Consumer) Once(pattern string, f HandlerFunc, opts ...HandlerOption) (off func(), err error) {
	if f == nil {
		return func() {}, errors.New("consumer: Once: the handler is nil")
	}
	r := &registration{patterns: []string{pattern}, single: f, once: true}
	if err := c.register(r, opts); err != nil {
		return func() {}, err
	}
	return func() { c.reg.remove(func(x *registration) bool { return x == r }) }, nil
}

// Off takes a handler back by its name and reports whether there was one. Its messages that were read already and did not
// begin are let pass.
func (c *Consumer) Off(name string) bool {
	return c.reg.remove(func(r *registration) bool { return r.name == name }) > 0
}

// OffAll takes back all handlers that were registered with exactly that pattern, or with "" all, and returns how many.
func (c *Consumer) OffAll(pattern string) int {
	return c.reg.remove(func(r *registration) bool { return pattern == "" || slices.Contains(r.patterns, pattern) })
}

// Subscribe registers one handler for several patterns, or for none of them if any cannot be. No pattern at all registers
// nothing and is no error.
func (c *Consumer) Subscribe(patterns []string, h Handler, opts ...HandlerOption) error {
	if f, ok := h.(HandlerFunc); h == nil || ok && f == nil {
		return errors.New("consumer: the handler is nil")
	}
	if len(patterns) == 0 {
		return nil
	}
	return c.register(&registration{patterns: slices.Clone(patterns), single: h}, opts)
}

func (c *Consumer) register(r *registration, opts []HandlerOption) error {
	r.handling = c.s.handling
	r.name = strings.Join(r.patterns, ",")
	r.problems = nil
	for _, o := range opts {
		if o != nil {
			o.handler(&r.handling)
		}
	}
	var bad []error
	if slices.Contains(r.patterns, "") {
		bad = append(bad, errors.New("a pattern is empty: \"*\" takes every type"))
	}
	if r.name == "" || strings.Contains(r.name, "/") {
		bad = append(bad, fmt.Errorf("name %q of a handler: it must not be empty or contain a slash", r.name))
	}
	bad = append(bad, r.check())
	if err := errors.Join(bad...); err != nil {
		return fmt.Errorf("consumer: handler %q: %w", r.name, err)
	}
	c.prepare(r)
	return c.reg.add(r)
}

// prepare builds what does not change while the handler is there.
func (c *Consumer) prepare(r *registration) {
	if r.decider == nil {
		r.decider = defaultDecider()
	}
	if r.limit > 0 {
		r.slots = make(chan struct{}, r.limit)
	}
	inner := r.single
	if inner == nil {
		inner = HandlerFunc(collectMessage)
	}
	r.chained = c.wrapWithGate(r.decider, chainMiddlewares(inner, r.mws))
}

// Handlers lists the registered handlers in their order.
func (c *Consumer) Handlers() []HandlerInfo {
	all := c.reg.snapshot().all
	out := make([]HandlerInfo, len(all))
	for i, r := range all {
		out[i] = HandlerInfo{Name: r.name, Patterns: slices.Clone(r.patterns), Mode: r.mode, Batched: r.batched != nil, Once: r.once}
	}
	return out
}

// Patterns lists the distinct patterns of all handlers, sorted.
func (c *Consumer) Patterns() []string {
	var out []string
	for _, r := range c.reg.snapshot().all {
		out = append(out, r.patterns...)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Count is how many handlers take messages of that type.
func (c *Consumer) Count(typ string) int {
	n := 0
	for _, r := range c.reg.snapshot().all {
		if r.takes(typ) {
			n++
		}
	}
	return n
}

// watch is one WaitFor.
type watch struct {
	pattern string
	cond    func(m *Message) bool
	got     chan *Message
}

// WaitFor waits until this consumer is through with a message whose type matches the pattern and for which cond, if not
// nil, is true, and returns a copy of it as it was read. It observes: it is no handler, takes no place of one, and sees
// only messages that are finished after it was called. The error is that of ctx.
func (c *Consumer) WaitFor(ctx context.Context, pattern string, cond func(m *Message) bool) (*Message, error) {
	w := &watch{pattern: pattern, cond: cond, got: make(chan *Message, 1)}
	g := &c.reg
	g.mu.Lock()
	g.watches = append(g.watches, w)
	g.watched.Add(1)
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		if i := slices.Index(g.watches, w); i >= 0 {
			g.watches = slices.Delete(g.watches, i, i+1)
			g.watched.Add(-1)
		}
	}()
	select {
	case m := <-w.got:
		return m, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("waiting for a message of type %q: %w", pattern, context.Cause(ctx))
	}
}

// sees is false for a condition that panics.
func (w *watch) sees(m *Message) (yes bool) {
	defer func() {
		if recover() != nil {
			yes = false
		}
	}()
	return glob.Match(w.pattern, m.Type) && (w.cond == nil || w.cond(m))
}

// finished tells those who wait.
func (g *registry) finished(m *Message) {
	if g.watched.Load() == 0 || m == nil {
		return
	}
	g.mu.Lock()
	list := slices.Clone(g.watches)
	g.mu.Unlock()
	for _, w := range list {
		if w.sees(m) {
			select {
			case w.got <- m.Clone():
			default:
			}
		}
	}
}
