package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/breaker"
	"github.com/outrelay/outrelay/pkg/outboxtest"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// curious is a Sink that asks its consumer at each measurement.
type curious struct {
	telemetry.Discard
	ask   func()
	calls atomic.Int64
}

func (s *curious) Measure(telemetry.Measurement) { s.calls.Add(1); s.ask() }

func (s *curious) Start(ctx context.Context, _ telemetry.Attempt) (context.Context, func(error)) {
	s.ask()
	return ctx, func(error) { s.ask() }
}

// Every function of the user may call the methods of the consumer that do not block.
func TestFunctionsOfTheUserMayCallTheConsumer(t *testing.T) {
	t.Parallel()
	app := stacktest.Name(t)
	k := newKit(t, 2, options.Client().SetAppName(app))
	var c *consumer.Consumer
	ask := func() {
		s := c.Status()
		if s.Group != k.group {
			t.Errorf("status: got group %q, want %q", s.Group, k.group)
		}
		// Another handler is registered and removed.
		_ = c.Handle("extra", consumer.Func(nop, "extra"))
		c.Remove("extra")
	}
	sink := &curious{ask: ask}
	var errorsSeen atomic.Int64
	c = k.newConsumer(
		consumer.WithTelemetry(sink), consumer.WithRetry(soon), consumer.WithBufferedRecords(4),
		consumer.WithErrorHook(func(context.Context, error) { errorsSeen.Add(1); ask() }),
		consumer.WithRetryFor(func(error) bool { ask(); return false }, soon),
		consumer.WithDecoder(func(ctx context.Context, m *consumer.Message) error { ask(); return consumer.Decode(ctx, m) }),
	)
	var b *breaker.Breaker
	b = breaker.New("dependency", breaker.WithFailure(func(error) bool { ask(); return b.State() != breaker.Closed }))
	effects := k.insertInto("effects")
	var failures atomic.Int64
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if failures.Add(1) < 5 {
			return errWanted
		}
		return effects(ctx, m)
	}, consumer.WithMiddleware(b.Middleware()))

	found := make(chan error, 2)
	for _, pattern := range []string{"counted", "unknown"} {
		go func() {
			_, err := outboxtest.WaitFor(k.context(), c, pattern, func(*consumer.Message) bool { ask(); return true })
			found <- err
		}()
	}
	const n = 40
	k.publish(append(newMessages(8, n), newMessage("x", "unknown", "1"))...)
	stop := k.start(c)
	for range 2 {
		if err := <-found; err != nil {
			t.Error(err)
		}
	}
	k.waitCount("effects", n)

	// The same in an outage, at a pause and at a stop.
	end := stacktest.FailCommand(t, app, "alwaysOn", bson.D{
		{Key: "failCommands", Value: bson.A{"find", "insert", "update", "aggregate"}}, {Key: "errorCode", Value: 11600},
	})
	before := errorsSeen.Load()
	k.publish(newMessage("late", "counted", "0"))
	k.waitUntil("the report of the outage", func(context.Context) bool { return errorsSeen.Load() > before })
	end()
	c.Pause()
	c.Resume()
	k.waitCount("effects", n+1)
	ended := make(chan struct{})
	go func() { stop(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		t.Error("Run does not end")
	}
	if sink.calls.Load() == 0 {
		t.Error("the sink got no measurement")
	}
}
