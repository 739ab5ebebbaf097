package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/pkg/event"
)

// Outbox stores events: an *outbox.Box, or the in-memory one.
type Outbox interface {
	Append(ctx context.Context, events ...event.Event) error
}

// Emit processes one event on its way to the outbox. Its context is the caller's, with the session of the transaction.
type Emit func(ctx context.Context, ev event.Event) error

// EmitMiddleware wraps an Emit. It may change the event and its type, or pass one or more other events to next. If it returns
// ErrDrop, the event is not stored, and the call continues with the other events. The first middleware of a list is the
// outermost.
type EmitMiddleware func(next Emit) Emit

// DefaultBatchLimit is the maximum number of events of one call without BatchLimit.
const DefaultBatchLimit = 10_000

// Emitter is an outbox with middlewares in front of it. All events of a call pass the middlewares one after another, in their
// order. Then one Append of the outbox stores them. If one event is rejected, none is stored. next therefore returns before the event
// is stored: a write that must commit together with the event belongs in the transaction.
//
// An Emitter is safe for concurrent use. It does no I/O except the outbox's, and starts no goroutine.
type Emitter struct {
	box          Outbox
	publisher    Publisher
	middlewares  []EmitMiddleware
	batchLimit   int
	slots        semaphore
	waiting      atomic.Int64
	maxWaiting   int64 // 0: no bound
	defaultTopic func(ev event.Event) string
}

// EmitOption configures an Emitter.
type EmitOption func(*Emitter)

// EmitVia adds middlewares.
func EmitVia(mws ...EmitMiddleware) EmitOption {
	return func(e *Emitter) { e.middlewares = append(e.middlewares, mws...) }
}

// BatchLimit sets the maximum number of events of one call. Defaults to DefaultBatchLimit.
func BatchLimit(n int) EmitOption { return func(e *Emitter) { e.batchLimit = n } }

// EmitConcurrency sets how many calls may run in the middlewares at once. Defaults to DefaultMiddlewareConcurrency.
func EmitConcurrency(n int) EmitOption { return func(e *Emitter) { e.slots = newSemaphore(n) } }

// EmitBound sets how many calls may wait for a free slot of EmitConcurrency. Further calls return a *BackpressureError at
// once. Defaults to no bound.
func EmitBound(n int) EmitOption { return func(e *Emitter) { e.maxWaiting = int64(n) } }

// EmitDirect sets the publisher of PublishDirect, and the topic of events that set none. A nil topic uses the default of the
// relay, "outbox.event.<aggregatetype>".
func EmitDirect(p Publisher, topic func(ev event.Event) string) EmitOption {
	return func(e *Emitter) { e.publisher, e.defaultTopic = p, topic }
}

// NewEmitter returns an Emitter in front of box. It does no I/O. Its errors are ErrConfiguration.
func NewEmitter(box Outbox, opts ...EmitOption) (*Emitter, error) {
	e := &Emitter{box: box, batchLimit: DefaultBatchLimit, slots: newSemaphore(0)}
	for _, o := range opts {
		o(e)
	}
	if e.defaultTopic == nil {
		e.defaultTopic = func(ev event.Event) string { return "outbox.event." + ev.Aggregate().Type }
	}

	switch {
	case box == nil:
		return nil, fmt.Errorf("%w: emitter: the outbox is nil", ErrConfiguration)
	case e.batchLimit < 1:
		return nil, fmt.Errorf("%w: emitter: invalid batch limit %d: set at least 1", ErrConfiguration, e.batchLimit)
	case e.maxWaiting < 0:
		return nil, fmt.Errorf("%w: emitter: invalid bound %d: it must not be negative", ErrConfiguration, e.maxWaiting)
	case slices.ContainsFunc(e.middlewares, func(m EmitMiddleware) bool { return m == nil }):
		return nil, fmt.Errorf("%w: emitter: a middleware is nil", ErrConfiguration)
	}
	return e, nil
}

// Append passes the events through the middlewares, and stores the resulting events in the transaction of ctx. In
// addition to the errors of the outbox and of the middlewares, it returns a *BatchSizeError or a *BackpressureError. A
// *BackpressureError, and a *BatchSizeError for its arguments, is returned before any middleware ran.
func (e *Emitter) Append(ctx context.Context, events ...event.Event) error {
	out, err := e.applyMiddlewares(ctx, events)
	if err != nil {
		return err
	}
	if len(out) == 0 {
		return nil
	}
	return e.box.Append(ctx, out...)
}

// Schedule is Append for one event that is due at the given time. It returns the id of the stored event. If a middleware
// drops the event, it returns ErrDrop.
func (e *Emitter) Schedule(ctx context.Context, at time.Time, ev event.Event) (event.ID, error) {
	out, err := e.applyMiddlewares(ctx, []event.Event{ev.With(event.WithDueAt(at))})
	if err != nil {
		return event.ID{}, err
	}
	if len(out) == 0 {
		return event.ID{}, fmt.Errorf("event %s: %w", ev.ID(), ErrDrop)
	}

	if err := e.box.Append(ctx, out...); err != nil {
		return event.ID{}, err
	}
	return out[0].ID(), nil
}

// PublishDirect writes the events to Kafka without the outbox: immediately, and independently of any transaction. The events
// pass the middlewares. PublishDirect blocks until all in-sync replicas have the records. After an error, any of the records
// may have been written. The records have the form of the relay's preset "plain".
func (e *Emitter) PublishDirect(ctx context.Context, events ...event.Event) error {
	if e.publisher == nil {
		return &UnsupportedError{Operation: "PublishDirect", Needs: "a Publisher, by EmitDirect"}
	}

	out, err := e.applyMiddlewares(ctx, events)
	if err != nil {
		return err
	}

	// The list keeps the topics in the order of their first event.
	var topics []string
	byTopic := map[string][]*Message{}
	for _, ev := range out {
		if err := ev.Validate(); err != nil {
			return err
		}
		m, err := directMessage(ev)
		if err != nil {
			return err
		}

		topic := cmp.Or(ev.Topic(), e.defaultTopic(ev))
		if byTopic[topic] == nil {
			topics = append(topics, topic)
		}
		byTopic[topic] = append(byTopic[topic], m)
	}

	for _, topic := range topics {
		if err := e.publisher.Publish(ctx, topic, byTopic[topic]); err != nil {
			return fmt.Errorf("publishing to %s: %w", topic, err)
		}
	}
	return nil
}

// directMessage returns the event as the relay would write it.
func directMessage(ev event.Event) (*Message, error) {
	raw, err := ev.MarshalBSON()
	var v envelope.View
	if err == nil {
		err = envelope.Parse(raw, &v)
	}
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
	}
	if v.HasDueAt {
		return nil, &UnsupportedError{
			Operation: "PublishDirect of a scheduled event",
			Needs:     "the outbox: use Schedule",
		}
	}

	body, err := ev.Payload()
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
	}

	m := &Message{
		ID:            ev.ID().String(),
		Name:          ev.Name(),
		Aggregate:     ev.Aggregate(),
		ContentType:   ev.ContentType(),
		SchemaVersion: string(v.SchemaVersion),
		Key:           []byte(ev.Key()),
		Value:         body,
	}
	for _, h := range []event.Header{
		{Key: HeaderID, Value: []byte(m.ID)},
		{Key: "type", Value: []byte(m.Name)},
		{Key: record.HeaderAggregateType, Value: []byte(m.Aggregate.Type)},
		{Key: record.HeaderAggregateID, Value: []byte(m.Aggregate.ID)},
		{Key: record.HeaderContentType, Value: []byte(m.ContentType)},
		{Key: record.HeaderSchemaVersion, Value: []byte(m.SchemaVersion)},
	} {
		if len(h.Value) > 0 {
			m.Headers = append(m.Headers, h)
		}
	}
	for _, h := range ev.Headers() {
		m.Headers = append(m.Headers, event.Header(h))
	}
	return m, nil
}

// applyMiddlewares passes the events through the middlewares and returns the resulting events. It blocks until a slot of
// EmitConcurrency is free.
func (e *Emitter) applyMiddlewares(ctx context.Context, events []event.Event) ([]event.Event, error) {
	if len(events) > e.batchLimit {
		return nil, &BatchSizeError{Size: len(events), Limit: e.batchLimit}
	}
	if len(e.middlewares) == 0 {
		return events, nil
	}

	if err := e.acquireSlot(ctx); err != nil {
		return nil, err
	}
	defer e.slots.release()

	out := make([]event.Event, 0, len(events))
	seen := make(map[event.ID]bool, len(events))
	emit := Emit(func(_ context.Context, ev event.Event) error {
		if seen[ev.ID()] {
			problem := "next was called twice with one event; give each its own id"
			return &InvalidError{ID: ev.ID().String(), Type: ev.Name(), Problems: []string{problem}}
		}
		seen[ev.ID()] = true
		out = append(out, ev)
		return nil
	})
	for _, mw := range slices.Backward(e.middlewares) {
		emit = mw(emit)
	}

	for _, ev := range events {
		if err := emit(ctx, ev); err != nil && !errors.Is(err, ErrDrop) {
			return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
		}
	}

	// A middleware can turn one event into several.
	if len(out) > e.batchLimit {
		return nil, &BatchSizeError{Size: len(out), Limit: e.batchLimit}
	}
	return out, nil
}

// acquireSlot blocks until a slot of EmitConcurrency is free. It returns a *BackpressureError if too many calls wait.
func (e *Emitter) acquireSlot(ctx context.Context) error {
	select {
	case e.slots <- struct{}{}:
		return nil
	default:
	}

	defer e.waiting.Add(-1)
	if n := e.waiting.Add(1); e.maxWaiting > 0 && n > e.maxWaiting {
		return &BackpressureError{What: "the queue of the emitter", Limit: int(e.maxWaiting)}
	}
	return e.slots.acquire(ctx)
}

// DeliverBy passes the expiry of events on to consumers: events that expire get the header HeaderDeliverBy, and the policy of
// a consumer acts on it. The relay itself stops sending an event when it expires.
func DeliverBy() EmitMiddleware {
	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			_, set := ev.Header(HeaderDeliverBy)
			if at, ok := ev.ExpiresAt(); ok && !set {
				ev = ev.With(event.WithHeader(HeaderDeliverBy, formatMillis(at)))
			}
			return next(ctx, ev)
		}
	}
}
