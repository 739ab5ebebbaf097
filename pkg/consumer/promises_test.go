package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// The tests of this file check on real servers promises whose edge cases the tests of internal/lab/memory check.

// TestMessagesThatWaitForTheirHandlerAtAStopAreHandledLater: a handler with a limit of one runs when the consumer stops, and the messages
// of all other keys wait for it. They have not failed.
func TestMessagesThatWaitForTheirHandlerAtAStopAreHandledLater(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	const n = 20
	insert := k.insertInto("effects")
	begun, release := make(chan struct{}, 2*n), make(chan struct{})
	slow := func(ctx context.Context, m *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return insert(ctx, m)
	}
	start := func() (stop func()) {
		t.Helper()
		c := k.newConsumer()
		addHandler(t, c, "counted", slow, consumer.WithLimit(1), consumer.WithRetry(consumer.NoRetry()))
		return k.start(c)
	}

	k.publish(newMessages(n, n)...)
	stop := start()
	k.waitFor("the first message", begun)
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	close(release)
	k.waitFor("the stop", stopped)

	start()
	k.waitCount("effects", n)
	k.checkOnce("effects", n)
	if letters := k.countDocuments(deadletter.DefaultCollection); letters != 0 {
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
	insert := k.insertInto("effects")
	c := k.newConsumer()
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		select {
		case <-time.After(40 * time.Millisecond):
			return insert(ctx, m)
		case <-ctx.Done():
			return ctx.Err()
		}
	}, withTries(1))

	k.publish(newMessages(1, n)...)
	k.start(c)
	k.waitCount("effects", n)
	k.checkOnce("effects", n)
	if letters := k.countDocuments(deadletter.DefaultCollection); letters != 0 {
		t.Errorf("%d dead letters, want none", letters)
	}
}

// TestAReplacedHandlerTakesTheMessagesThatWait: a handler is removed while its message waits for the next attempt, and another one with
// the same name replaces it.
func TestAReplacedHandlerTakesTheMessagesThatWait(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	insert := k.insertInto("effects")
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
	addHandler(t, c, "counted", once, policy)
	k.publish(newMessages(1, 1)...)
	k.start(c)
	k.waitFor("the failure", failed)

	if !c.Remove("counted") {
		t.Fatal("the handler is not registered")
	}
	addHandler(t, c, "counted", once, policy)
	k.publish(newMessages(1, 2)[1:]...)
	k.waitCount("effects", 2)
	k.checkOnce("effects", 2)
}

// A handler that is removed handles what was fetched for it, in order, and gets nothing later. So the offset passes no message without
// its effect.
func TestARemovedHandlerHandlesWhatWasFetched(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	began, release := make(chan struct{}, 1), make(chan struct{})
	effects := k.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		select {
		case began <- struct{}{}:
		default:
		}
		select {
		case <-release:
			return effects(ctx, m)
		case <-ctx.Done():
			return ctx.Err()
		}
	}, consumer.WithSharedTransaction(1))
	if err := c.Handle("other", consumer.Func(k.insertInto("others"), "counted")); err != nil {
		t.Fatal(err)
	}
	const n = 10
	k.publish(newMessages(1, n)...)
	k.start(c)
	k.waitFor("the attempt", began)
	// The other handler has all of them, so they are fetched.
	k.waitCount("others", n)

	if !c.Remove("counted") {
		t.Fatal("the handler is not registered")
	}
	close(release)
	k.waitCount("effects", n)
	k.checkOnce("effects", n)
	k.publish(newMessages(1, n+1)[n:]...)
	k.waitCount("others", n+1)
	k.untilSettled(1, n+1)
	if got := k.countDocuments("effects"); got != n {
		t.Errorf("%d effects of the removed handler, want %d", got, n)
	}
}

// A message whose handler is replaced while it runs, and then fails, is retried by the new handler.
func TestAMessageThatIsSetAsideByAReplacedHandlerIsRetried(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer(consumer.WithRetry(soon))
	effects := k.insertInto("effects")
	began, release := make(chan struct{}, 1), make(chan struct{})
	addHandler(t, c, "counted", func(ctx context.Context, _ *consumer.Message) error {
		began <- struct{}{}
		select {
		case <-release:
			return errWanted
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	other := "b"
	for inbox.Lane([]byte(other), 0) == inbox.Lane([]byte("a"), 0) {
		other += "b"
	}
	k.publish(newMessage("a", "counted", "0"))
	k.start(c)
	k.waitFor("the attempt", began)

	if !c.Remove("counted") {
		t.Fatal("the handler is not registered")
	}
	addHandler(t, c, "counted", effects)
	k.publish(newMessage(other, "counted", "0"))
	// The new handler has loaded the messages that are set aside.
	k.waitCount("effects", 1)
	close(release)
	k.publish(newMessage("a", "counted", "1"))
	k.waitCount("effects", 3)
	k.checkOnce("effects", 3)
	k.untilSettled(1, 3)
}

// TestEventsOfTwoSourcesWithEqualIDsHaveTheirEffects: a CloudEvent is unique by its source and id together. The topic contains each
// event in binary and in structured mode, and one source repeats its events.
func TestEventsOfTwoSourcesWithEqualIDsHaveTheirEffects(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "A", k.insertInto("effects"))

	for _, source := range []string{"/a", "/b", "/a"} {
		k.publish(&consumer.Message{Key: []byte("k"), Value: []byte("binary of " + source), Headers: []event.Header{
			{Key: "ce_specversion", Value: []byte("1.0")},
			{Key: "ce_id", Value: []byte("1")},
			{Key: "ce_source", Value: []byte(source)},
			{Key: "ce_type", Value: []byte("A")},
		}}, &consumer.Message{
			Key:     []byte("k"),
			Value:   fmt.Appendf(nil, `{"specversion":"1.0","id":"2","source":%q,"type":"A","data":{"of":%q}}`, source, source),
			Headers: []event.Header{{Key: "content-type", Value: []byte("application/cloudevents+json")}},
		})
	}

	k.start(c)
	k.waitUntil("all is committed", func(context.Context) bool { return k.readCommitted(1)[0] == 6 })
	var values []string
	if err := k.db.Collection("effects").Distinct(k.context(), "value", bson.D{}).Decode(&values); err != nil {
		t.Fatal(err)
	}
	if n := k.countDocuments("effects"); n != 4 || len(values) != 4 {
		t.Errorf("%d effects of %q, want one of each event of each source", n, values)
	}
	if letters := k.countDocuments(deadletter.DefaultCollection); letters != 0 {
		t.Errorf("%d dead letters, want none", letters)
	}
}

// TestARecordWithoutAnIDHasItsEffectOnceWhereverItIsMoved: a member stops between the copy of a message into its retry topic and the
// watermark that would pass the message. The next member handles the message and its copy.
func TestARecordWithoutAnIDHasItsEffectOnceWhereverItIsMoved(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	retries := transport.RetryTopicName(k.topic, k.group, 1)
	stacktest.CreateTopic(t, retries, 1)
	letters, err := deadletter.New(k.db)
	if err != nil {
		t.Fatal(err)
	}

	effect := k.insertInto("effects")
	member := func(d consumer.Disposer, outcome error) (stop func()) {
		t.Helper()
		c := k.newConsumer(consumer.WithDisposer(d), consumer.WithRetry(consumer.Retry{Quick: []time.Duration{-1}}), consumer.WithRetryTopics(10*time.Millisecond))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error { return errors.Join(outcome, effect(ctx, m)) })
		return k.start(c)
	}

	k.publish(&consumer.Message{Key: []byte("k"), Value: []byte("0"), Headers: []event.Header{{Key: "type", Value: []byte("counted")}}})
	disposer := consumer.NewDisposer(letters, k.kafka, k.logError)
	dying := &dyingDisposer{Disposer: disposer, moved: make(chan struct{}, 100)}
	stop := member(dying, errWanted)
	k.waitFor("the copy", dying.moved)
	stop()
	if n := k.countDocuments("effects"); n != 0 {
		t.Fatalf("%d effects of a handler that fails", n)
	}

	copies := k.readEnds(retries)
	member(disposer, nil)
	k.waitUntil("the message and its copies are committed", func(context.Context) bool {
		return k.committedOf(k.topic, 1)[0] == 1 && slices.Equal(k.committedOf(retries, 1), copies)
	})
	if n := k.countDocuments("effects"); n != 1 {
		t.Errorf("%d effects of a message and its %d copies, want one", n, copies[0])
	}
}

// dyingDisposer moves messages, and its member stops before it gets the result.
type dyingDisposer struct {
	consumer.Disposer
	moved chan struct{}
}

func (d *dyingDisposer) Dispose(ctx context.Context, m *consumer.Message, handler string, v consumer.Verdict, cause error) (*consumer.GivenUp, error) {
	if _, err := d.Disposer.Dispose(ctx, m, handler, v, cause); err != nil {
		return nil, err
	}
	d.moved <- struct{}{}
	return nil, errWanted
}

// TestAHandlerThatIsAbandonedKeepsItsClaim: a handler that claims its messages acts outside of the database and ignores its context.
// While it runs, no other member begins the same message, although the first member has left the group.
func TestAHandlerThatIsAbandonedKeepsItsClaim(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	begun, release := make(chan struct{}, 1), make(chan struct{})
	var running atomic.Bool
	first := k.newConsumer(consumer.WithDrain(50*time.Millisecond), consumer.WithLease(patience))
	addHandler(t, first, "counted", func(ctx context.Context, _ *consumer.Message) error {
		running.Store(true)
		defer running.Store(false)
		begun <- struct{}{}
		<-release
		return ctx.Err()
	}, consumer.WithMode(consumer.Claimed))
	k.publish(newMessages(1, 1)...)
	stop := k.start(first)
	k.waitFor("the first member's handler", begun)
	stop()
	if !running.Load() {
		t.Fatal("the abandoned handler has ended")
	}

	// The second member requests the claim through a separate client, so that its attempts can be
	// counted.
	attempts := make(chan struct{}, 1000)
	monitor := &mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		if coll, _ := e.Command.Lookup("findAndModify").StringValueOK(); strings.HasSuffix(coll, "_claims") {
			attempts <- struct{}{}
		}
	}}
	second := *k
	second.db = stacktest.Client(t, options.Client().SetMonitor(monitor)).Database(k.db.Name())
	c, effect := second.newConsumer(), second.insertInto("effects")
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if running.Load() {
			t.Error("the handler begins while the abandoned one runs")
			attempts <- struct{}{}
		}
		return effect(ctx, m)
	}, consumer.WithMode(consumer.Claimed))
	second.start(c)
	k.waitFor("an attempt of the second member", attempts)
	k.waitFor("another attempt of the second member", attempts)

	close(release)
	k.waitCount("effects", 1)
	k.checkOnce("effects", 1)
}
