package breaker

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errAway = errors.New("the dependency is away")

// sendThrough sends outcomes through a breaker and returns the number of handled messages, and the error of the last message.
func sendThrough(b *Breaker, outcomes ...error) (passed int, err error) {
	for _, outcome := range outcomes {
		h := b.Middleware()(func(context.Context, *consumer.Message) error { passed++; return outcome })
		err = h(context.Background(), &consumer.Message{})
	}
	return passed, err
}

func requireState(t *testing.T, b *Breaker, want State, when string) {
	t.Helper()
	if got := b.State(); got != want {
		t.Fatalf("%s: %s, want %s", when, got, want)
	}
}

func TestBreakerOpensHalfOpensAndCloses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New("orders", WithMinimum(4), WithWindow(10*time.Second), WithOpenFor(time.Minute))
		sendThrough(b, errAway, errAway, errAway)
		requireState(t, b, Closed, "below the minimum")
		sendThrough(b, errAway)
		requireState(t, b, Open, "all four failed")

		<-time.After(time.Minute - 1)
		if n, err := sendThrough(b, nil); n != 0 || !errors.Is(err, ErrOpen) {
			t.Fatalf("before its time: %d passed, %v", n, err)
		}
		<-time.After(1)
		sendThrough(b, errAway)
		requireState(t, b, Open, "the probe failed")

		<-time.After(time.Minute)
		done, err := b.allow()
		if _, second := b.allow(); err != nil || !errors.Is(second, ErrOpen) {
			t.Fatalf("one probe at a time: %v, %v", err, second)
		}
		requireState(t, b, HalfOpen, "during the probe")
		done(nil)
		requireState(t, b, Closed, "the probe succeeded")
		// An outcome counts once.
		done(errAway)
		requireState(t, b, Closed, "the same outcome again")
	})
}

func TestBreakerForgetsFailuresBeforeItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New("x", WithMinimum(4), WithWindow(10*time.Second))
		// There are three failures in any ten seconds, and never four.
		for range 20 {
			sendThrough(b, errAway)
			<-time.After(3600 * time.Millisecond)
		}
		requireState(t, b, Closed, "at the end")
	})
}

func TestBreakerCountsOnlyFailures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		opts     []Option
		outcomes []error
	}{
		"default": {nil, []error{consumer.Reject(errAway), consumer.Discard(errAway), inbox.ErrDuplicate, ErrOpen}},
		"chosen": {
			[]Option{WithFailure(func(err error) bool { return !errors.Is(err, context.Canceled) })},
			[]error{context.Canceled, ErrOpen},
		},
	} {
		b := New(name, append(c.opts, WithMinimum(2))...)

		for range 50 {
			if n, _ := sendThrough(b, c.outcomes...); n != len(c.outcomes) || b.State() != Closed {
				t.Fatalf("%s: %d of %d passed, %s", name, n, len(c.outcomes), b.State())
			}
		}

		sendThrough(b, consumer.RetryIn(0, errAway), consumer.Suspend(0, errAway))
		requireState(t, b, Open, name)
	}
}

// A probe without an outcome decides nothing, and the next message is a probe again.
func TestAnInterruptedProbeIsRepeated(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New("x", WithMinimum(1), WithOpenFor(time.Second))
		sendThrough(b, errAway)
		<-time.After(time.Second)

		ctx, cancel := context.WithCancel(t.Context())
		h := b.Middleware()(func(ctx context.Context, _ *consumer.Message) error {
			cancel()
			return ctx.Err()
		})
		_ = h(ctx, &consumer.Message{})
		requireState(t, b, HalfOpen, "the probe was interrupted")
		sendThrough(b, nil)
		requireState(t, b, Closed, "the next probe succeeded")
	})
}

func TestAResultFromBeforeAChangeIsIgnored(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := New("x", WithMinimum(2), WithOpenFor(time.Second))
		late, err := b.allow()
		if err != nil {
			t.Fatal(err)
		}

		sendThrough(b, errAway, errAway)
		<-time.After(time.Second)

		probe, err := b.allow()
		if err != nil {
			t.Fatal(err)
		}

		late(nil)
		requireState(t, b, HalfOpen, "the late response")

		probe(nil)
		requireState(t, b, Closed, "the probe")
	})
}

// Without a minimum and a wait, the first failure opens the breaker, and the next message is a probe.
func TestNegativeMeansNone(t *testing.T) {
	t.Parallel()
	b := New("x", WithMinimum(-1), WithOpenFor(-1))
	fail := func(context.Context, *consumer.Message) error { return errors.New("no") }
	_ = b.Middleware()(fail)(t.Context(), &consumer.Message{})
	requireState(t, b, Open, "the first failure")

	succeed := func(context.Context, *consumer.Message) error { return nil }
	if err := b.Middleware()(succeed)(t.Context(), &consumer.Message{}); err != nil {
		t.Errorf("the probe: %v", err)
	}
	requireState(t, b, Closed, "the probe")
}

func TestABrokenBreakerIsRejected(t *testing.T) {
	t.Parallel()
	for name, o := range map[string]Option{
		"large share": WithShare(1.5), "negative share": WithShare(-1), "window": WithWindow(5),
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: New did not panic", name)
				}
			}()
			New("x", o)
		}()
	}
}

func TestAPanicIsAFailure(t *testing.T) {
	t.Parallel()
	b := New("x", WithMinimum(1), WithShare(1))
	func() {
		defer func() { _ = recover() }()
		_ = b.Middleware()(func(context.Context, *consumer.Message) error { panic("x") })(t.Context(), &consumer.Message{})
	}()
	requireState(t, b, Open, "after a panic")
}
