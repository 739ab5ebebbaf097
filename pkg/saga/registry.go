package saga

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Outbox is what steps emit events through. *outbox.Box is one.
type Outbox interface {
	AppendMany(ctx context.Context, events []event.Event, opts ...outbox.CallOption) error
	Cancel(ctx context.Context, id event.ID, opts ...outbox.CallOption) error
}

// Registry holds the sagas of a service: one store, one outbox, and no two sagas of one name.
type Registry struct {
	store   Store
	outbox  Outbox
	retries []time.Duration
	plain   bool

	mu    sync.Mutex
	sagas map[string]defined
}

// defined is a Saga whatever its types.
type defined interface{ info() TypeInfo }

// Option configures a Registry.
type Option func(*Registry)

// WithOutbox gives steps an outbox, in the database of the store, for what they emit, for timeouts and compensation.
func WithOutbox(o Outbox) Option { return func(r *Registry) { r.outbox = o } }

// WithRetries sets how long a step that runs in a transaction of its own, or in none, waits before each of its further
// attempts after a conflict. Defaults to 50, 100 and 250 ms; without arguments there are none. Steps within a consumer's
// transaction are retried by the consumer's policy.
func WithRetries(waits ...time.Duration) Option {
	return func(r *Registry) { r.retries = slices.Clone(waits) }
}

// WithoutTransaction lets steps run in no transaction where their context has none. Then the version alone keeps a saga's
// steps apart, and the events of a step are appended after its state was saved: a process that dies between the two has
// made the step and lost its events. The outbox must allow it too, by outbox.WithoutTransaction.
func WithoutTransaction() Option { return func(r *Registry) { r.plain = true } }

// NewRegistry does no I/O.
func NewRegistry(store Store, opts ...Option) (*Registry, error) {
	r := &Registry{
		store:   store,
		retries: []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond},
		sagas:   map[string]defined{},
	}
	for _, o := range opts {
		o(r)
	}
	if store == nil {
		return nil, errors.New("saga registry: the store is nil")
	}
	for _, d := range r.retries {
		if d < 0 {
			return nil, fmt.Errorf("saga registry: a retry after %s; it must not be negative", d)
		}
	}
	return r, nil
}

func (r *Registry) add(name string, s defined) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sagas[name] != nil {
		return &DuplicateSagaError{Saga: name}
	}
	r.sagas[name] = s
	return nil
}

// Types are the sagas of this registry, by name.
func (r *Registry) Types() []TypeInfo {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]TypeInfo, 0, len(r.sagas))
	for _, s := range r.sagas {
		list = append(list, s.info())
	}
	slices.SortFunc(list, func(a, b TypeInfo) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Prepare makes the collections and indexes of all sagas and writes their types down; call it once at the start of a
// service. It reports every saga that cannot be: an *OwnerError for each name that another program uses for another saga.
// Without it tombstones are kept for ever.
func (r *Registry) Prepare(ctx context.Context) error {
	var errs []error
	for _, t := range r.Types() {
		if err := r.store.Prepare(ctx, t); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Desk looks into the sagas of this registry.
func (r *Registry) Desk() *Desk {
	return &Desk{store: r.store, types: func(context.Context) ([]TypeInfo, error) { return r.Types(), nil }}
}
