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
)

// Outbox is the outbox to which steps emit events. *outbox.Box implements it.
type Outbox interface {
	Append(ctx context.Context, events ...event.Event) error
	Cancel(ctx context.Context, id event.ID) error
}

// Registry contains the sagas of a service. They share a store and an outbox, and their names are
// unique.
type Registry struct {
	store   Store
	outbox  Outbox
	retries []time.Duration
	plain   bool // steps may run without a transaction

	mu    sync.Mutex
	sagas map[string]definition
}

// definition is a Saga of any type.
type definition interface{ typeInfo() TypeInfo }

// Option configures a Registry. See NewRegistry.
type Option func(*Registry)

// WithOutbox sets the outbox for events, timeouts and compensations. It must be in the database of
// the store. Without an outbox, a step that emits an event fails with ErrNoOutbox.
func WithOutbox(o Outbox) Option { return func(r *Registry) { r.outbox = o } }

// WithRetries sets the waiting times before further attempts after a conflict. It applies to steps
// that do not run in a transaction of their caller. The policy of a consumer decides about retries
// of steps that run in its transaction. Defaults to 50, 100 and 250 ms. Without arguments, there
// are no retries.
func WithRetries(waits ...time.Duration) Option {
	return func(r *Registry) { r.retries = slices.Clone(waits) }
}

// WithoutTransaction allows steps without a transaction if their context has none. Then only the
// version keeps simultaneous steps apart. The events of a step are appended after its state was
// stored: if the process crashes in between, the step is done and its events are lost. The outbox
// needs the option outbox.WithoutTransaction as well.
func WithoutTransaction() Option { return func(r *Registry) { r.plain = true } }

// NewRegistry returns a Registry without sagas. It does no I/O. The error reports a nil store or a
// negative waiting time.
func NewRegistry(store Store, opts ...Option) (*Registry, error) {
	r := &Registry{
		store:   store,
		retries: []time.Duration{50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond},
		sagas:   map[string]definition{},
	}
	for _, o := range opts {
		o(r)
	}
	if store == nil {
		return nil, errors.New("saga registry: the store is nil")
	}

	for _, d := range r.retries {
		if d < 0 {
			return nil, fmt.Errorf("saga registry: invalid retry after %s: it must not be negative", d)
		}
	}

	return r, nil
}

// addSaga adds s under its name. The error is a *DuplicateSagaError.
func (r *Registry) addSaga(name string, s definition) error {
	r.mu.Lock()
	defer r.mu.Unlock()

	if r.sagas[name] != nil {
		return &DuplicateSagaError{Saga: name}
	}

	r.sagas[name] = s
	return nil
}

// Types returns the sagas of this registry, sorted by name.
func (r *Registry) Types() []TypeInfo {
	r.mu.Lock()
	defer r.mu.Unlock()

	list := make([]TypeInfo, 0, len(r.sagas))
	for _, s := range r.sagas {
		list = append(list, s.typeInfo())
	}

	slices.SortFunc(list, func(a, b TypeInfo) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// Prepare creates the collections and indexes of all sagas and stores their types. Call it once
// when a service starts. Without it, tombstones are never deleted. The error joins the errors of
// all sagas that failed. It contains an *OwnerError for each name that another program uses for
// another saga.
func (r *Registry) Prepare(ctx context.Context) error {
	var errs []error
	for _, t := range r.Types() {
		if err := r.store.Prepare(ctx, t); err != nil {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Desk returns a Desk for the sagas of this registry.
func (r *Registry) Desk() *Desk {
	return &Desk{store: r.store, types: func(context.Context) ([]TypeInfo, error) { return r.Types(), nil }}
}
