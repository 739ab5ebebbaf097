package outboxtest_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outboxtest"
)

var orderNote = event.Type[[]byte]{Aggregate: "order", Name: "OrderNote", Codec: codec.Raw("text/plain")}

func TestAppendedEventsAreFound(t *testing.T) {
	t.Parallel()
	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		testAppended(t, outboxtest.New(t).Box())
	})

	t.Run("MongoDB", func(t *testing.T) {
		t.Parallel()
		box, err := outbox.New(stacktest.Database(t, stacktest.Client(t)))
		if err != nil {
			t.Fatal(err)
		}
		testAppended(t, box)
	})
}

func testAppended(t *testing.T, box *outbox.Box) {
	requireFailure(t, func(tb testing.TB) { outboxtest.RequireAppended(tb, box, OrderPlaced) },
		"0 events OrderPlaced of aggregate order match, want 1", "the outbox is empty")

	appendEvents(t, box,
		OrderPlaced.New("o-1", Placed{Cents: 100}, event.WithKey("c-1"), event.WithTopic("special"), event.WithHeader("h", []byte("x"))),
		OrderPlaced.New("o-2", Placed{Cents: 200}),
		orderNote.New("o-1", []byte("leave it at the door")),
		OrderPlaced.Tombstone("o-3"),
	)
	err := box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := box.Append(ctx, OrderPlaced.New("o-1", Placed{})); err != nil {
			return err
		}
		return context.Canceled // rolls back
	})
	if err == nil {
		t.Fatal("the transaction was committed")
	}

	got := outboxtest.RequireAppended(t, box, OrderPlaced, outboxtest.WithAggregateID("o-1"))
	want := event.Aggregate{Type: "order", ID: "o-1"}
	if got.Payload.Cents != 100 || got.Aggregate != want || got.Key != "c-1" || got.Topic != "special" || got.ID.IsZero() {
		t.Errorf("appended event: got %+v", got)
	}
	if len(got.Headers) != 1 || got.Headers[0].Key != "h" || string(got.Headers[0].Value) != "x" {
		t.Errorf("headers: got %v", got.Headers)
	}
	if got := outboxtest.RequireAppended(t, box, OrderPlaced, outboxtest.WithKey("o-2")); got.Payload.Cents != 200 {
		t.Errorf("event with key o-2: got %+v", got)
	}
	if got := outboxtest.RequireAppended(t, box, orderNote); string(got.Payload) != "leave it at the door" {
		t.Errorf("payload of another codec: got %q", got.Payload)
	}

	all := outboxtest.AllAppended(t, box, OrderPlaced)
	if len(all) != 3 || all[1].Payload.Cents != 200 || all[2].Aggregate.ID != "o-3" {
		t.Errorf("all events: got %+v, want the events of o-1, o-2 and o-3", all)
	}
	outboxtest.RequireNone(t, box, OrderPlaced, outboxtest.WithAggregateID("o-4"))
	outboxtest.RequireNone(t, box, event.Type[Placed]{Aggregate: "invoice", Name: "OrderPlaced"})

	list := []string{
		`OrderPlaced about order o-1, key c-1: {"cents":100}`,
		"OrderNote about order o-1: leave it at the door", "OrderPlaced about order o-3: tombstone",
	}
	requireFailure(t, func(tb testing.TB) { outboxtest.RequireAppended(tb, box, OrderPlaced) },
		append(list, "3 events OrderPlaced of aggregate order match, want 1")...)
	requireFailure(t, func(tb testing.TB) { outboxtest.RequireNone(tb, box, OrderPlaced) },
		append(list, "3 events OrderPlaced of aggregate order match, want none")...)
	requireFailure(t, func(tb testing.TB) {
		outboxtest.AllAppended(tb, box, event.Type[int]{Aggregate: "order", Name: "OrderNote"})
	}, "about order o-1: decoding the payload of OrderNote")
}

// A transaction of one store is none for a box of the other.
func TestABoxRequiresATransactionOfItsStore(t *testing.T) {
	t.Parallel()
	inMemory := outboxtest.New(t).Box()
	onMongo, err := outbox.New(stacktest.Database(t, stacktest.Client(t)))
	if err != nil {
		t.Fatal(err)
	}

	for _, boxes := range [][2]*outbox.Box{{inMemory, onMongo}, {onMongo, inMemory}} {
		err := boxes[0].Transaction(t.Context(), func(ctx context.Context) error {
			return boxes[1].Append(ctx, OrderPlaced.New("o-1", Placed{}))
		})
		if !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("Append in a transaction of another store: got %v, want ErrNoTransaction", err)
		}
		outboxtest.RequireNone(t, boxes[1], OrderPlaced)
	}
}

func TestAFailureDoesNotListEverything(t *testing.T) {
	t.Parallel()
	box := outboxtest.New(t).Box()
	for range 60 {
		appendEvents(t, box, orderNote.New("o-1", []byte(strings.Repeat("x", 500))))
	}
	requireFailure(t, func(tb testing.TB) { outboxtest.RequireAppended(tb, box, OrderPlaced) },
		"… (500 bytes)", "… and 10 more")
}
