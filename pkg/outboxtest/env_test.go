package outboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/saga"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

// recorder is the testing.TB of a test that should fail. Its failures end the goroutine.
type recorder struct {
	testing.TB
	failures []string
	cleanups []func()
}

func (r *recorder) Helper()             {}
func (r *recorder) Logf(string, ...any) {}

func (r *recorder) Fatalf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
	runtime.Goexit()
}

func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

// Cleanup runs clean after the test that should fail, and not after the whole test.
func (r *recorder) Cleanup(clean func()) { r.cleanups = append(r.cleanups, clean) }

func (r *recorder) Fatal(args ...any) { r.Fatalf("%s", fmt.Sprint(args...)) }

// requireFailure fails the test unless f fails with a message that contains all texts.
func requireFailure(t *testing.T, f func(tb testing.TB), texts ...string) {
	t.Helper()
	r := &recorder{TB: t}
	var wg sync.WaitGroup
	wg.Go(func() { f(r) })
	wg.Wait()
	for _, clean := range slices.Backward(r.cleanups) {
		clean()
	}
	if len(r.failures) != 1 {
		t.Fatalf("failures: got %q, want one", r.failures)
	}

	for _, text := range texts {
		if !strings.Contains(r.failures[0], text) {
			t.Errorf("failure: got %q, want %q in it", r.failures[0], text)
		}
	}
}

// An event that becomes a dead letter in production fails the test, also if the test only looks at the outbox.
func TestAnEventThatIsNotPublishedFailsTheTest(t *testing.T) {
	t.Parallel()
	expired := func(tb testing.TB, opts ...outboxtest.Option) {
		env := outboxtest.New(tb, opts...)
		env.Publish(OrderPlaced.New("o-1", Placed{}, event.WithExpiry(time.Now().Add(-time.Minute))))
	}
	requireFailure(t, func(tb testing.TB) { expired(tb) }, "was not published", "expired")
	expired(t, outboxtest.WithUnpublished())
}

func appendEvents(t *testing.T, box *outbox.Box, events ...event.Event) {
	t.Helper()
	err := box.Transaction(t.Context(), func(ctx context.Context) error { return box.Append(ctx, events...) })
	if err != nil {
		t.Fatal(err)
	}
}

// handle registers a handler of Placed events.
func handle(t *testing.T, c *consumer.Consumer, f consumer.HandlerFunc, opts ...consumer.HandlerOption) {
	t.Helper()
	if err := c.Handle(OrderPlaced.Name, consumer.Func(f, OrderPlaced.Name), opts...); err != nil {
		t.Fatal(err)
	}
}

func TestRetriesFollowTheFakeClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		box := env.Box()
		down := true
		var handled []string
		c := env.Consumer("shipping", consumer.WithTopics("outbox.event.order"))
		handle(t, c, func(_ context.Context, m *consumer.Message) error {
			if m.Aggregate.ID == "o-1" && down {
				return errors.New("the warehouse is away")
			}
			handled = append(handled, m.Aggregate.ID)
			return nil
		})

		appendEvents(t, box, OrderPlaced.New("o-1", Placed{}), OrderPlaced.New("o-2", Placed{}))
		env.Settle()
		if want := []string{"o-2"}; !slices.Equal(handled, want) {
			t.Errorf("handled at once: got %q, want %q", handled, want)
		}

		env.Advance(time.Hour)
		down = false
		env.Settle()
		if len(handled) != 1 {
			t.Error("a message was handled before its next retry")
		}
		env.Advance(10 * time.Minute)
		if want := []string{"o-2", "o-1"}; !slices.Equal(handled, want) {
			t.Errorf("handled after an hour: got %q, want %q", handled, want)
		}
	})
}

func TestSettleDoesNotWaitForASuspendedHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		var calls []time.Duration
		began := time.Now()
		c := env.Consumer("shipping", consumer.WithTopics("outbox.event.order"))
		handle(t, c, func(context.Context, *consumer.Message) error {
			if calls = append(calls, time.Since(began).Round(time.Minute)); len(calls) == 1 {
				return consumer.Suspend(10*time.Minute, errors.New("too many requests"))
			}
			return nil
		})

		env.Publish(OrderPlaced.New("o-1", Placed{}))
		env.Settle()
		env.Advance(9 * time.Minute)
		if len(calls) != 1 {
			t.Fatalf("calls of a suspended handler: got them after %v, want one", calls)
		}
		env.Advance(time.Minute)
		if want := []time.Duration{0, 10 * time.Minute}; !slices.Equal(calls, want) {
			t.Errorf("calls: got them after %v, want %v", calls, want)
		}

		c.Pause()
		env.Publish(OrderPlaced.New("o-2", Placed{}))
		env.Settle()
		if len(calls) != 2 {
			t.Error("a paused consumer has handled a message")
		}
		c.Resume()
		env.Settle()
		if len(calls) != 3 {
			t.Error("the consumer has not handled the message after Resume")
		}
	})
}

func TestAMessageIsGivenUpAfterADay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		c := env.Consumer("shipping", consumer.WithTopics("outbox.event.order"))
		handle(t, c, func(context.Context, *consumer.Message) error { return errors.New("bad order") })
		env.Publish(OrderPlaced.New("o-1", Placed{}))

		env.Advance(23 * time.Hour)
		if got := letters(t, env); len(got) != 0 {
			t.Errorf("dead letters before a day: got %v, want none", got)
		}
		env.Advance(2 * time.Hour)
		if got := letters(t, env); len(got) != 1 || !strings.Contains(got[0].Reason, "bad order") {
			t.Errorf("dead letters after a day: got %+v, want the message", got)
		}
	})
}

// letters returns the dead letters of env, the latest first.
func letters(t *testing.T, env *outboxtest.Env) (list []deadletter.Letter) {
	t.Helper()
	for l, err := range env.DeadLetters().List(t.Context(), deadletter.Query{}) {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, l)
	}
	return list
}

// A requeued letter reaches only the handler that gave it up.
func TestALetterIsRequeuedInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		var mu sync.Mutex
		var handled []string
		var isMended atomic.Bool
		for _, group := range []string{"billing", "shipping"} {
			c := env.Consumer(group, consumer.WithTopics("outbox.event.order"), consumer.WithRetry(consumer.NoRetry()))
			for _, name := range []string{"first", "second"} {
				who := group + "/" + name
				h := consumer.For(OrderPlaced, func(context.Context, *consumer.Message, Placed) error {
					if who == "billing/first" && !isMended.Load() {
						return errors.New("bad order")
					}
					mu.Lock()
					defer mu.Unlock()
					handled = append(handled, who)
					return nil
				})
				if err := c.Handle(name, h); err != nil {
					t.Fatal(err)
				}
			}
		}
		env.Publish(OrderPlaced.New("o-1", Placed{}))
		env.Settle()
		if len(handled) != 3 {
			t.Fatalf("handled by %q, want three handlers", handled)
		}

		isMended.Store(true)
		handled = nil
		desk := env.DeadLetters()
		if n, err := desk.Requeue(t.Context(), deadletter.Query{Handler: "first"}, deadletter.RequeueOptions{Actor: "ann"}); n != 1 || err != nil {
			t.Fatalf("requeued %d letters: %v", n, err)
		}
		if got := letters(t, env); !got[0].Requeued.Waiting {
			t.Errorf("after the requeue: got %+v, want a message that waits", got[0].Requeued)
		}
		env.Settle()
		if got := letters(t, env); !slices.Equal(handled, []string{"billing/first"}) || got[0].Requeued.Waiting || got[0].Requeued.Actor != "ann" {
			t.Errorf("handled by %q, letters %+v; want the handler that gave up", handled, got)
		}
		if n, err := desk.Discard(t.Context(), deadletter.Query{Group: "billing"}, deadletter.DiscardOptions{}); n != 1 || err != nil {
			t.Errorf("discarded %d letters: %v", n, err)
		}
	})
}

func TestScheduledEventsFollowTheFakeClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		box := env.Box()
		due := time.Now().Add(24 * time.Hour)
		err := box.Transaction(t.Context(), func(ctx context.Context) error {
			_, err := box.Schedule(ctx, due, OrderPlaced.New("o-1", Placed{}))
			return err
		})
		if err != nil {
			t.Fatal(err)
		}

		if got := outboxtest.RequireAppended(t, box, OrderPlaced); !got.DueAt.Equal(due) {
			t.Errorf("due time: got %v, want %v", got.DueAt, due)
		}
		env.Advance(23 * time.Hour)
		if got := env.Published("outbox.event.order"); len(got) != 0 {
			t.Errorf("published before the due time: %v", got)
		}
		env.Advance(time.Hour)
		if got := env.Published("outbox.event.order"); len(got) != 1 || got[0].Name != OrderPlaced.Name {
			t.Errorf("published at the due time: got %v, want the event", got)
		}
	})
}

// The record of an event carries its expiry: an event that was published in time and is read too late is not handled.
func TestTheExpiryOfAnEventReachesTheConsumer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		env.Publish(
			OrderPlaced.New("late", Placed{}, event.WithExpiry(time.Now().Add(time.Hour))),
			OrderPlaced.New("fresh", Placed{}, event.WithExpiry(time.Now().Add(24*time.Hour))),
		)
		env.Advance(2 * time.Hour)

		var handled []string
		c := env.Consumer("shipping", consumer.WithTopics("outbox.event.order"))
		handle(t, c, func(_ context.Context, m *consumer.Message) error {
			handled = append(handled, m.Aggregate.ID)
			return nil
		})
		env.Settle()

		got := letters(t, env)
		if len(got) != 1 || got[0].Class != deadletter.ClassExpired || !slices.Equal(handled, []string{"fresh"}) {
			t.Errorf("letters %+v, handled %q; want a letter of the late event", got, handled)
		}
	})
}

func TestFaultsAreInjected(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	box := env.Box()
	away := errors.New("away")
	for _, kind := range []string{"append", "commit"} {
		env.Fail(func(op outboxtest.Op) error {
			if op.Kind == kind {
				return away
			}
			return nil
		})
		err := box.Transaction(t.Context(), func(ctx context.Context) error {
			return box.Append(ctx, OrderPlaced.New("o-1", Placed{}))
		})
		if !errors.Is(err, away) {
			t.Errorf("Transaction with a failing %s: got %v, want %v", kind, err, away)
		}
		outboxtest.RequireNone(t, box, OrderPlaced)
	}

	var attempts atomic.Int32
	env.Fail(func(op outboxtest.Op) error {
		isOrder := op.Kind == "publish" && op.Topic == "outbox.event.order" && op.Name == OrderPlaced.Name
		if isOrder && attempts.Add(1) < 3 {
			return away
		}
		return nil
	})
	appendEvents(t, box, OrderPlaced.New("o-1", Placed{}))
	env.Settle()
	if got := env.Published("outbox.event.order"); len(got) != 1 || attempts.Load() != 3 {
		t.Errorf("published after an outage: got %d records in %d attempts, want 1 in 3", len(got), attempts.Load())
	}
}

func TestRedeliveryHasNoSecondEffect(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t, outboxtest.WithPartitions(2))
	var effects, runs atomic.Int32
	once := env.Consumer("once", consumer.WithTopics("orders"))
	handle(t, once, func(context.Context, *consumer.Message) error { effects.Add(1); return nil })
	often := env.Consumer("often", consumer.WithTopics("orders"), consumer.WithMode(consumer.AtLeastOnce))
	handle(t, often, func(context.Context, *consumer.Message) error { runs.Add(1); return nil })

	for _, id := range []string{"1", "2", "3"} {
		env.PublishRecord("orders", []byte(id), []byte("{}"),
			event.Header{Key: "id", Value: []byte(id)}, event.Header{Key: "type", Value: []byte(OrderPlaced.Name)})
	}
	env.Settle()
	env.Redeliver("orders")
	env.Settle()
	if effects.Load() != 3 || runs.Load() != 6 {
		t.Errorf("effects: got %d and %d, want 3 and 6", effects.Load(), runs.Load())
	}
}

func TestTheFunctionsOfOutboxSeeTransactionsInMemory(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	box := env.Box()
	keys := env.Inbox()
	table := outboxtest.NewTable[string, string](env, "audit")
	cause := errors.New("not allowed")

	err := box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := outbox.CheckTransaction(ctx); err != nil {
			t.Errorf("CheckTransaction: %v", err)
		}
		if err := table.Put(outbox.Outside(ctx), "a", "stays"); err != nil {
			t.Error(err)
		}
		if err := keys.Once(ctx, inbox.Key{Scope: "s", ID: "1"}, func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		if !outbox.SetRollbackOnly(ctx, cause) {
			t.Error("SetRollbackOnly had no effect")
		}
		return nil
	})
	if !errors.Is(err, outbox.ErrRollbackOnly) || !errors.Is(err, cause) {
		t.Errorf("Transaction: got %v, want ErrRollbackOnly and the cause", err)
	}
	if got, err := table.Get(t.Context(), "a"); got != "stays" || err != nil {
		t.Errorf("a write outside of the transaction: got %q (%v), want it to stay", got, err)
	}
	if handled, err := keys.Handled(t.Context(), inbox.Key{Scope: "s", ID: "1"}); handled || err != nil {
		t.Errorf("a key of the transaction: got %t (%v), want it rolled back", handled, err)
	}
	if err := box.Append(t.Context(), OrderPlaced.New("o-1", Placed{})); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Append without a transaction: got %v, want ErrNoTransaction", err)
	}
}

func TestSettleReportsUnfinishedMessages(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		requireFailure(t, func(tb testing.TB) {
			env := outboxtest.New(tb)
			c := env.Consumer("shipping", consumer.WithTopics("outbox.event.order"), consumer.WithTimeout(time.Hour))
			handle(t, c, func(ctx context.Context, _ *consumer.Message) error {
				<-ctx.Done()
				return ctx.Err()
			})
			env.Publish(OrderPlaced.New("o-1", Placed{}))
			env.Settle()
		}, "not settled after 1m0s", "group shipping has not handled 1 records of topic outbox.event.order")
	})

	requireFailure(t, func(tb testing.TB) {
		env := outboxtest.New(tb)
		env.Consumer("shipping", consumer.WithTopics("outbox.event.order"))
		env.Settle()
	}, "consumer of group shipping", consumer.ErrNoHandler.Error())
}

func TestWrongOptionsFailTheTest(t *testing.T) {
	t.Parallel()
	for want, f := range map[string]func(env *outboxtest.Env){
		"invalid collection name": func(env *outboxtest.Env) { env.Box(outbox.WithCollection("a$")) },
		"invalid retention":       func(env *outboxtest.Env) { env.Inbox(inbox.WithRetention(time.Second)) },
		"name of the group":       func(env *outboxtest.Env) { env.Consumer("") },
	} {
		requireFailure(t, func(tb testing.TB) { f(outboxtest.New(tb)) }, want)
	}
	requireFailure(t, func(tb testing.TB) { outboxtest.New(tb, outboxtest.WithPreset("x")) }, "x")
}

func TestTableRejectsASecondRow(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	orders := outboxtest.NewTable[string, Placed](env, "orders")
	if err := orders.Insert(t.Context(), "o-1", Placed{Cents: 1}); err != nil {
		t.Fatal(err)
	}
	if err := orders.Insert(t.Context(), "o-1", Placed{}); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("second Insert: got %v, want a duplicate key error", err)
	}
}

type checkout struct{ Reminded bool }

func TestASagaFollowsTheFakeClock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		box := env.Box()
		checkouts := saga.Define[checkout]("checkouts")
		saga.Start(checkouts, OrderPlaced, func(_ context.Context, in *saga.Instance[checkout], _ Placed) error {
			in.TimeoutIn("unpaid", 15*time.Minute)
			return nil
		})
		checkouts.Timeout("unpaid", func(_ context.Context, in *saga.Instance[checkout]) error {
			in.Emit(orderNote.New(in.ID(), []byte("please pay")))
			in.Complete()
			return nil
		})
		h, err := checkouts.Handler(box)
		if err != nil {
			t.Fatal(err)
		}
		c := env.Consumer("checkout", consumer.WithTopics("outbox.event.order", "outbox.event.checkouts"))
		if err := c.Handle("checkouts", h); err != nil {
			t.Fatal(err)
		}

		appendEvents(t, box, OrderPlaced.New("o-1", Placed{}))
		env.Advance(14 * time.Minute)
		outboxtest.RequireNone(t, box, orderNote)
		env.Advance(time.Minute)
		if got := outboxtest.RequireAppended(t, box, orderNote); string(got.Payload) != "please pay" {
			t.Errorf("payload: got %q", got.Payload)
		}
	})
}

// Three services answer each other: all events are one conversation.
func TestAConversationGoesThroughServices(t *testing.T) {
	t.Parallel()
	env := outboxtest.New(t)
	box := env.Box()
	packed := event.Type[Placed]{Aggregate: "parcel", Name: "ParcelPacked"}
	shipped := event.Type[Placed]{Aggregate: "shipment", Name: "ParcelShipped"}
	for _, link := range []struct {
		from, to event.Type[Placed]
	}{{OrderPlaced, packed}, {packed, shipped}} {
		c := env.Consumer(link.to.Name, consumer.WithTopics("outbox.event."+link.from.Aggregate))
		err := c.Handle("answer", consumer.For(link.from, func(ctx context.Context, m *consumer.Message, p Placed) error {
			return box.Append(ctx, link.to.New(m.Aggregate.ID, p))
		}))
		if err != nil {
			t.Fatal(err)
		}
	}
	appendEvents(t, box, OrderPlaced.New("o-1", Placed{Cents: 1}))
	env.Settle()

	placed, second, third := outboxtest.RequireAppended(t, box, OrderPlaced), outboxtest.RequireAppended(t, box, packed), outboxtest.RequireAppended(t, box, shipped)
	causeOf := func(headers []event.Header) event.Cause {
		var opts []event.Option
		for _, h := range headers {
			opts = append(opts, event.WithHeader(h.Key, h.Value))
		}
		return event.New(event.Aggregate{}, "", event.Payload{}, opts...).Cause()
	}
	conversation := placed.ID.String()
	for _, link := range []struct {
		got, want event.Cause
	}{
		{causeOf(placed.Headers), event.Cause{}},
		{causeOf(second.Headers), event.Cause{CorrelationID: conversation, CausationID: conversation}},
		{causeOf(third.Headers), event.Cause{CorrelationID: conversation, CausationID: second.ID.String()}},
	} {
		if link.got != link.want {
			t.Errorf("cause: got %+v, want %+v", link.got, link.want)
		}
	}
}

func TestARateLimitsInMemory(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		env := outboxtest.New(t)
		began := time.Now()
		var mu sync.Mutex
		var times []time.Duration
		for range 2 {
			c := env.Consumer("limited", consumer.WithTopics("outbox.event.order"))
			handle(t, c, func(context.Context, *consumer.Message) error {
				mu.Lock()
				defer mu.Unlock()
				times = append(times, time.Since(began))
				return nil
			}, consumer.WithRate(consumer.Rate{PerSecond: 1, Burst: 2}), consumer.WithLimit(1))
		}

		for i := range 6 {
			env.Publish(OrderPlaced.New(fmt.Sprint("o-", i), Placed{}))
		}
		env.Settle()
		if len(times) != 6 || times[1] >= time.Second || times[5] < 4*time.Second || times[5] > 6*time.Second {
			t.Errorf("handled after %v", times)
		}
	})
}
