package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/internal/inbox"
	"github.com/outrelay/outrelay/pkg/consumer"
)

func newBreaker(t *testing.T, cfg consumer.BreakerConfig) *consumer.Breaker {
	t.Helper()
	b, err := consumer.NewBreaker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// through sends outcomes through a breaker and says how many it let.
func through(b *consumer.Breaker, outcomes ...error) (passed int) {
	for _, err := range outcomes {
		h := b.Middleware()(func(context.Context, *consumer.Message) error { passed++; return err })
		_ = h(context.Background(), &consumer.Message{})
	}
	return passed
}

func TestBreakerOpensHalfOpensAndCloses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var changes []string
		b := newBreaker(t, consumer.BreakerConfig{
			Name: "orders", Share: 0.5, MinThroughput: 4, Window: 10 * time.Second, Open: time.Minute, Probes: 2,
			OnChange: func(from, to consumer.BreakerState) { changes = append(changes, fmt.Sprint(from, ">", to)) },
		})
		if n := through(b, errFlaky, errFlaky, errFlaky); n != 3 || b.State() != consumer.BreakerClosed {
			t.Fatalf("below the throughput: %d passed, %s", n, b.State())
		}
		if through(b, errFlaky); b.State() != consumer.BreakerOpen {
			t.Fatalf("all four failed: %s", b.State())
		}
		_, err := b.Allow()
		open, ok := errors.AsType[*consumer.BreakerOpenError](err)
		if !ok || open.Wait != time.Minute || open.Name != "orders" {
			t.Fatalf("open: %v", err)
		}
		<-time.After(time.Minute - 1)
		if n := through(b, nil); n != 0 {
			t.Fatal("passed before its time")
		}
		<-time.After(1)
		if through(b, errFlaky); b.State() != consumer.BreakerOpen {
			t.Fatalf("a probe failed: %s", b.State())
		}
		<-time.After(time.Minute)
		done1, err1 := b.Allow()
		done2, err2 := b.Allow()
		if _, err := b.Allow(); err1 != nil || err2 != nil || err == nil {
			t.Fatalf("two probes at once, no more: %v, %v, %v", err1, err2, err)
		}
		done1(nil)
		done1(errFlaky) // an outcome counts once
		if b.State() != consumer.BreakerHalfOpen {
			t.Fatalf("after one of two probes: %s", b.State())
		}
		if done2(nil); b.State() != consumer.BreakerClosed {
			t.Fatalf("after both probes: %s", b.State())
		}
		want := []string{"closed>open", "open>half_open", "half_open>open", "open>half_open", "half_open>closed"}
		if diff := cmp.Diff(want, changes); diff != "" {
			t.Error(diff)
		}
	})
}

func TestBreakerForgetsWhatIsPastItsWindow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(t, consumer.BreakerConfig{Share: 0.5, MinThroughput: 4, Window: 10 * time.Second})
		for range 20 { // three failures in any ten seconds, never four
			through(b, errFlaky)
			<-time.After(3600 * time.Millisecond)
		}
		if b.State() != consumer.BreakerClosed {
			t.Error(b.State())
		}
	})
}

func TestBreakerCountsOnlyFailures(t *testing.T) {
	t.Parallel()
	b := newBreaker(t, consumer.BreakerConfig{MinThroughput: 2, Failure: consumer.Not(consumer.Is(context.Canceled))})
	var outcomes []error
	for range 50 {
		outcomes = append(outcomes, consumer.Discard(nil), &inbox.DuplicateError{}, &consumer.NotDueError{}, context.Canceled)
	}
	if n := through(b, outcomes...); n != len(outcomes) || b.State() != consumer.BreakerClosed {
		t.Errorf("%d of %d passed, %s", n, len(outcomes), b.State())
	}
}

func TestAnAnswerFromBeforeAChangeSaysNothing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := newBreaker(t, consumer.BreakerConfig{MinThroughput: 2, Open: time.Second})
		late, err := b.Allow()
		if err != nil {
			t.Fatal(err)
		}
		through(b, errFlaky, errFlaky)
		<-time.After(time.Second)
		probe, err := b.Allow()
		if err != nil {
			t.Fatal(err)
		}
		if late(nil); b.State() != consumer.BreakerHalfOpen {
			t.Fatalf("the late answer: %s", b.State())
		}
		if probe(nil); b.State() != consumer.BreakerClosed {
			t.Fatalf("the probe: %s", b.State())
		}
	})
}

func TestABrokenBreakerIsRefused(t *testing.T) {
	t.Parallel()
	for _, cfg := range []consumer.BreakerConfig{
		{Share: 1.5}, {Share: -1}, {MinThroughput: -1}, {Window: 5}, {Open: -1}, {Probes: -1},
	} {
		if _, err := consumer.NewBreaker(cfg); !errors.Is(err, consumer.ErrConfiguration) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
}

func TestAPanicIsAFailure(t *testing.T) {
	t.Parallel()
	b := newBreaker(t, consumer.BreakerConfig{MinThroughput: 1, Share: 1})
	func() {
		defer func() { _ = recover() }()
		_ = b.Middleware()(func(context.Context, *consumer.Message) error { panic("x") })(t.Context(), &consumer.Message{})
	}()
	if b.State() != consumer.BreakerOpen {
		t.Error(b.State())
	}
}
