package consumer_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// journal records the middlewares and handlers that ran, in order.
type journal struct {
	mu   sync.Mutex
	list []string
}

func (j *journal) add(s string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.list = append(j.list, s)
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.list, " ")
}

// newRecorder returns a middleware that records its begin and its end.
func (j *journal) newRecorder(name string) consumer.Middleware {
	return func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, m *consumer.Message) error {
			j.add(name + "(")
			defer j.add(")" + name)
			return next(ctx, m)
		}
	}
}

// newHandler returns a handler that records the type and the value of each message.
func (j *journal) newHandler() consumer.HandlerFunc {
	return func(_ context.Context, m *consumer.Message) error {
		j.add(m.Name + "=" + string(m.Value))
		return nil
	}
}

func TestChainIsAnOnion(t *testing.T) {
	t.Parallel()
	var j journal
	h := j.newRecorder("a")(j.newRecorder("b")(j.newRecorder("c")(j.newHandler())))
	if err := h(t.Context(), &consumer.Message{Name: "T", Value: []byte("1")}); err != nil {
		t.Fatal(err)
	}
	if got, want := j.String(), "a( b( c( T=1 )c )b )a"; got != want {
		t.Errorf("ran %s, want %s", got, want)
	}
}

func TestMiddlewareMutatesReplacesAndDrops(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mw   consumer.Middleware
		want string
		err  error
	}{
		"mutate": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.HandlerFunc) error {
			m.Value = []byte("2")
			return next(ctx, m)
		}), "a( T=2 )a", nil},
		"replace": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.HandlerFunc) error {
			return next(ctx, &consumer.Message{Name: "U", Value: m.Value})
		}), "a( U=1 )a", nil},
		"drop": {wrap(func(context.Context, *consumer.Message, consumer.HandlerFunc) error {
			return consumer.Discard(errFlaky)
		}), "a( )a", errFlaky},
		"fail":        {wrap(func(context.Context, *consumer.Message, consumer.HandlerFunc) error { return errFlaky }), "a( )a", errFlaky},
		"not calling": {wrap(func(context.Context, *consumer.Message, consumer.HandlerFunc) error { return nil }), "a( )a", nil},
		"next twice": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.HandlerFunc) error {
			return errors.Join(next(ctx, m), next(ctx, m))
		}), "a( T=1 T=1 )a", nil},
		"a drop further in wins": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.HandlerFunc) error {
			return errors.Join(next(ctx, m), consumer.Discard(errWanted))
		}), "a( T=1 )a", errWanted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j journal
			err := j.newRecorder("a")(c.mw(j.newHandler()))(t.Context(), &consumer.Message{Name: "T", Value: []byte("1")})

			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || j.String() != c.want {
				t.Errorf("ran %s, %v; want %s, %v", j.String(), err, c.want, c.err)
			}
		})
	}
}

// wrap returns a middleware that calls f with the next handler.
func wrap(f func(ctx context.Context, m *consumer.Message, next consumer.HandlerFunc) error) consumer.Middleware {
	return func(next consumer.HandlerFunc) consumer.HandlerFunc {
		return func(ctx context.Context, m *consumer.Message) error { return f(ctx, m, next) }
	}
}
