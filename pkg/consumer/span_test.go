package consumer_test

import (
	"context"
	"errors"
	"testing"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// spanLog passes each attempt on, with its outcome.
type spanLog struct {
	telemetry.Discard
	ended chan error
	begun chan telemetry.Attempt
}

type spanKey struct{}

func (a *spanLog) Start(ctx context.Context, x telemetry.Attempt) (context.Context, func(error)) {
	a.begun <- x
	return context.WithValue(ctx, spanKey{}, "span"), func(err error) { a.ended <- err }
}

// The text of a span's error is the class of the failure: the failure itself may quote the message.
func TestTheOutcomeOfASpanQuotesNothing(t *testing.T) {
	t.Parallel()
	l, seen, secret := &changing{}, &spanLog{ended: make(chan error, 100), begun: make(chan telemetry.Attempt, 100)}, errors.New("card 4111")
	// No other process begins a generation: the first message is tried once.
	c := newLogConsumer(t, l, consumer.WithInbox(&renewed{attached: 1}), consumer.WithTelemetry(seen))
	addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
		if ctx.Value(spanKey{}) == nil {
			t.Error("the handler has another context than that of the span")
		}
		if m.Offset == 0 {
			return secret
		}
		return nil
	}, withTries(1))
	l.append("a")
	startConsumer(t, c)
	if a := <-seen.begun; a.Group != "group" || a.Handler != "counted" || len(a.Messages) != 1 || a.Messages[0].Number != 1 {
		t.Errorf("the attempt is %+v", a)
	}
	if err := <-seen.ended; err == nil || err.Error() != deadletter.ClassHandler || !errors.Is(err, secret) {
		t.Errorf("ended with %v, want the class %s of the handler's error", err, deadletter.ClassHandler)
	}

	l.append("b")
	if err := <-seen.ended; err != nil {
		t.Errorf("ended with %v after a success", err)
	}
}
