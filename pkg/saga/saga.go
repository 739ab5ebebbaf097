package saga

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/internal/service/usage"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// HeaderID is the name of the header that contains the id of the saga. Every event that a step emits has it. A service that
// answers such an event passes the header on with Reply.
const HeaderID = "saga-id"

// Reply returns ev with the saga's id of message, for a service that answers an event of a saga. If message has no such id, Reply returns
// ev unchanged.
func Reply(message *consumer.Message, ev event.Event) event.Event {
	id, ok := message.Header(HeaderID)
	if !ok {
		return ev
	}
	return ev.With(event.WithHeader(HeaderID, id))
}

// Saga is the definition of one kind of process: the type S of its state, which is stored with bson tags, and the steps for
// its messages. Complete the definition before you call Handler. It is not safe for concurrent changes.
type Saga[S any] struct {
	name     string
	settings settings
	routes   map[string]*route[S] // by the name of the message
	problems []string             // mistakes in the definition
}

// Step handles a message with payload P. If it returns nil, the changes of in.State and the events of in are stored. If it
// returns an error, the saga does not change, and the consumer's Retry decides about the message. For a tombstone, p is the
// zero value and in.Message().Tombstone is true.
type Step[S, P any] func(ctx context.Context, in *Instance[S], p P) error

// route defines the handling of the messages with one name. Its functions get the decoded payload.
type route[S any] struct {
	payload   reflect.Type
	decode    func(ctx context.Context, data []byte) (any, error)
	id        func(payload any) string // nil if not defined, like all functions below
	number    func(payload any) int64
	start, on func(ctx context.Context, in *Instance[S], payload any) error
	missing   func(ctx context.Context, id string, payload any) error
	timeout   string // name of the timeout, or "" for other messages
}

// Define begins the definition of a saga. Its name is also the name of its collection. Handler reports mistakes.
func Define[S any](name string, opts ...Option) *Saga[S] {
	saga := &Saga[S]{name: name, routes: map[string]*route[S]{}}
	for _, o := range opts {
		if o != nil {
			o.applyTo(&saga.settings)
		}
	}

	set := &saga.settings
	set.ids = cmp.Or(set.ids, sagas.String)
	set.owner = cmp.Or(set.owner, typeOwner[S]())
	set.aggregate = cmp.Or(set.aggregate, name)
	set.keep = cmp.Or(set.keep, 7*24*time.Hour)
	set.held = cmp.Or(set.held, 100)

	// The name becomes the name of a collection, so the limits of MongoDB apply.
	if name == "" || len(name) > 200 || name == sagas.TypesCollection ||
		strings.ContainsAny(name, "$\x00") || strings.HasPrefix(name, "system.") {
		saga.addProblem("the name %q is no valid collection name, or it is %s", name, sagas.TypesCollection)
	}
	// "1" is a valid id of each kind but UUID.
	if _, err := sagas.ParseID(set.ids, "1"); err != nil && set.ids != sagas.UUID {
		saga.addProblem("unknown kind of ids %q", set.ids)
	}
	return saga
}

// typeOwner returns the default owner of a saga: the Go type of its state with the path of its package.
func typeOwner[S any]() string {
	goType := reflect.TypeFor[S]()

	// Built-in and unnamed types have no package.
	if goType.Name() == "" || goType.PkgPath() == "" {
		return goType.String()
	}
	return goType.PkgPath() + "." + goType.Name()
}

// Name returns the name of the saga, which is also the name of its collection.
func (s *Saga[S]) Name() string { return s.name }

func (s *Saga[S]) addProblem(format string, args ...any) {
	s.problems = append(s.problems, fmt.Sprintf(format, args...))
}

// Start defines the step that starts a saga with an event of type eventType. If the saga exists, the step of On for the same type
// runs instead. Without such a step, or if the saga is complete, the event has no effect.
func Start[S, P any](saga *Saga[S], eventType event.Type[P], step Step[S, P], opts ...StepOption[P]) {
	route := addRoute(saga, eventType, opts)
	setStep(saga, &route.start, eventType, step)
}

// On defines the step for events of type eventType if the saga exists. If the saga is complete, the event has no effect. If it does
// not exist and the event does not start it, the event fails with ErrNotFound, unless Missing takes it.
func On[S, P any](saga *Saga[S], eventType event.Type[P], step Step[S, P], opts ...StepOption[P]) {
	route := addRoute(saga, eventType, opts)
	setStep(saga, &route.on, eventType, step)
}

// StartOrOn defines the step for events of type eventType, whether the saga exists or not.
func StartOrOn[S, P any](saga *Saga[S], eventType event.Type[P], step Step[S, P], opts ...StepOption[P]) {
	Start(saga, eventType, step, opts...)
	On(saga, eventType, step)
}

// Missing defines handle as the callback for events of type eventType whose saga does not exist. The context has the transaction of the
// message, so handle may append to the outbox.
func Missing[S, P any](saga *Saga[S], eventType event.Type[P], handle func(ctx context.Context, id string, p P) error) {
	route := addRoute(saga, eventType, nil)
	switch {
	case handle == nil:
		saga.addProblem("Missing for type %q has no function", eventType.Name)
	case route.missing != nil:
		saga.addProblem("Missing is given twice for type %q", eventType.Name)
	}
	route.missing = func(ctx context.Context, id string, payload any) error { return handle(ctx, id, payloadAs[P](payload)) }
}

// Timeout defines the step for the timeout name, which a step requests with Instance.TimeoutIn. A timeout is ignored if the
// saga was completed, or if the timeout was canceled or requested again, before it arrived.
//
// A timeout is an event with the name "<saga>.<name>". Its aggregate type is that of WithAggregate.
func (s *Saga[S]) Timeout(name string, step func(ctx context.Context, instance *Instance[S]) error) {
	eventType := event.Type[any]{Aggregate: s.settings.aggregate, Name: s.timeoutType(name)}
	if name == "" {
		s.addProblem("a timeout without a name")
	}
	if step == nil {
		s.addProblem("timeout %q has no step", name)
	}

	On(s, eventType, func(ctx context.Context, instance *Instance[S], _ any) error { return step(ctx, instance) })
	s.routes[eventType.Name].timeout = name
}

// timeoutType returns the name of the event for a timeout.
func (s *Saga[S]) timeoutType(timeout string) string { return s.name + "." + timeout }

// StepOption configures the handling of events with payload P. If both Start and On take a type, an option of one of them
// applies to both.
type StepOption[P any] interface{ applyTo(*stepSettings[P]) }

type stepSettings[P any] struct {
	id     func(P) string
	number func(P) int64
}

type stepOption[P any] func(*stepSettings[P])

func (o stepOption[P]) applyTo(settings *stepSettings[P]) { o(settings) }

// By finds the id of the saga in the payload. If id returns "", the header saga-id counts. Defaults to the header saga-id,
// without it the id of the aggregate, and without that the key, for presets of the relay that do not write the aggregate.
func By[P any](id func(P) string) StepOption[P] {
	return stepOption[P](func(settings *stepSettings[P]) { settings.id = id })
}

// Sequenced handles the events of a saga in the order of their numbers, from 1. The order includes all types of events with
// this option. An early event is held in the document of the saga until all events before it have arrived. An event that was
// handled before is ignored. An event with a number of 0 or less is handled at once.
//
// If the step for a held event fails, only that event stays held: the transaction runs again without its step. It is tried again
// when another event of the sequence arrives, or another event with its number.
func Sequenced[P any](number func(P) int64) StepOption[P] {
	return stepOption[P](func(settings *stepSettings[P]) { settings.number = number })
}

// addRoute returns the route for events of type eventType, with the options added. Mistakes become problems of saga.
func addRoute[S, P any](saga *Saga[S], eventType event.Type[P], opts []StepOption[P]) *route[S] {
	existing := saga.routes[eventType.Name]
	if existing == nil {
		existing = &route[S]{
			payload: reflect.TypeFor[P](),
			decode:  func(ctx context.Context, data []byte) (any, error) { return eventType.Decode(ctx, data) },
		}
		saga.routes[eventType.Name] = existing
	}

	switch {
	case eventType.Name == "":
		saga.addProblem("a type of events has no name")
	case strings.Contains(eventType.Name, "*"):
		saga.addProblem("type %q is a pattern; use the exact name of a type", eventType.Name)
	// One type has one decoder, whichever steps use it.
	case existing.payload != reflect.TypeFor[P]():
		saga.addProblem("type %q has the payloads %s and %s", eventType.Name, existing.payload, reflect.TypeFor[P]())
	}

	var set stepSettings[P]
	for _, o := range opts {
		o.applyTo(&set)
	}
	if set.id != nil {
		existing.id = func(payload any) string { return set.id(payloadAs[P](payload)) }
	}
	if set.number != nil {
		existing.number = func(payload any) int64 { return set.number(payloadAs[P](payload)) }
	}
	return existing
}

// payloadAs returns the decoded payload. It is the zero value for a tombstone, which has no payload.
func payloadAs[P any](payload any) P {
	typed, _ := payload.(P)
	return typed
}

// setStep sets a step of a route.
func setStep[S, P any](saga *Saga[S], place *func(context.Context, *Instance[S], any) error, eventType event.Type[P], step Step[S, P]) {
	switch {
	case step == nil:
		saga.addProblem("type %q has no step", eventType.Name)
	case *place != nil:
		saga.addProblem("type %q is defined twice", eventType.Name)
	}
	*place = func(ctx context.Context, instance *Instance[S], payload any) error {
		return step(ctx, instance, payloadAs[P](payload))
	}
}

// decodePayload decodes the value of message. The error of a value that cannot be decoded is consumer.ErrMalformed.
func (r *route[S]) decodePayload(ctx context.Context, message *consumer.Message) (any, error) {
	if message.Tombstone() {
		return nil, nil
	}

	payload, err := r.decode(ctx, message.Value)
	if err == nil || errors.Is(err, codec.ErrUnavailable) {
		return payload, err
	}
	return nil, fmt.Errorf("%w: message %s of type %s: %w", consumer.ErrMalformed, message.ID, message.Name, err)
}

// Handler returns the handler of the saga for consumer.Consumer.Handle. Use Name as the name of the handler, and read the
// topic of the timeouts too: see WithAggregate. The steps emit into box, and the states are stored in its database.
//
// Handler does no I/O. It returns ErrDefinition, which lists all mistakes of the definition, also a collection that an
// entity.Collection of this process uses. The consumer creates the collection
// and its index when it starts. Its Run returns ErrDefinition if another program has a saga of this name, or if the collection of a
// new saga contains other documents.
func (s *Saga[S]) Handler(box *outbox.Box) (consumer.Handler, error) {
	problems := slices.Clone(s.problems)
	if box == nil {
		problems = append(problems, "the outbox is nil")
	}
	// Without such a step no saga would ever exist, and all messages would be Missing.
	starts := false
	for name, r := range s.routes {
		starts = starts || r.start != nil
		if r.start == nil && r.on == nil {
			problems = append(problems, fmt.Sprintf("Missing for type %q, which has no step", name))
		}
	}
	if !starts {
		problems = append(problems, "no message starts it")
	}
	if len(problems) == 0 {
		if err := claimCollection(box, s.name); err != nil {
			problems = append(problems, err.Error())
		}
	}
	if len(problems) > 0 {
		return consumer.Handler{}, fmt.Errorf("%w: %s: %s", ErrDefinition, s.name, strings.Join(problems, "; "))
	}

	handler := &handler[S]{saga: s, box: box, store: storeOf(box)}
	built := consumer.Func(handler.handleMessage, slices.Sorted(maps.Keys(s.routes))...)
	return built.WithPreparation(module.Key{}, handler.prepare), nil
}

// claimCollection returns an error if the collection of the saga contains entities.
func claimCollection(box *outbox.Box, name string) error {
	parts := box.Parts(module.Key{})
	if _, inMemory := parts.Store.(interface{ Sagas() sagas.Store }); inMemory {
		return nil
	}
	return usage.Claim(parts.Collection.Database().Collection(name), "sagas")
}

// storeOf returns the store of sagas in the database of box.
func storeOf(box *outbox.Box) sagas.Store {
	parts := box.Parts(module.Key{})
	if inMemory, ok := parts.Store.(interface{ Sagas() sagas.Store }); ok {
		return inMemory.Sagas()
	}
	return sagas.NewMongo(parts.Collection.Database())
}
