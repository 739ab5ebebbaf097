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

// DefaultHeldLimit is how many early messages of one saga are held unless WithHeldLimit says otherwise.
const DefaultHeldLimit = 100

// Func is a step of a saga. What it changes in in.State, and what it emits, is kept when it returns nil; an error leaves
// the saga as it was. consumer.ErrDrop leaves it as it was too, and fails nothing: what the step itself wrote with its
// context is committed, and where it is in sequence, its number has had its turn.
type Func[S any, I Identifier] func(ctx context.Context, in *Instance[S, I], m *consumer.Message) error

// JSON is a step that takes the message's value decoded as JSON. A value that cannot be decoded is a *PayloadError.
func JSON[P, S any, I Identifier](f func(ctx context.Context, in *Instance[S, I], p P) error) Func[S, I] {
	return Payload(json.Unmarshal, f)
}

// ExtJSON is JSON for what the outbox makes of a payload that was appended as a document: relaxed Extended JSON.
func ExtJSON[P, S any, I Identifier](f func(ctx context.Context, in *Instance[S, I], p P) error) Func[S, I] {
	return Payload(unmarshalExtJSON, f)
}

// Payload is a step that takes the message's decoded value.
func Payload[P, S any, I Identifier](decode Decode, f func(ctx context.Context, in *Instance[S, I], p P) error) Func[S, I] {
	return func(ctx context.Context, in *Instance[S, I], m *consumer.Message) error {
		p, err := payload[P](decode, m)
		if err != nil {
			return err
		}
		return f(ctx, in, p)
	}
}

// Saga is the definition of one kind of process: what its state is, which messages it takes and what they do. Define it
// whole before Register or Handler, which see what is there when they are called.
type Saga[S any, I Identifier] struct {
	name      string
	reg       *Registry
	owner     string
	aggregate string
	keep      time.Duration
	heldLimit int
	unguarded bool

	mu       sync.Mutex
	routes   map[string]route[S, I]
	notFound map[string]func(context.Context, I, *consumer.Message) error
	problems []string
}

// route is what becomes of one type of message.
type route[S any, I Identifier] struct {
	by            Correlate[I]
	start, handle Func[S, I]
	sequence      Sequence
	timeout       string // its name, if this is one
}

// SagaOption configures one saga.
type SagaOption func(*sagaSettings)

type sagaSettings struct {
	owner, aggregate string
	keep             time.Duration
	heldLimit        int
	unguarded        bool
	problems         []string
}

// WithTombstone keeps a completed saga's document for that long, by the server's clock: messages that come late are
// ignored and start nothing. By default completion deletes the document, and a late start begins afresh.
func WithTombstone(keep time.Duration) SagaOption {
	return func(s *sagaSettings) {
		if keep < time.Millisecond {
			s.problems = append(s.problems, fmt.Sprintf("a tombstone for %s; at least a millisecond is wanted", keep))
		}
		s.keep = keep
	}
}

// WithoutCompletionGuard lets a completion end a saga also if it was changed meanwhile, instead of running again on what
// the change left. In a transaction the server still refuses what happens at the same time.
func WithoutCompletionGuard() SagaOption { return func(s *sagaSettings) { s.unguarded = true } }

// WithOwner says whose saga this is, to tell it from another one of the same name in another program. Defaults to the Go
// type of the state, so give it before that is renamed.
func WithOwner(owner string) SagaOption { return func(s *sagaSettings) { s.owner = owner } }

// WithAggregate sets the aggregate type of timeouts, which decides the topic that they come by: outbox.event.<aggregate>
// unless routed otherwise. Defaults to the saga's name.
func WithAggregate(aggregateType string) SagaOption {
	return func(s *sagaSettings) { s.aggregate = aggregateType }
}

// WithHeldLimit sets how many early messages of one saga are held, of at most 8 MiB together. Defaults to DefaultHeldLimit.
func WithHeldLimit(n int) SagaOption {
	return func(s *sagaSettings) {
		if n < 1 {
			s.problems = append(s.problems, fmt.Sprintf("a limit of %d held messages; at least 1 is wanted", n))
		}
		s.heldLimit = n
	}
}

// New defines a saga in the registry. Its name is its collection. It does no I/O. The error is a *DuplicateSagaError for
// a name that the registry has, or a *DefinitionError.
func New[S any, I Identifier](r *Registry, name string, opts ...SagaOption) (*Saga[S, I], error) {
	set := sagaSettings{owner: ownerOf[S](), aggregate: name, heldLimit: DefaultHeldLimit}
	for _, o := range opts {
		o(&set)
	}
	if !legalName(name) {
		set.problems = append(set.problems, "the name is not a legal collection name, or is "+DefaultTypes)
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
		name: name, reg: r, owner: set.owner, aggregate: set.aggregate, keep: set.keep, heldLimit: set.heldLimit, unguarded: set.unguarded,
		routes: map[string]route[S, I]{}, notFound: map[string]func(context.Context, I, *consumer.Message) error{},
	}
	if err := r.add(name, s); err != nil {
		return nil, err
	}
	return s, nil
}

func ownerOf[S any]() string {
	t := reflect.TypeFor[S]()
	if t.Name() == "" || t.PkgPath() == "" {
		return t.String()
	}
	return t.PkgPath() + "." + t.Name()
}

// Name is the saga's name, which is its collection.
func (s *Saga[S, I]) Name() string { return s.name }

// HandleOption changes how one type of message is handled.
type HandleOption func(*handleSettings)

type handleSettings struct{ sequence Sequence }

// InSequence handles the messages of a saga in the order of their numbers, over all types that have this option: one that
// is early is held in the saga's document until those before it have come, one that was handled already is ignored. A
// number of 0 or less says that a message has no place in the order.
func InSequence(number Sequence) HandleOption { return func(s *handleSettings) { s.sequence = number } }

// Sequence is the number of a message within its saga. The first is 1.
type Sequence func(m *consumer.Message) (int64, error)

// Start begins a saga with a message of that type. If the saga is there already, the message is for the Handle of the same
// type, and without one it changes nothing: somebody has started it before.
func (s *Saga[S, I]) Start(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.define(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.start != nil
		r.start = f
		return taken
	})
}

// StartOrHandle takes messages of that type whether the saga is there or not.
func (s *Saga[S, I]) StartOrHandle(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.define(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.start != nil || r.handle != nil
		r.start, r.handle = f, f
		return taken
	})
}

// Handle takes messages of that type for a saga that is there. For one that is not, and that the message does not start,
// NotFound is asked; without it the message is refused with a *NotFoundError.
func (s *Saga[S, I]) Handle(typ string, by Correlate[I], f Func[S, I], opts ...HandleOption) {
	s.define(typ, by, f, opts, func(r *route[S, I]) bool {
		taken := r.handle != nil
		r.handle = f
		return taken
	})
}

// NotFound takes messages of these types, or of all types if none is given, whose saga is not there. It may Emit.
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

// Timeout takes the timeout of that name, which a step has asked for with Instance.Timeout. One that comes after the saga
// was completed, or after it was cancelled or set anew, is ignored.
func (s *Saga[S, I]) Timeout(name string, f Func[S, I]) {
	if name == "" {
		s.problem("a timeout without a name")
		return
	}
	s.define(s.TimeoutType(name), ByHeader[I](), f, nil, func(r *route[S, I]) bool {
		taken := r.handle != nil || r.start != nil
		r.handle, r.timeout = f, name
		return taken
	})
}

// TimeoutType is the event type of the timeout of that name: "<saga>.<name>".
func (s *Saga[S, I]) TimeoutType(name string) string { return s.name + "." + name }

func (s *Saga[S, I]) define(typ string, by Correlate[I], f Func[S, I], opts []HandleOption, set func(*route[S, I]) (taken bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var h handleSettings
	for _, o := range opts {
		o(&h)
	}
	switch {
	case typ == "":
		s.problems = append(s.problems, "a callback for no type of message")
	case strings.Contains(typ, "*"):
		s.problems = append(s.problems, fmt.Sprintf("type %q is a pattern; a saga takes types by their exact names", typ))
	case by == nil:
		s.problems = append(s.problems, fmt.Sprintf("type %q has no correlation function; ByHeader says that the header is enough", typ))
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

func (s *Saga[S, I]) problem(text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, text)
}

// Messages are the types of messages that the saga takes, timeouts included, sorted.
func (s *Saga[S, I]) Messages() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.routes))
}

func (s *Saga[S, I]) info() TypeInfo {
	return TypeInfo{Name: s.name, Owner: s.owner, ID: kindOf[I](), Messages: s.Messages()}
}

// Handler is the saga as a handler of all its types of messages, as it is defined now. The error is a *DefinitionError
// that says everything that is wrong.
func (s *Saga[S, I]) Handler() (consumer.Handler, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	problems := slices.Clone(s.problems)
	if !slices.ContainsFunc(slices.Collect(maps.Values(s.routes)), func(r route[S, I]) bool { return r.start != nil }) {
		problems = append(problems, "no message starts it")
	}
	for typ := range s.notFound {
		if _, ok := s.routes[typ]; !ok && typ != "" {
			problems = append(problems, fmt.Sprintf("NotFound for type %q, which the saga does not take", typ))
		}
	}
	if len(problems) > 0 {
		return nil, &DefinitionError{Saga: s.name, Problems: problems}
	}
	return &handler[S, I]{saga: s, routes: maps.Clone(s.routes), notFound: maps.Clone(s.notFound)}, nil
}

// Registrar is what a saga registers with. *consumer.Consumer is one.
type Registrar interface {
	Subscribe(patterns []string, h consumer.Handler, opts ...consumer.HandlerOption) error
}

// Register registers the saga, as it is defined now, for all its types of messages: one handler with the saga's name, and
// so with a place of its own in the inbox. Any number of sagas and other handlers may take the same message. The consumer
// must read the topic of the saga's timeouts too.
func (s *Saga[S, I]) Register(c Registrar, opts ...consumer.HandlerOption) error {
	h, err := s.Handler()
	if err != nil {
		return err
	}
	if err := c.Subscribe(s.Messages(), h, append([]consumer.HandlerOption{consumer.Named(s.name)}, opts...)...); err != nil {
		return fmt.Errorf("registering saga %s: %w", s.name, err)
	}
	return nil
}
