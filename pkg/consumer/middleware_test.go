package consumer_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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

// around returns a middleware that records its begin and its end.
func (j *journal) around(name string) consumer.Middleware {
	return func(next consumer.Handler) consumer.Handler {
		return consumer.HandlerFunc(func(ctx context.Context, m *consumer.Message) error {
			j.add(name + "(")
			defer j.add(")" + name)
			return next.Handle(ctx, m)
		})
	}
}

// handler returns a handler that records the type and the value of each message.
func (j *journal) handler() consumer.Handler {
	return consumer.HandlerFunc(func(_ context.Context, m *consumer.Message) error {
		j.add(m.Name + "=" + string(m.Value))
		return nil
	})
}

func TestChainIsAnOnion(t *testing.T) {
	t.Parallel()
	var j journal
	var c consumer.Chain
	c.Use(j.around("a"), j.around("b"))
	c.Use(j.around("c"))

	h := c.Middleware()(j.handler())
	if err := h.Handle(t.Context(), &consumer.Message{Name: "T", Value: []byte("1")}); err != nil {
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
		"mutate": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.Handler) error {
			m.Value = []byte("2")
			return next.Handle(ctx, m)
		}), "a( T=2 )a", nil},
		"replace": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.Handler) error {
			return next.Handle(ctx, &consumer.Message{Name: "U", Value: m.Value})
		}), "a( U=1 )a", nil},
		"drop":        {wrap(func(context.Context, *consumer.Message, consumer.Handler) error { return consumer.ErrDrop }), "a( )a", consumer.ErrDrop},
		"fail":        {wrap(func(context.Context, *consumer.Message, consumer.Handler) error { return errFlaky }), "a( )a", errFlaky},
		"not calling": {wrap(func(context.Context, *consumer.Message, consumer.Handler) error { return nil }), "a( )a", nil},
		"next twice": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.Handler) error {
			return errors.Join(next.Handle(ctx, m), next.Handle(ctx, m))
		}), "a( T=1 T=1 )a", nil},
		"a drop further in wins": {wrap(func(ctx context.Context, m *consumer.Message, next consumer.Handler) error {
			return errors.Join(next.Handle(ctx, m), consumer.ErrDrop)
		}), "a( T=1 )a", consumer.ErrDrop},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var j journal
			var chain consumer.Chain
			chain.Use(j.around("a"), c.mw)
			err := chain.Middleware()(j.handler()).Handle(t.Context(), &consumer.Message{Name: "T", Value: []byte("1")})
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || j.String() != c.want {
				t.Errorf("ran %s, %v; want %s, %v", j.String(), err, c.want, c.err)
			}
		})
	}
}

// wrap returns a middleware that calls f with the next handler.
func wrap(f func(ctx context.Context, m *consumer.Message, next consumer.Handler) error) consumer.Middleware {
	return func(next consumer.Handler) consumer.Handler {
		return consumer.HandlerFunc(func(ctx context.Context, m *consumer.Message) error { return f(ctx, m, next) })
	}
}

func TestARunKeepsTheMiddlewaresThatItBeganWith(t *testing.T) {
	t.Parallel()
	var j journal
	var c consumer.Chain
	c.Use(wrap(func(ctx context.Context, m *consumer.Message, next consumer.Handler) error {
		if m.Name == "first" {
			c.Use(j.around("late"))
		}
		return next.Handle(ctx, m)
	}))

	h := c.Middleware()(j.handler())
	for _, typ := range []string{"first", "second"} {
		if err := h.Handle(t.Context(), &consumer.Message{Name: typ}); err != nil {
			t.Fatal(err)
		}
	}

	c.Clear()
	if err := h.Handle(t.Context(), &consumer.Message{Name: "third"}); err != nil {
		t.Fatal(err)
	}
	if got, want := j.String(), "first= late( second= )late third="; got != want {
		t.Errorf("ran %s, want %s", got, want)
	}
}

func TestBoundedMiddleware(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		running, most := 0, 0
		var mu sync.Mutex
		h := consumer.Bounded(2)(consumer.HandlerFunc(func(context.Context, *consumer.Message) error {
			mu.Lock()
			running++
			most = max(most, running)
			mu.Unlock()
			<-time.After(time.Second)
			mu.Lock()
			running--
			mu.Unlock()
			return nil
		}))

		var wg sync.WaitGroup
		for range 7 {
			wg.Go(func() { _ = h.Handle(t.Context(), &consumer.Message{}) })
		}
		synctest.Wait()

		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errFlaky)
		if err := h.Handle(ctx, &consumer.Message{}); !errors.Is(err, errFlaky) {
			t.Errorf("waiting with a canceled context: got %v, want %v", err, errFlaky)
		}
		wg.Wait()
		if most != 2 {
			t.Errorf("concurrent messages: got %d, want 2", most)
		}
	})
}

func TestHandlerNameIsInTheContext(t *testing.T) {
	t.Parallel()
	if got := consumer.HandlerName(consumer.WithHandlerName(t.Context(), "h")); got != "h" {
		t.Errorf("HandlerName in a handler: got %q, want h", got)
	}
	if got := consumer.HandlerName(t.Context()); got != "" {
		t.Errorf("HandlerName outside of a handler: got %q, want none", got)
	}
}
