package consumer_test

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/google/go-cmp/cmp"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// offline returns a consumer that is never run.
func offline(t *testing.T, opts ...consumer.Option) *consumer.Consumer {
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
	_, err := consumer.New("", nil, consumer.WithConcurrency(0), consumer.WithBatch(0), consumer.WithTimeout(-1), consumer.WithDrain(0),
		consumer.WithBuffer(0, 0), consumer.Commits(consumer.CommitCount(0)), consumer.WithMode(consumer.Mode(9)), consumer.WithBrokers("nowhere"), consumer.WithMiddleware(nil))
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range []string{
		"group is empty", "database is nil", "no topics", "concurrency of 0", "batch of 0", "time-out of a handler", "drain of 0", "buffer of 0",
		"commit after 0", "mode ", "broker \"nowhere\"", "a middleware is nil",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("New: got error %v, want it to contain %q", err, want)
		}
	}
}

func TestRegistryListsAndTakesBack(t *testing.T) {
	t.Parallel()
	c := offline(t)
	handle(t, c, "order.*", nop)
	handle(t, c, "*", nop, consumer.Named("audit"), consumer.WithMode(consumer.AtLeastOnce))
	off, err := c.On("order.placed", nop)
	if err != nil {
		t.Fatal(err)
	}

	if err := c.Subscribe([]string{"a", "b"}, consumer.HandlerFunc(nop), consumer.Named("both")); err != nil {
		t.Fatal(err)
	}
	if err := c.Subscribe(nil, consumer.HandlerFunc(nop)); err != nil {
		t.Errorf("Subscribe without patterns: got %v, want nil", err)
	}

	if d := cmp.Diff([]string{"*", "a", "b", "order.*", "order.placed"}, c.Patterns()); d != "" {
		t.Errorf("Patterns (-want +got):\n%s", d)
	}
	if n := c.Count("order.placed"); n != 3 {
		t.Errorf("Count: got %d, want 3", n)
	}

	want := []consumer.HandlerInfo{
		{Name: "order.*", Patterns: []string{"order.*"}},
		{Name: "audit", Patterns: []string{"*"}, Mode: consumer.AtLeastOnce},
		{Name: "order.placed", Patterns: []string{"order.placed"}},
		{Name: "both", Patterns: []string{"a", "b"}},
	}
	if d := cmp.Diff(want, c.Handlers()); d != "" {
		t.Errorf("Handlers (-want +got):\n%s", d)
	}

	off()
	off()
	if !c.Off("audit") || c.Off("audit") || c.OffAll("a") != 1 || c.Count("order.placed") != 1 || c.OffAll("") != 1 {
		t.Errorf("handlers after Off and OffAll: got %v, want none", c.Handlers())
	}
	if err := c.Run(t.Context()); !errors.Is(err, consumer.ErrNoHandler) {
		t.Errorf("Run without handlers: got %v, want ErrNoHandler", err)
	}
}

func TestSecondHandlerOfATypeIsRefusedWhereStrict(t *testing.T) {
	t.Parallel()
	c := offline(t, consumer.Strict())
	handle(t, c, "order.*", nop)

	var dup *consumer.DuplicateHandlerError
	err := c.Handle("order.placed", consumer.HandlerFunc(nop))
	if !errors.As(err, &dup) || dup.Name != "order.*" || dup.Pattern != "order.placed" {
		t.Errorf("second handler of a type: got %v, want a DuplicateHandlerError of order.* for order.placed", err)
	}

	// Subscribe registers all patterns or none.
	if err := c.Subscribe([]string{"paid", "*.placed"}, consumer.HandlerFunc(nop), consumer.Named("x")); !errors.As(err, &dup) {
		t.Errorf("Subscribe with a pattern that is taken: got %v, want a DuplicateHandlerError", err)
	}
	if c.Count("paid") != 0 {
		t.Error("a rejected Subscribe registered one of its patterns")
	}
	handle(t, c, "paid", nop)

	c = offline(t)
	handle(t, c, "paid", nop)
	handle(t, c, "paid", nop, consumer.Named("other"))
	if err := c.Handle("paid", consumer.HandlerFunc(nop)); !errors.As(err, &dup) || dup.Pattern != "" {
		t.Errorf("same name twice: got %v, want a DuplicateHandlerError", err)
	}
}

func TestHandleRefusesWhatCannotBe(t *testing.T) {
	t.Parallel()
	c := offline(t)
	for name, err := range map[string]error{
		"nil":      c.Handle("a", nil),
		"nil func": c.Handle("a", consumer.HandlerFunc(nil)),
		"empty":    c.Handle("", consumer.HandlerFunc(nop)),
		"slash":    c.Handle("a", consumer.HandlerFunc(nop), consumer.Named("a/b")),
		"batch":    c.Handle("a", consumer.HandlerFunc(nop), consumer.WithBatch(1000)),
		"policy":   c.Handle("a", consumer.HandlerFunc(nop), consumer.OnFailure(nil)),
	} {
		if err == nil {
			t.Errorf("%s: got no error, want one", name)
		}
	}
	if n := len(c.Handlers()); n != 0 {
		t.Errorf("%d handlers", n)
	}
}

// The settings of a handler override those of New, in both directions.
func TestSettingsOfAHandlerOverrideThoseOfAll(t *testing.T) {
	t.Parallel()
	c := offline(t, consumer.WithMode(consumer.Claimed))
	handle(t, c, "a", nop)
	handle(t, c, "b", nop, consumer.WithMode(consumer.Transactional))
	handle(t, c, "c", nop, consumer.WithMode(consumer.AtLeastOnce), consumer.InTransaction())
	var modes []consumer.Mode
	for _, h := range c.Handlers() {
		modes = append(modes, h.Mode)
	}
	if d := cmp.Diff([]consumer.Mode{consumer.Claimed, consumer.Transactional, consumer.AtLeastOnce}, modes); d != "" {
		t.Error(d)
	}
}

func TestOnceAndWaitFor(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	c := k.consumer()
	handle(t, c, "counted", k.effects("effects"))
	var ran atomic.Int64
	_, err := c.Once("counted", func(context.Context, *consumer.Message) error {
		ran.Add(1)
		return nil
	}, consumer.Named("first"))
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := c.WaitFor(short, "counted", nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("WaitFor: %v", err)
	}
	type answer struct {
		m   *consumer.Message
		err error
	}
	got := make(chan answer, 1)
	asked := make(chan struct{})
	go func() {
		once := make(chan struct{}, 1)
		once <- struct{}{}
		m, err := c.WaitFor(k.context(), "count*", func(m *consumer.Message) bool {
			select {
			case <-once:
				close(asked)
			default:
			}
			return string(m.Value) == "3"
		})
		got <- answer{m, err}
	}()
	k.publish(numbered(1, 5)...)
	k.start(c)
	// WaitFor sees what is finished after it was called; so more is sent until it has looked.
	for i := 0; ; i++ {
		select {
		case <-asked:
		case <-time.After(100 * time.Millisecond):
			k.publish(msg("other", "counted", "3"))
			if i < 600 {
				continue
			}
			t.Fatal("WaitFor did not call its condition")
		}
		break
	}
	k.publish(msg("other", "counted", "3"))
	k.publish(&consumer.Message{Value: []byte("3"), Headers: []event.Header{{Key: "type", Value: []byte("counted")}}})
	a := <-got
	if a.err != nil || string(a.m.Value) != "3" {
		t.Errorf("%+v", a)
	}
	k.until("the first one's end", func(context.Context) bool { return c.Count("counted") == 1 })
	if ran.Load() != 1 {
		t.Errorf("calls of the Once handler: got %d, want 1", ran.Load())
	}
}

func TestMiddlewareIsAnOnion(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	trail := func(word string) consumer.Middleware {
		return func(next consumer.Handler) consumer.Handler {
			return consumer.HandlerFunc(func(ctx context.Context, m *consumer.Message) error {
				if strings.HasPrefix(string(m.Value), "drop") && word == "b" {
					return consumer.ErrDrop
				}
				changed := m.Copy()
				changed.Value = append([]byte(nil), append(m.Value, word...)...)
				return next.Handle(ctx, changed)
			})
		}
	}

	stats := &counts{}
	got, batches := make(chan string, 10), make(chan string, 10)
	c := k.consumer(consumer.WithMiddleware(trail("a"), trail("b")), consumer.WithTelemetry(stats), consumer.Receive(func(_ context.Context, m *consumer.Message) (*consumer.Message, error) {
		switch string(m.Value) {
		case "gone":
			return nil, consumer.ErrDrop
		case "0":
			m.Name = "routed"
		}
		return m, nil
	}))
	handle(t, c, "routed", func(_ context.Context, m *consumer.Message) error {
		got <- string(m.Value)
		return nil
	}, consumer.WithMiddleware(trail("c")), consumer.WithBatch(1))
	err := c.HandleBatch("counted", func(_ context.Context, ms []*consumer.Message) error {
		for _, m := range ms {
			batches <- string(m.Value)
		}
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce))
	if err != nil {
		t.Fatal(err)
	}

	k.publish(msg("a", "counted", "0"), msg("a", "counted", "drop"), msg("a", "counted", "gone"), msg("a", "counted", "1"))
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

	k.until("offsets", func(context.Context) bool { return k.committed(1)[0] == 4 })
	if n := stats.dropped.Load(); n != 2 {
		t.Errorf("dropped messages: got %d, want 2", n)
	}
}
