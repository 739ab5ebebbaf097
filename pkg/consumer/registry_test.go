package consumer_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outboxtest"
)

// newOffline returns a consumer that is never run.
func newOffline(t *testing.T, opts ...consumer.Option) *consumer.Consumer {
	t.Helper()
	cl, err := mongo.Connect()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cl.Disconnect(context.WithoutCancel(t.Context())) })
	c, err := consumer.New("group", cl.Database("db"), append([]consumer.Option{consumer.WithBrokers("127.0.0.1:1"), consumer.WithTopics("t")}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func nop(context.Context, *consumer.Message) error { return nil }

func TestNewListsAllThatIsWrong(t *testing.T) {
	t.Parallel()
	_, err := consumer.New("", nil, consumer.WithConcurrency(-1), consumer.WithSharedTransaction(501), consumer.WithStart(5),
		consumer.WithSessionTimeout(-1), consumer.WithMode(consumer.Mode(9)), consumer.WithBrokers("nowhere"), consumer.WithMiddleware(nil))
	if err == nil {
		t.Fatal("no error")
	}

	for _, want := range []string{
		"group is empty", "database is nil", "no topics", "WithConcurrency: -1 lanes", "WithSharedTransaction: 501", "WithSessionTimeout is -1ns",
		"WithMode: ", "WithStart: 5", "WithBrokers: \"nowhere\"", "a middleware is nil",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New: got error %v, want it to contain %q", err, want)
		}
	}
}

// Everything that a handler needs is created before its first message, also if the handler is registered later, or if
// creating it fails at first.
func TestHandlersArePreparedBeforeTheirFirstMessage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 2)
	c := k.newConsumer()
	register := func(name string) {
		var calls atomic.Int32
		prepare := func(ctx context.Context) error {
			switch calls.Add(1) {
			case 1:
				return mongo.CommandError{Code: 189, Name: "PrimarySteppedDown"}
			case 2:
				return k.db.CreateCollection(ctx, name)
			}
			return nil
		}
		h := consumer.Func(func(ctx context.Context, m *consumer.Message) error {
			names, err := k.db.ListCollectionNames(context.WithoutCancel(k.Context()), bson.D{{Key: "name", Value: name}})
			if err != nil || len(names) != 1 {
				t.Errorf("handler %s runs without its prerequisites (%v)", name, err)
			}
			_, err = k.db.Collection(name).InsertOne(ctx, bson.D{{Key: "id", Value: m.ID}})
			return err
		}, name)
		if err := c.Handle(name, h.WithPreparation(module.Key{}, prepare)); err != nil {
			t.Fatal(err)
		}
	}

	register("early")
	k.start(c)
	k.publish(newMessage("a", "early", "1"))
	k.waitCount("early", 1)

	register("late")
	k.publish(newMessage("a", "late", "1"), newMessage("b", "late", "1"))
	k.waitCount("late", 2)
}

func TestHandlersAreRemovedByName(t *testing.T) {
	t.Parallel()
	c := newOffline(t)
	addHandler(t, c, "order.*", nop)
	if err := c.Handle("both", consumer.Func(nop, "a", "b")); err != nil {
		t.Fatal(err)
	}

	if !c.Remove("both") || c.Remove("both") || !c.Remove("order.*") {
		t.Error("Remove: got a wrong result, want true for each registered handler, once")
	}
	if err := c.Run(t.Context()); !errors.Is(err, consumer.ErrNoHandler) {
		t.Errorf("Run without handlers: got %v, want ErrNoHandler", err)
	}
	addHandler(t, c, "both", nop)
}

func TestMuxRejectsTwoHandlersOfAType(t *testing.T) {
	t.Parallel()
	c := newOffline(t)
	err := c.Handle("orders", consumer.Mux(consumer.Func(nop, "order.*"), consumer.Func(nop, "paid", "*.placed")))
	if err == nil || !strings.Contains(err.Error(), `two handlers of the Mux take "*.placed"`) {
		t.Errorf("two handlers of a type: got %v", err)
	}

	err = c.Handle("orders", consumer.Mux(consumer.Batch(0, func(context.Context, []*consumer.Message) error { return nil }, "paid"), consumer.Func(nop, "order.*")))
	if err == nil || !strings.Contains(err.Error(), "a Batch cannot be part of a Mux") {
		t.Errorf("a Batch in a Mux: got %v", err)
	}

	if c.Remove("orders") {
		t.Error("a handler that was rejected is registered")
	}
}

func TestMuxPassesAMessageToTheHandlerOfItsType(t *testing.T) {
	t.Parallel()
	var got []string
	note := func(text string) consumer.HandlerFunc {
		return func(_ context.Context, m *consumer.Message) error {
			got = append(got, text+" "+m.Name)
			return nil
		}
	}

	h := consumer.Mux(consumer.Func(note("orders"), "order.*"), consumer.Func(note("paid"), "paid", "rejected"))
	for _, name := range []string{"paid", "order.placed", "rejected"} {
		if err := h.Handle(t.Context(), &consumer.Message{Name: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	if err := h.Handle(t.Context(), &consumer.Message{Name: "other"}); !errors.Is(err, consumer.ErrNoHandler) {
		t.Errorf("a type without a handler: got %v, want ErrNoHandler", err)
	}
	if d := cmp.Diff([]string{"paid paid", "orders order.placed", "paid rejected"}, got); d != "" {
		t.Error(d)
	}
}

func TestHandleRejectsImpossibleHandlers(t *testing.T) {
	t.Parallel()
	c := newOffline(t)
	addHandler(t, c, "taken", nop)
	typed := event.Type[placed]{Aggregate: "order", Name: "OrderPlaced"}
	for name, err := range map[string]error{
		"zero":     c.Handle("a", consumer.Handler{}),
		"nil":      c.Handle("a", consumer.Func(nil, "a")),
		"nil For":  c.Handle("a", consumer.For(typed, nil)),
		"no type":  c.Handle("a", consumer.Func(nop)),
		"no Mux":   c.Handle("a", consumer.Mux()),
		"empty":    c.Handle("a", consumer.Func(nop, "")),
		"no name":  c.Handle("", consumer.Func(nop, "a")),
		"slash":    c.Handle("a/b", consumer.Func(nop, "a")),
		"batch":    c.Handle("a", consumer.Func(nop, "a"), consumer.WithSharedTransaction(1000)),
		"taken":    c.Handle("taken", consumer.Func(nop, "a")),
		"a middle": c.Handle("a", consumer.Func(nop, "a"), consumer.WithMiddleware(nil)),
	} {
		if err == nil {
			t.Errorf("%s: got no error, want one", name)
		}
	}

	if c.Remove("a") {
		t.Error("a handler that was rejected is registered")
	}
}

func TestWaitFor(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.newConsumer()
	addHandler(t, c, "counted", k.insertInto("effects"))
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := outboxtest.WaitFor(short, c, "counted", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitFor: %v", err)
	}
	type response struct {
		m   *consumer.Message
		err error
	}

	got := make(chan response, 1)
	requested := make(chan struct{})
	go func() {
		once := make(chan struct{}, 1)
		once <- struct{}{}
		m, err := outboxtest.WaitFor(k.context(), c, "count*", func(m *consumer.Message) bool {
			select {
			case <-once:
				close(requested)
			default:
			}
			return string(m.Value) == "3"
		})
		got <- response{m, err}
	}()
	k.publish(newMessages(1, 5)...)
	k.start(c)
	// WaitFor sees only messages that are finished after its call, so more are sent until it has
	// checked one.
	for i := 0; ; i++ {
		select {
		case <-requested:
		case <-time.After(100 * time.Millisecond):
			k.publish(newMessage("other", "counted", "3"))
			if i < 600 {
				continue
			}
			t.Fatal("WaitFor did not call its condition")
		}
		break
	}

	k.publish(newMessage("other", "counted", "3"))
	k.publish(&consumer.Message{Value: []byte("3"), Headers: []event.Header{{Key: "type", Value: []byte("counted")}}})
	a := <-got
	if a.err != nil || string(a.m.Value) != "3" {
		t.Errorf("%+v", a)
	}
}

func TestMiddlewareIsAnOnion(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	trail := func(word string) consumer.Middleware {
		return func(next consumer.HandlerFunc) consumer.HandlerFunc {
			return func(ctx context.Context, m *consumer.Message) error {
				if name := consumer.HandlerName(ctx); name != m.Name {
					t.Errorf("HandlerName: got %q, want %q", name, m.Name)
				}
				if strings.HasPrefix(string(m.Value), "drop") && word == "b" {
					return consumer.Discard(nil)
				}
				changed := m.Clone()
				changed.Value = append([]byte(nil), append(m.Value, word...)...)
				return next(ctx, changed)
			}
		}
	}

	stats := &counts{}
	got, batches := make(chan string, 10), make(chan string, 10)
	c := k.newConsumer(consumer.WithMiddleware(trail("a"), trail("b")), consumer.WithTelemetry(stats))
	addHandler(t, c, "routed", func(_ context.Context, m *consumer.Message) error {
		got <- string(m.Value)
		return nil
	}, consumer.WithMiddleware(trail("c")), consumer.WithSharedTransaction(1))
	err := c.Handle("counted", consumer.Batch(0, func(_ context.Context, ms []*consumer.Message) error {
		for _, m := range ms {
			batches <- string(m.Value)
		}
		return nil
	}, "counted"), consumer.WithMode(consumer.AtLeastOnce))
	if err != nil {
		t.Fatal(err)
	}

	k.publish(newMessage("a", "routed", "0"), newMessage("a", "counted", "drop"), newMessage("a", "counted", "1"))
	k.start(c)
	for what, ch := range map[string]chan string{"0abc": got, "1ab": batches} {
		select {
		case s := <-ch:
			if s != what {
				t.Errorf("value after the middlewares: got %q, want %q", s, what)
			}
		case <-k.context().Done():
			t.Fatal("no message")
		}
	}

	k.waitUntil("offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
	if n := stats.dropped.Load(); n != 1 {
		t.Errorf("dropped messages: got %d, want 1", n)
	}
}
