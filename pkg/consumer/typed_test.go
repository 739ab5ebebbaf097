package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

type placed struct {
	Customer string `json:"customer"`
}

// flakyCodec is a codec whose schema registry is away for the text "away".
type flakyCodec struct{ codec.Codec }

func (c flakyCodec) Decode(ctx context.Context, data []byte, into any) error {
	if string(data) == "away" {
		return fmt.Errorf("reading the schema: %w", codec.ErrUnavailable)
	}
	return c.Codec.Decode(ctx, data, into)
}

func TestATypedHandlerGetsTheDecodedPayload(t *testing.T) {
	t.Parallel()
	orderPlaced := event.Type[placed]{Aggregate: "order", Name: "OrderPlaced", Codec: flakyCodec{codec.JSON()}}
	var got []placed
	h := consumer.For(orderPlaced, func(_ context.Context, m *consumer.Message, p placed) error {
		if m.Tombstone() != (p == placed{}) {
			t.Errorf("tombstone %t with payload %+v", m.Tombstone(), p)
		}
		got = append(got, p)
		return nil
	})

	for value, check := range map[string]func(err error) bool{
		`{"customer":"c-7","more":1}`: func(err error) bool { return err == nil },
		`{"customer":7}`:              func(err error) bool { return errors.Is(err, consumer.ErrMalformed) },
		`away`: func(err error) bool {
			return errors.Is(err, codec.ErrUnavailable) && !errors.Is(err, consumer.ErrMalformed)
		},
	} {
		if err := h.Handle(t.Context(), &consumer.Message{ID: "1", Name: "OrderPlaced", Value: []byte(value)}); !check(err) {
			t.Errorf("value %s: got error %v", value, err)
		}
	}
	if err := h.Handle(t.Context(), &consumer.Message{ID: "2", Name: "OrderPlaced"}); err != nil {
		t.Errorf("a tombstone: %v", err)
	}
	if len(got) != 2 || got[0].Customer+got[1].Customer != "c-7" {
		t.Errorf("the handler got %+v, want the payload and a zero value", got)
	}
}

// A payload that cannot be decoded fails the batch before the handler, and then alone.
func TestATypedBatchGetsTheDecodedPayloads(t *testing.T) {
	t.Parallel()
	log := &changing{}
	for _, key := range []string{"a", "a", "a", "a"} {
		log.append(key)
	}
	log.mu.Lock()
	for i := range log.records {
		log.records[i].Value = fmt.Appendf(nil, `{"customer":"c-%d"}`, i)
	}
	log.records[2].Value = []byte("{")
	log.mu.Unlock()

	gone := newDisposed()
	c := newLogConsumer(t, log, consumer.WithDisposer(gone), consumer.WithInbox(&renewed{attached: 1}))
	var mu sync.Mutex
	got := map[int64]string{}
	counted := event.Type[placed]{Aggregate: "order", Name: "counted"}
	err := c.Handle("counted", consumer.BatchFor(0, counted, func(_ context.Context, messages []consumer.Typed[placed]) error {
		mu.Lock()
		defer mu.Unlock()
		for _, m := range messages {
			got[m.Offset] = m.Payload.Customer
		}
		return nil
	}))
	if err != nil {
		t.Fatal(err)
	}
	startConsumer(t, c)
	log.waitCommitted(t, 4)

	if want := map[int64]string{0: "c-0", 1: "c-1", 3: "c-3"}; !maps.Equal(got, want) {
		t.Errorf("handled %v, want %v", got, want)
	}
	if letters := gone.listAll(); len(letters) != 1 || letters[0].m.Offset != 2 || !errors.Is(letters[0].cause, consumer.ErrMalformed) {
		t.Errorf("letters: %+v", letters)
	}
	if err := c.Handle("nil", consumer.BatchFor[placed](0, counted, nil)); err == nil {
		t.Error("a nil function is accepted")
	}
}
