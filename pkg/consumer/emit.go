package consumer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Outbox is where events go: an *outbox.Box, or the in-memory one.
type Outbox interface {
	AppendMany(ctx context.Context, events []event.Event, opts ...outbox.CallOption) error
}

// Emit takes one event on its way to the outbox. Its context is the caller's, with the session of the transaction.
type Emit func(ctx context.Context, ev event.Event) error

// EmitMiddleware wraps an Emit: it may change the event, its type included, hand on another one or several, or return ErrDrop,
// which keeps it from being stored while the call goes on. The first given is the outermost.
type EmitMiddleware func(next Emit) Emit

// DefaultBatchLimit is how many events one call may bring unless BatchLimit says another.
const DefaultBatchLimit = 10_000

// Emitter is an outbox with middleware in front of it. All events of a call pass the middlewares, one after the other and in
// their order, and are then stored by one AppendMany, or, if one is refused, none of them. So next returns before the event
// is stored; what has to go with it belongs into the transaction.
//
// It is safe for concurrent use, costs no I/O of its own and starts no goroutine.
type Emitter struct {
	box       Outbox
	publisher Publisher
	middlewares       []EmitMiddleware
	batchLimit     int
	slots     slots
	waiting   atomic.Int64
	maxWaiting     int64
	defaultTopic     func(ev event.Event) string
}

// EmitOption configures an Emitter.
type EmitOption func(*Emitter)

// EmitVia adds middlewares.
func EmitVia(mws ...EmitMiddleware) EmitOption {
	return func(e *Emitter) { e.middlewares = append(e.middlewares, mws...) }
}

// BatchLimit sets how many events one call may bring. Defaults to DefaultBatchLimit.
func BatchLimit(n int) EmitOption { return func(e *Emitter) { e.batchLimit = n } }

// EmitConcurrency sets how many calls are in the middlewares at once. Defaults to DefaultMiddlewareConcurrency.
func EmitConcurrency(n int) EmitOption { return func(e *Emitter) { e.slots = limit(n) } }

// EmitBound sets how many calls may wait for their turn; one more gets a *BackpressureError at once. Defaults to no bound.
func EmitBound(n int) EmitOption { return func(e *Emitter) { e.maxWaiting = int64(n) } }

// EmitDirect is what PublishDirect writes with, and the topic of an event that names none; nil is the relay's default,
// "outbox.event.<aggregatetype>".
func EmitDirect(p Publisher, topic func(ev event.Event) string) EmitOption {
	return func(e *Emitter) { e.publisher, e.defaultTopic = p, topic }
}

// NewEmitter makes an Emitter in front of box. It does no I/O. Errors are ErrConfiguration.
func NewEmitter(box Outbox, opts ...EmitOption) (*Emitter, error) {
	e := &Emitter{box: box, batchLimit: DefaultBatchLimit, slots: limit(0)}
	for _, o := range opts {
		o(e)
	}
	if e.defaultTopic == nil {
		e.defaultTopic = func(ev event.Event) string { return "outbox.event." + ev.AggregateType() }
	}
	switch {
	case box == nil:
		return nil, fmt.Errorf("%w: emitter: the outbox is nil", ErrConfiguration)
	case e.batchLimit < 1:
		return nil, fmt.Errorf("%w: emitter: a batch limit of %d; at least 1", ErrConfiguration, e.batchLimit)
	case e.maxWaiting < 0:
		return nil, fmt.Errorf("%w: emitter: a bound of %d", ErrConfiguration, e.maxWaiting)
	case slices.ContainsFunc(e.middlewares, func(m EmitMiddleware) bool { return m == nil }):
		return nil, fmt.Errorf("%w: emitter: a middleware is nil", ErrConfiguration)
	}
	return e, nil
}

// Append is AppendMany for a few events.
func (e *Emitter) Append(ctx context.Context, events ...event.Event) error {
	return e.AppendMany(ctx, events)
}

// AppendMany passes the events through the middlewares and stores what comes out, in the transaction of ctx. Beside the
// errors of the outbox and of middlewares it returns a *BatchSizeError or a *BackpressureError before anything ran.
// With outbox.WithSession the middlewares see the caller's context, without that session.
func (e *Emitter) AppendMany(ctx context.Context, events []event.Event, opts ...outbox.CallOption) error {
	out, err := e.applyMiddlewares(ctx, events)
	if err != nil {
		return err
	}
	if len(out) == 0 {
		return nil
	}
	return e.box.AppendMany(ctx, out, opts...)
}

// Schedule is AppendMany for one event to be delivered at that time. An event that a middleware dropped is ErrDrop.
func (e *Emitter) Schedule(ctx context.Context, ev event.Event, at time.Time, opts ...outbox.CallOption) (event.ID, error) {
	out, err := e.applyMiddlewares(ctx, []event.Event{ev.With(event.WithDueAt(at))})
	if err == nil && len(out) == 0 {
		err = fmt.Errorf("event %s: %w", ev.ID(), ErrDrop)
	}
	if err == nil {
		err = e.box.AppendMany(ctx, out, opts...)
	}
	if err != nil {
		return event.ID{}, err
	}
	return out[0].ID(), nil
}

// PublishDirect writes the events to Kafka past the outbox: at once, and whether or not a transaction commits. It passes the
// middlewares all the same and returns when all in-sync replicas have the records; after an error any of them may be there.
// Records are as of the relay's preset "plain".
func (e *Emitter) PublishDirect(ctx context.Context, events ...event.Event) error {
	if e.publisher == nil {
		return &UnsupportedError{Operation: "PublishDirect", Needs: "a Publisher, by EmitDirect"}
	}
	out, err := e.applyMiddlewares(ctx, events)
	if err != nil {
		return err
	}
	topics, byTopic := []string(nil), map[string][]*Message{}
	for _, ev := range out {
		if err := ev.Validate(); err != nil {
			return err
		}
		m, err := directMessage(ev)
		if err != nil {
			return err
		}
		t := cmp.Or(ev.Topic(), e.defaultTopic(ev))
		if byTopic[t] == nil {
			topics = append(topics, t)
		}
		byTopic[t] = append(byTopic[t], m)
	}
	for _, t := range topics {
		if err := e.publisher.Publish(ctx, t, byTopic[t]); err != nil {
			return fmt.Errorf("publishing to %s: %w", t, err)
		}
	}
	return nil
}

// directMessage is the event as the relay would write it.
func directMessage(ev event.Event) (*Message, error) {
	if _, ok := ev.DueAt(); ok {
		return nil, &UnsupportedError{Operation: "PublishDirect of a scheduled event", Needs: "the outbox: use Schedule"}
	}
	body, err := ev.Payload()
	if err != nil {
		return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
	}
	m := &Message{
		ID: ev.ID().String(), Type: ev.Type(), AggregateType: ev.AggregateType(), AggregateID: ev.AggregateID(),
		ContentType: ev.ContentType(), SchemaVersion: ev.SchemaVersion(), Key: []byte(ev.Key()), Value: body,
	}
	for _, h := range []Header{
		{HeaderID, []byte(m.ID)},
		{"type", []byte(m.Type)},
		{"aggregatetype", []byte(m.AggregateType)},
		{"aggregateid", []byte(m.AggregateID)},
		{"contenttype", []byte(m.ContentType)},
		{"schemaversion", []byte(m.SchemaVersion)},
	} {
		if len(h.Value) > 0 {
			m.Headers = append(m.Headers, h)
		}
	}
	for _, h := range ev.Headers() {
		m.Headers = append(m.Headers, Header(h))
	}
	return m, nil
}

// applyMiddlewares runs the events through the middlewares and returns what came out.
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
	defer e.slots.leave()
	out := make([]event.Event, 0, len(events))
	seen := make(map[event.ID]bool, len(events))
	run := Emit(func(_ context.Context, ev event.Event) error {
		if seen[ev.ID()] {
			return &InvalidError{ID: ev.ID().String(), Type: ev.Type(), Problems: []string{"next was called twice with one event; give each its own id"}}
		}
		seen[ev.ID()] = true
		out = append(out, ev)
		return nil
	})
	for _, mw := range slices.Backward(e.middlewares) {
		run = mw(run)
	}
	for _, ev := range events {
		if err := run(ctx, ev); err != nil && !errors.Is(err, ErrDrop) {
			return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
		}
	}
	if len(out) > e.batchLimit { // a middleware made several of one
		return nil, &BatchSizeError{Size: len(out), Limit: e.batchLimit}
	}
	return out, nil
}

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
	return e.slots.enter(ctx)
}

// DeliverBy tells consumers until when an event is worth anything: events that expire get the header HeaderDeliverBy, which
// a consumer's policy acts on. The relay itself stops delivering them at that time.
func DeliverBy() EmitMiddleware {
	return func(next Emit) Emit {
		return func(ctx context.Context, ev event.Event) error {
			if at, ok := ev.ExpiresAt(); ok && !ev.HasHeader(HeaderDeliverBy) {
				ev = ev.With(event.WithHeader(HeaderDeliverBy, millis(at)))
			}
			return next(ctx, ev)
		}
	}
}
