package consumer

import (
	"context"
	"errors"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
)

// For returns a handler of events of type t, which decodes the payload and passes it to f. Register it for the name of the
// type: c.Handle(t.Name, For(t, f)). For a tombstone, payload is the zero value and m.Tombstone is true.
//
// A payload that cannot be decoded fails with an *InvalidError, so by default the message becomes a dead letter at once. If
// the codec cannot reach its schema registry, the message is retried.
func For[T any](t event.Type[T], f func(ctx context.Context, m *Message, payload T) error) Handler {
	return HandlerFunc(func(ctx context.Context, m *Message) error {
		var payload T
		if !m.Tombstone() {
			var err error
			if payload, err = t.Decode(ctx, m.Value); errors.Is(err, codec.ErrUnavailable) {
				return err
			}
			if err != nil {
				return &InvalidError{ID: m.ID, Type: m.Name, Problems: []string{err.Error()}, Err: err}
			}
		}
		return f(ctx, m, payload)
	})
}

// HandleFunc registers f as Handle does.
func (c *Consumer) HandleFunc(pattern string, f func(ctx context.Context, m *Message) error, opts ...HandlerOption) error {
	return c.Handle(pattern, HandlerFunc(f), opts...)
}
