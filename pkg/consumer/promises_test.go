package consumer_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// The tests of this file check on real servers promises whose edge cases the tests of internal/memory check.

// TestMessagesThatWaitForTheirHandlerAtAStopAreHandledLater: a handler with a limit of one runs when the consumer stops, and the messages
// of all other keys wait for it. They have not failed.
func TestMessagesThatWaitForTheirHandlerAtAStopAreHandledLater(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const n = 20
	insert := k.effects("effects")
	begun, release := make(chan struct{}, 2*n), make(chan struct{})
	slow := func(ctx context.Context, m *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return insert(ctx, m)
	}
	start := func() (stop func()) {
		t.Helper()
		c := k.consumer()
		handle(t, c, "counted", slow, consumer.WithLimit(1), consumer.WithRetry(consumer.NoRetry()))
		return k.start(c)
	}

	k.publish(numbered(n, n)...)
	stop := start()
	k.await("the first message", begun)
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(release)
	k.await("the stop", stopped)

	start()
	k.untilCount("effects", n)
	k.once("effects", n)
	if letters := k.count(deadletter.DefaultCollection); letters != 0 {
		t.Errorf("%d dead letters, want none", letters)
	}
}

// TestASlowHandlerWithABacklogFitsItsTransactions: all messages together take longer than the server lets a transaction live. They are
// handled in transactions of fewer messages.
func TestASlowHandlerWithABacklogFitsItsTransactions(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Mongo: devstack.MongoOptions{
		Parameters: map[string]string{"transactionLifetimeLimitSeconds": "1"},
	}})
	k.db = stacktest.Database(t, stacktest.Client(t, options.Client().ApplyURI(stack.MongoURI())))

	const n = 64
	insert := k.effects("effects")
	c := k.consumer()
	handle(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		select {
		case <-time.After(40 * time.Millisecond):
			return insert(ctx, m)
		case <-ctx.Done():
			return ctx.Err()
		}
	}, tries(1))

	k.publish(numbered(1, n)...)
	k.start(c)
	k.untilCount("effects", n)
	k.once("effects", n)
	if letters := k.count(deadletter.DefaultCollection); letters != 0 {
		t.Errorf("%d dead letters, want none", letters)
	}
}

// TestAReplacedHandlerTakesTheMessagesThatWait: a handler is removed while its message waits for the next attempt, and another one with
// the same name replaces it.
func TestAReplacedHandlerTakesTheMessagesThatWait(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.consumer()
	insert := k.effects("effects")
	var calls atomic.Int32
	failed := make(chan struct{}, 1)
	once := func(ctx context.Context, m *consumer.Message) error {
		if calls.Add(1) == 1 {
			failed <- struct{}{}
			return errors.New("the first time")
		}
		return insert(ctx, m)
	}

	policy := consumer.WithRetry(consumer.Retry{Quick: []time.Duration{500 * time.Millisecond}})
	handle(t, c, "counted", once, policy)
	k.publish(numbered(1, 1)...)
	k.start(c)
	k.await("the failure", failed)

	if !c.Remove("counted") {
		t.Fatal("the handler is not registered")
	}
	handle(t, c, "counted", once, policy)
	k.publish(numbered(1, 2)[1:]...)
	k.untilCount("effects", 2)
	k.once("effects", 2)
}
