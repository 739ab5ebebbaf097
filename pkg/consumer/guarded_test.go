package consumer_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

// testify's require and t.FailNow end the goroutine that calls them.
func TestAHandlerThatEndsItsGoroutineFails(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed, consumer.AtLeastOnce} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			failed := make(chan *consumer.HandlerError, 10)
			c := k.newConsumer(consumer.WithMode(mode), consumer.WithConcurrency(1), consumer.WithErrorHook(func(_ context.Context, err error) {
				if e, ok := errors.AsType[*consumer.HandlerError](err); ok {
					failed <- e
				}
				// The hook may do the same.
				runtime.Goexit()
			}))
			effects := k.insertInto("effects")
			addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
				if err := effects(ctx, m); err != nil {
					return err
				}
				if string(m.Key) == "a" {
					runtime.Goexit()
				}
				return nil
			}, withTries(2))
			k.publish(newMessage("a", "counted", "0"), newMessage("b", "counted", "0"))
			k.start(c)

			k.untilLetters(1)
			k.waitUntil("the offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 2 })
			for l, err := range k.newDesk().List(k.context(), deadletter.Query{}) {
				if err != nil || l.Class != deadletter.ClassPanic || l.Attempts != 2 || !strings.Contains(l.Reason, "t.FailNow") {
					t.Errorf("letter: got %+v (%v), want one of class panic after 2 attempts", l, err)
				}
			}
			if e := <-failed; !errors.Is(e, consumer.ErrPanic) || !strings.Contains(string(e.Stack), "guarded_test.go") {
				t.Errorf("reported: got %v with the stack\n%s", e, e.Stack)
			}
			if want := map[bool]int{true: 3, false: 1}[mode == consumer.AtLeastOnce]; k.countDocuments("effects") != want {
				t.Errorf("effects: got %d, want %d", k.countDocuments("effects"), want)
			}
			for _, h := range c.Status().Handlers {
				if h.Running != 0 {
					t.Errorf("running handlers: got %d, want none", h.Running)
				}
			}
		})
	}
}

// A timeout in a statement of a transaction has a label with which the driver would run the handler again.
func TestATimeoutInAStatementIsAnOutcome(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	var calls atomic.Int32
	c := k.newConsumer(consumer.WithTimeout(500 * time.Millisecond))
	effects := k.newCollection("effects")

	if _, err := effects.InsertOne(k.context(), bson.D{{Key: "_id", Value: 1}}); err != nil {
		t.Fatal(err)
	}
	addHandler(t, c, "counted", func(ctx context.Context, _ *consumer.Message) error {
		calls.Add(1)
		return effects.FindOne(ctx, bson.D{{Key: "$where", Value: "sleep(20000) || true"}}).Err()
	}, withTries(2))
	k.publish(newMessage("a", "counted", "0"))
	k.start(c)
	k.untilLetters(1)
	for l, err := range k.newDesk().List(k.context(), deadletter.Query{}) {
		if err != nil || l.Class != deadletter.ClassTimeout || l.Attempts != 2 {
			t.Errorf("letter: got %+v (%v), want one of class timeout after 2 attempts", l, err)
		}
	}
	if got := calls.Load(); got != 2 {
		t.Errorf("calls of the handler: got %d, want 2", got)
	}
}

func TestRetryDecidesAboutErrorsOfDecoders(t *testing.T) {
	t.Parallel()
	errTemporary := errors.New("temporary")
	for name, c := range map[string]struct {
		fail  func() error // of the record of key a
		times int          // then the record can be decoded
		retry consumer.Retry
		class string // "": the record has its effect
		calls int32
	}{
		"recovers in place":    {fail: func() error { return errTemporary }, times: 2, calls: 3},
		"recovers later":       {fail: func() error { return errTemporary }, times: 4, retry: consumer.Retry{Min: 10 * time.Millisecond, Max: 20 * time.Millisecond, MaxAttempts: 6}, calls: 5},
		"given up in place":    {fail: func() error { return errTemporary }, times: 99, class: deadletter.ClassMalformed, calls: 3},
		"given up later":       {fail: func() error { return errTemporary }, times: 99, retry: consumer.Retry{Min: 10 * time.Millisecond, Max: 20 * time.Millisecond, MaxAttempts: 5}, class: deadletter.ClassMalformed, calls: 5},
		"malformed":            {fail: func() error { return consumer.ErrMalformed }, times: 99, class: deadletter.ClassMalformed, calls: 1},
		"rejected":             {fail: func() error { return consumer.Reject(errTemporary) }, times: 99, class: deadletter.ClassRejected, calls: 1},
		"again in a moment":    {fail: func() error { return consumer.RetryIn(time.Millisecond, nil) }, times: 9, calls: 10},
		"the registry is away": {fail: func() error { return codec.ErrUnavailable }, times: 4, retry: consumer.NoRetry(), calls: 5},
		"a panic":              {fail: func() error { panic(errTemporary) }, times: 99, class: deadletter.ClassPanic, calls: 3},
		"an end":               {fail: func() error { runtime.Goexit(); return nil }, times: 99, class: deadletter.ClassPanic, calls: 3},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := newKit(t, 1)
			var calls atomic.Int32
			decode := func(ctx context.Context, m *consumer.Message) error {
				if _, limited := ctx.Deadline(); !limited {
					t.Error("the context of the decoder has no deadline")
				}
				if m.Offset == 0 && calls.Add(1) <= int32(c.times) {
					return c.fail()
				}
				return consumer.Decode(ctx, m)
			}
			cons := k.newConsumer(consumer.WithDecoder(decode), consumer.WithRetry(c.retry))
			addHandler(t, cons, "counted", k.insertInto("effects"))
			// No message overtakes the record: its lane could have passed its watermark.
			k.publish(newMessage("a", "counted", "0"), newMessage("b", "counted", "0"), newMessage("a", "counted", "1"))
			stop := k.start(cons)

			want := 3
			if c.class != "" {
				want = 2
				k.untilLetters(1)
				for l, err := range k.newDesk().List(k.context(), deadletter.Query{}) {
					if err != nil || l.Class != c.class || l.Attempts != int(c.calls) || l.ID.Offset != 0 {
						t.Errorf("letter: got %+v (%v), want class %q after %d attempts", l, err, c.class, c.calls)
					}
				}
			}
			k.waitUntil("the offsets", func(context.Context) bool { return k.readCommitted(1)[0] == 3 })
			stop()
			if got := k.countDocuments("effects"); got != want {
				t.Errorf("effects: got %d, want %d", got, want)
			}
			if got := calls.Load(); got != c.calls {
				t.Errorf("calls of the decoder: got %d, want %d", got, c.calls)
			}
		})
	}
}

// While a registry is away, the status shows that, and nothing is given up.
func TestADecoderWithoutItsRegistryIsAnOutage(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	var away atomic.Bool
	away.Store(true)
	decode := func(ctx context.Context, m *consumer.Message) error {
		if away.Load() {
			return codec.ErrUnavailable
		}
		return consumer.Decode(ctx, m)
	}
	c := k.newConsumer(consumer.WithDecoder(decode), consumer.WithRetry(consumer.NoRetry()))
	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(4, 20)...)
	stop := k.start(c)
	hasReason := func(context.Context) bool {
		for _, r := range c.Status().Reasons {
			if strings.Contains(r, "decoder") && strings.Contains(r, k.topic) {
				return true
			}
		}
		return false
	}
	k.waitUntil("the reason", hasReason)
	// A stop does not wait for the registry.
	stop()
	k.start(c)
	k.waitUntil("the reason after a restart", hasReason)

	c.Pause()
	c.Resume()
	away.Store(false)
	k.waitCount("effects", 20)
	k.checkOnce("effects", 20)
	k.waitUntil("the end of the reason", func(ctx context.Context) bool { return !hasReason(ctx) })
	if got := k.countDocuments(deadletter.DefaultCollection); got != 0 {
		t.Errorf("dead letters: got %d, want none", got)
	}
}

// A codec of a handler has the same outage.
func TestACodecWithoutItsRegistrySuspendsItsHandler(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	away := &awayCodec{}
	away.away.Store(true)
	effects := k.insertInto("effects")
	typ := event.Type[string]{Aggregate: "thing", Name: "counted", Codec: away}
	c := k.newConsumer()
	retry := consumer.NoRetry()
	retry.Min, retry.Max = 20*time.Millisecond, 50*time.Millisecond
	if err := c.Handle("h", consumer.For(typ, func(ctx context.Context, m *consumer.Message, _ string) error { return effects(ctx, m) }), consumer.WithRetry(retry)); err != nil {
		t.Fatal(err)
	}
	k.publish(newMessages(4, 20)...)
	k.start(c)
	k.waitUntil("the suspension", func(context.Context) bool { return c.Status().Handlers[0].Suspended })
	k.waitUntil("some attempts", func(context.Context) bool { return away.calls.Load() > 5 })

	away.away.Store(false)
	k.waitCount("effects", 20)
	k.untilSettled(1, 20)
	k.checkOnce("effects", 20)
	if got := k.countDocuments(deadletter.DefaultCollection); got != 0 {
		t.Errorf("dead letters: got %d, want none", got)
	}
}

// awayCodec decodes strings unless its registry is away.
type awayCodec struct {
	codec.Codec
	away  atomic.Bool
	calls atomic.Int32
}

func (c *awayCodec) Decode(_ context.Context, data []byte, into any) error {
	c.calls.Add(1)
	if c.away.Load() {
		return codec.ErrUnavailable
	}
	*into.(*string) = string(data)
	return nil
}
