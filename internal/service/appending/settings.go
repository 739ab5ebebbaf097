// Package appending turns the events of a call into the envelopes that an outbox stores: through the middleware,
// with the trace context and the cause of the caller, and within the size limit.
package appending

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

const (
	defaultCollection = "outbox"

	// largestMaxSize is below the size limit of MongoDB, because a change event carries the envelope inside
	// another document.
	largestMaxSize = 15 << 20
)

// ErrTooLarge means that an envelope exceeds the size limit. The text has both sizes.
var ErrTooLarge = errors.New("envelope too large")

// Next passes an event on.
type Next = func(ctx context.Context, ev event.Event) error

// Middleware processes each event on its way to the outbox. See outbox.Middleware.
type Middleware = func(next Next) Next

// AsMiddleware converts a function with named types. It returns nil for nil.
func AsMiddleware[M ~func(F) F, F ~func(ctx context.Context, ev event.Event) error](middleware M) Middleware {
	if middleware == nil {
		return nil
	}
	return func(next Next) Next { return Next(middleware(F(next))) }
}

// Settings are the settings of an outbox. Zero values are the defaults.
type Settings struct {
	Collection string
	MaxSize    int            // of an envelope, in bytes
	Telemetry  telemetry.Sink // of the headers that are added to each event
	Middleware []Middleware   // the first is the outermost
}

// Complete sets the defaults, and returns the problems of the settings.
func (s *Settings) Complete() error {
	if s.Collection == "" {
		s.Collection = defaultCollection
	}
	if s.MaxSize == 0 {
		s.MaxSize = record.MaxEnvelope
	}
	if s.Telemetry == nil {
		s.Telemetry = telemetry.OTel()
	}

	var problems []error
	if strings.ContainsAny(s.Collection, "$\x00") || strings.HasPrefix(s.Collection, "system.") {
		problems = append(problems, fmt.Errorf("invalid collection name %q", s.Collection))
	}
	if s.MaxSize < 1 || s.MaxSize > largestMaxSize {
		problems = append(problems, fmt.Errorf("invalid maximum size of %d bytes: it must be between 1 and %d", s.MaxSize, largestMaxSize))
	}
	if slices.ContainsFunc(s.Middleware, func(middleware Middleware) bool { return middleware == nil }) {
		problems = append(problems, errors.New("a middleware is nil"))
	}
	return errors.Join(problems...)
}

// Envelope is an encoded event.
type Envelope struct {
	ID  event.ID
	Doc bson.Raw
}

// Encode returns the envelopes of the events. The error is the first one of the middleware, or joins the errors
// of all events that cannot be stored.
func (s *Settings) Encode(ctx context.Context, events []event.Event) ([]Envelope, error) {
	events, err := s.applyMiddleware(ctx, events)
	if err != nil {
		return nil, err
	}

	headers, cause := s.Telemetry.Inject(ctx), event.CauseFromContext(ctx)
	list := make([]Envelope, 0, len(events))
	var errs []error
	// All problems are reported together, so an invalid event does not end the loop.
	for _, ev := range events {
		doc, err := addCause(addHeaders(ev, headers), cause).MarshalBSON()
		if err == nil && len(doc) > s.MaxSize {
			err = fmt.Errorf("%w: event %s has %d bytes, the limit is %d; "+
				"store the body elsewhere and send a reference, or raise WithMaxSize and the topic's max.message.bytes",
				ErrTooLarge, ev.ID(), len(doc), s.MaxSize)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		list = append(list, Envelope{ev.ID(), doc})
	}
	return list, errors.Join(errs...)
}

// applyMiddleware passes the events through the middleware, and returns the events that come out.
func (s *Settings) applyMiddleware(ctx context.Context, events []event.Event) ([]event.Event, error) {
	if len(s.Middleware) == 0 {
		return events, nil
	}

	passed := make([]event.Event, 0, len(events))
	next := func(_ context.Context, ev event.Event) error {
		passed = append(passed, ev)
		return nil
	}
	for _, m := range slices.Backward(s.Middleware) {
		next = m(next)
	}

	for _, ev := range events {
		if err := next(ctx, ev); err != nil {
			return nil, fmt.Errorf("event %s: %w", ev.ID(), err)
		}
	}
	return passed, nil
}
