package operate_test

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/operate"
)

// A message that a handler retries is listed, and handled after a retry. A discarded one becomes a dead letter of the handler.
func TestMessagesThatHandlersRetryAreListedRetriedAndDiscarded(t *testing.T) {
	t.Parallel()
	s := setup(t)
	s.runRelay()
	op := s.operator().As("ann")
	var works atomic.Bool
	group := stacktest.Name(t)
	c, err := consumer.New(group, s.db, consumer.WithBrokers(s.config.Kafka.Brokers...), consumer.WithTopics(s.topic),
		consumer.WithLogger(slog.New(slog.DiscardHandler)))
	if err != nil {
		t.Fatal(err)
	}
	handled := make(chan string, 10)
	err = c.Handle("pack", consumer.Func(func(_ context.Context, m *consumer.Message) error {
		if !works.Load() {
			return errors.New("the printer has no paper")
		}
		handled <- string(m.Key)
		return nil
	}, "OrderPlaced"))
	if err != nil {
		t.Fatal(err)
	}
	s.runInBackground(c.Run)

	s.append("o1")
	s.append("o2")
	filter := operate.MessageFilter{Group: group, Handler: "pack"}
	messages := eventually(t, 2, func() iterOf[operate.RetriedMessage] { return op.Retried(t.Context(), filter) })
	byKey := map[string]operate.RetriedMessage{messages[0].Key: messages[0], messages[1].Key: messages[1]}
	if got := byKey["o2"]; got.Reason != "the printer has no paper" || got.Attempts < 1 || got.NextAt.IsZero() || got.Place == "" || got.Type != "OrderPlaced" {
		t.Errorf("the retried message: got %+v", got)
	}

	if _, err := op.DiscardMessages(t.Context(), operate.MessageFilter{}); !errors.Is(err, operate.ErrInvalid) {
		t.Errorf("a discard without a condition: got %v, want ErrInvalid", err)
	}
	if count, err := op.DiscardMessages(t.Context(), operate.MessageFilter{Group: group, IDs: []string{byKey["o2"].Place}}); count != 1 || err != nil {
		t.Errorf("discard: got %d, %v", count, err)
	}
	letters := eventually(t, 1, func() iterOf[operate.Letter] {
		return op.Letters(t.Context(), operate.LetterFilter{By: operate.Handler, Group: group})
	})
	if letters[0].Key != "o2" || letters[0].Ref.By != operate.Handler || letters[0].Ref.Handler != "pack" {
		t.Errorf("the letter of the handler: got %+v", letters[0])
	}
	works.Store(true)
	if count, err := op.RetryMessages(t.Context(), filter); count != 1 || err != nil {
		t.Errorf("retry: got %d, %v", count, err)
	}
	select {
	case key := <-handled:
		if key != "o1" {
			t.Errorf("handled: got %s, want o1", key)
		}
	case <-t.Context().Done():
		t.Fatal("the message was not handled")
	}
	s.requireAudit("handler_discarded", "ann")
}
