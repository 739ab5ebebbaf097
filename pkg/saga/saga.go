package saga

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// DefaultHeldLimit is the default limit of early messages that are held for one saga. WithHeldLimit
// changes it.
const DefaultHeldLimit = 100

// Func is a step of a saga. If it returns nil, its changes of in.State and its events are stored.
// If it returns an error, the saga does not change.
//
// If it returns ErrDrop, the saga does not change either, but the message counts as
// handled: the writes that the step did with its context are committed, and a message in sequence
// has had its turn.
type Func[S any, I Identifier] func(ctx context.Context, in *Instance[S, I], m *consumer.Message) error

// JSON returns a step that receives the value of the message, decoded from JSON. A value that
// cannot be decoded is a *PayloadError.
func JSON[P, S any, I Identifier](f func(ctx context.Context, in *Instance[S, I], p P) error) Func[S, I] {
	return Payload(json.Unmarshal, f)
}

// ExtJSON returns a step that receives the value of the message, decoded from relaxed Extended
// JSON. The relay publishes a payload in this format if it was appended as a document. A value that
// cannot be decoded is a *PayloadError.
func ExtJSON[P, S any, I Identifier](f func(ctx context.Context, in *Instance[S, I], p P) error) Func[S, I] {
	return Payload(unmarshalExtJSON, f)
}

// Payload returns a step that receives the value of the message, decoded by decode. A value that
// cannot be decoded is a *PayloadError.
func Payload[P, S any, I Identifier](
	decode Decode, f func(ctx context.Context, in *Instance[S, I], p P) error,
) Func[S, I] {
	return func(ctx context.Context, in *Instance[S, I], m *consumer.Message) error {
		p, err := decodePayload[P](decode, m)
		if err != nil {
			return err
		}
		return f(ctx, in, p)
	}
}

// Saga is the definition of one kind of process: the type of its state, the messages that it
// handles, and the steps for them. Complete the definition before you call Register or Handler.
// Later changes have no effect on them.
type Saga[S any, I Identifier] struct {
	name      string
	reg       *Registry
	owner     string
	aggregate string
	keep      time.Duration // of the tombstone; 0 is no tombstone
	heldLimit int
	unguarded bool // completion ignores changes by other steps

	mu       sync.Mutex
	routes   map[string]route[S, I]
	notFound map[string]func(context.Context, I, *consumer.Message) error
	problems []string // mistakes in the definition
}

// route defines the handling of one type of message.
type route[S any, I Identifier] struct {
	by            Correlate[I]
	start, handle Func[S, I] // nil if not defined
	sequence      Sequence
	timeout       string // name of the timeout, or "" for other messages
}

// SagaOption configures one saga. See New.
type SagaOption func(*sagaSettings)

type sagaSettings struct {
	owner, aggregate string
	keep             time.Duration
	heldLimit        int
	unguarded        bool
	problems         []string
}

// WithTombstone keeps the document of a completed saga for the time keep, by the server's clock.
// Late messages are then ignored and do not start the saga again. keep must be at least 1 ms. By
// default, completion deletes the document, and a late start begins a new saga.
func WithTombstone(keep time.Duration) SagaOption {
	return func(s *sagaSettings) {
		if keep < time.Millisecond {
			s.problems = append(s.problems, fmt.Sprintf("invalid tombstone time %s: it must be at least 1 ms", keep))
		}
		s.keep = keep
	}
}

// WithoutCompletionGuard lets a step complete a saga even if another step has changed it in the
// meantime. By default the step runs again on the new state. In a transaction the server still
// rejects simultaneous changes.
func WithoutCompletionGuard() SagaOption { return func(s *sagaSettings) { s.unguarded = true } }

// WithOwner sets the owner of the saga, which distinguishes it from a saga with the same name in
// another program. Defaults to the Go type of the state. Set the owner to the old type before you
// rename that type.
func WithOwner(owner string) SagaOption { return func(s *sagaSettings) { s.owner = owner } }

// WithAggregate sets the aggregate type of the events for timeouts, which selects their topic:
// outbox.event.<aggregateType>, unless the relay is configured otherwise. Defaults to the name of
// the saga.
func WithAggregate(aggregateType string) SagaOption {
	return func(s *sagaSettings) { s.aggregate = aggregateType }
}

// WithHeldLimit sets how many early messages of one saga are held, at least 1. Together they must
// not exceed 8 MiB. Defaults to DefaultHeldLimit.
func WithHeldLimit(n int) SagaOption {
	return func(s *sagaSettings) {
		if n < 1 {
			s.problems = append(s.problems, fmt.Sprintf("invalid limit of %d held messages: it must be at least 1", n))
		}
		s.heldLimit = n
	}
}

// New defines a saga in the registry r. Its name is also the name of its collection. New does no
// I/O. It returns a *DuplicateSagaError if the registry has a saga of this name, and a
// *DefinitionError for other mistakes.
func New[S any, I Identifier](r *Registry, name string, opts ...SagaOption) (*Saga[S, I], error) {
	set := sagaSettings{owner: typeOwner[S](), aggregate: name, heldLimit: DefaultHeldLimit}

	for _, o := range opts {
		o(&set)
	}

	if !isLegalName(name) {
		set.problems = append(set.problems, "the name is no valid collection name, or it is "+DefaultTypes)
	}
	if set.owner == "" || set.aggregate == "" {
		set.problems = append(set.problems, "owner and aggregate must not be empty")
	}
	if r == nil {
		set.problems = append(set.problems, "the registry is nil")
	}

	if len(set.problems) > 0 {
		return nil, &DefinitionError{Saga: name, Problems: set.problems}
	}

	s := &Saga[S, I]{
		name:      name,
		reg:       r,
		owner:     set.owner,
		aggregate: set.aggregate,
		keep:      set.keep,
		heldLimit: set.heldLimit,
		unguarded: set.unguarded,
		routes:    map[string]route[S, I]{},
		notFound:  map[string]func(context.Context, I, *consumer.Message) error{},
	}
	if err := r.addSaga(name, s); err != nil {
		return nil, err
	}

	return s, nil
}

// typeOwner returns the default owner of a saga: the Go type of its state with the path of its
// package.
func typeOwner[S any]() string {
	t := reflect.TypeFor[S]()

	// Built-in and unnamed types have no package.
	if t.Name() == "" || t.PkgPath() == "" {
		return t.String()
	}
	return t.PkgPath() + "." + t.Name()
}

// Name returns the name of the saga, which is also the name of its collection.
func (s *Saga[S, I]) Name() string { return s.name }

// HandleOption configures the handling of one type of message. See InSequence.
type HandleOption func(*handleSettings)

type handleSettings struct{ sequence Sequence }

// InSequence handles the messages of a saga in the order of their numbers. The order includes all
// types of messages that have this option. An early message is held in the document of the saga
// until all messages before it have arrived. A message that was handled before is ignored. A
// message with a number of 0 or less is handled at once.
func InSequence(number Sequence) HandleOption { return func(s *handleSettings) { s.sequence = number } }

// Sequence returns the number of a message within its saga. The first number is 1. An error fails
// the message.
type Sequence func(m *consumer.Message) (int64, error)

// Start defines f as the step that starts a saga with a message of type typ. If the saga exists,
// the step of Handle for the same type runs instead. Without such a step the message has no effect,
// because the saga was started before.
func (s *Saga[S, I]) Start(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.defineRoute(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.start != nil
		r.start = f
		return taken
	})
}

// StartOrHandle defines f as the step for messages of type typ, whether the saga exists or not.
func (s *Saga[S, I]) StartOrHandle(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.defineRoute(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.start != nil || r.handle != nil
		r.start, r.handle = f, f
		return taken
	})
}

// Handle defines f as the step for messages of type typ if the saga exists. If it does not exist
// and the message does not start it, the callback of NotFound runs. Without such a callback, the
// message fails with a *NotFoundError.
func (s *Saga[S, I]) Handle(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.defineRoute(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.handle != nil
		r.handle = f
		return taken
	})
}

// NotFound defines f as the callback for messages of these types whose saga does not exist. Without
// types, it applies to all types. f may call Emit.
func (s *Saga[S, I]) NotFound(f func(ctx context.Context, id I, m *consumer.Message) error, types ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()

	if f == nil {
		s.problems = append(s.problems, "NotFound without a function")
	}
	if len(types) == 0 {
		types = []string{""}
	}

	for _, t := range types {
		if s.notFound[t] != nil {
			s.problems = append(s.problems, fmt.Sprintf("NotFound is given twice for type %q", t))
		}
		s.notFound[t] = f
	}
}

// Timeout defines f as the step for the timeout name, which a step has requested with
// Instance.Timeout. A timeout is ignored if the saga was completed, or if the timeout was canceled
// or requested again, before it arrived.
func (s *Saga[S, I]) Timeout(name string, f Func[S, I]) {
	if name == "" {
		s.addProblem("a timeout without a name")
		return
	}

	s.defineRoute(s.TimeoutType(name), ByHeader[I](), f, nil, func(r *route[S, I]) bool {
		taken := r.handle != nil || r.start != nil
		r.handle, r.timeout = f, name
		return taken
	})
}

// TimeoutType returns the type of the event for the timeout name: "<saga>.<name>".
func (s *Saga[S, I]) TimeoutType(name string) string { return s.name + "." + name }

// defineRoute sets a part of the route for typ. set reports whether that part was defined before.
func (s *Saga[S, I]) defineRoute(
	typ string, by Correlate[I], f Func[S, I], opts []HandleOption, set func(*route[S, I]) (taken bool),
) {
	s.mu.Lock()
	defer s.mu.Unlock()

	var h handleSettings
	for _, o := range opts {
		o(&h)
	}

	switch {
	case typ == "":
		s.problems = append(s.problems, "a callback is defined for no type of message")
	case strings.Contains(typ, "*"):
		s.problems = append(s.problems, fmt.Sprintf("type %q is a pattern; use the exact name of a type", typ))
	case by == nil:
		s.problems = append(s.problems, fmt.Sprintf("type %q has no correlation function; "+
			"use ByHeader if the header is sufficient", typ))
	case f == nil:
		s.problems = append(s.problems, fmt.Sprintf("type %q has no callback", typ))
	}

	r := s.routes[typ]
	if set(&r) {
		s.problems = append(s.problems, fmt.Sprintf("type %q is defined twice", typ))
	}

	r.by = by
	if h.sequence != nil {
		r.sequence = h.sequence
	}

	s.routes[typ] = r
}

func (s *Saga[S, I]) addProblem(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, text)
}

// Messages returns the types of messages that the saga handles, including timeouts, sorted.
func (s *Saga[S, I]) Messages() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.routes))
}

// typeInfo describes the saga as it is defined now.
func (s *Saga[S, I]) typeInfo() TypeInfo {
	return TypeInfo{Name: s.name, Owner: s.owner, ID: kindOf[I](), Messages: s.Messages()}
}

// Handler returns a handler for all messages of the saga. It uses a copy of the definition, so
// later changes have no effect. The error is a *DefinitionError that lists all mistakes.
func (s *Saga[S, I]) Handler() (consumer.Handler, error) {
	s.mu.Lock()
	defer s.mu.Unlock()

	problems := slices.Clone(s.problems)
	starts := func(r route[S, I]) bool { return r.start != nil }
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.routes)), starts) {
		problems = append(problems, "no message starts it")
	}
	for typ := range s.notFound {
		if _, ok := s.routes[typ]; !ok && typ != "" {
			problems = append(problems, fmt.Sprintf("NotFound for type %q, which the saga does not handle", typ))
		}
	}

	if len(problems) > 0 {
		return consumer.Handler{}, &DefinitionError{Saga: s.name, Problems: problems}
	}

	h := &handler[S, I]{saga: s, routes: maps.Clone(s.routes), notFound: maps.Clone(s.notFound)}
	return consumer.Func(h.Handle, slices.Sorted(maps.Keys(s.routes))...), nil
}

// Registrar accepts the handler of a saga. *consumer.Consumer implements it.
type Registrar interface {
	Handle(name string, h consumer.Handler, opts ...consumer.HandlerOption) error
}

// Register registers the saga for all its types of messages. It uses a copy of the definition, so
// later changes have no effect. All types share one handler with the name of the saga, which has
// its own marks in the inbox. Other sagas and handlers may take the same types.
//
// The consumer must also read the topic of the timeouts: see WithAggregate. The error is a
// *DefinitionError, or the error of the consumer.
func (s *Saga[S, I]) Register(c Registrar, opts ...consumer.HandlerOption) error {
	h, err := s.Handler()
	if err != nil {
		return err
	}

	if err := c.Handle(s.name, h, opts...); err != nil {
		return fmt.Errorf("registering saga %s: %w", s.name, err)
	}
	return nil
}
