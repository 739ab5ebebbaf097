package outboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func equal[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func transactionIsRequired(t *testing.T, f Fixture) {
	ctx := t.Context()
	if err := f.Box.Append(ctx, eventOf("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Append: %v", err)
	}

	if err := f.Box.AppendMany(ctx, []event.Event{eventOf("lost")}); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("AppendMany: %v", err)
	}

	if _, err := f.Box.Schedule(ctx, eventOf("lost"), soon); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Schedule: %v", err)
	}

	if err := f.Transaction(ctx, func(context.Context) error {
		if err := f.Box.Append(ctx, eventOf("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("Append with the context from outside of the callback: %v", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}

	f.want(t)
}

func plainJoins(t *testing.T, f Fixture) {
	if err := f.Plain.Append(t.Context(), eventOf("alone")); err != nil {
		t.Fatal(err)
	}

	undo := errors.New("undo")
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		if err := f.Plain.Append(ctx, eventOf("rolled back")); err != nil {
			return err
		}
		return undo
	}); !errors.Is(err, undo) {
		t.Error(err)
	}

	f.want(t, "alone")
}

func allOrNothing(t *testing.T, f Fixture) {
	no := errors.New("no")
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		if err := f.Box.Append(ctx, eventOf("aborted")); err != nil {
			return err
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	func() {
		defer func() { _ = recover() }()
		_ = f.Transaction(t.Context(), func(ctx context.Context) error {
			if err := f.Box.Append(ctx, eventOf("panicked")); err != nil {
				return err
			}
			panic("in the callback")
		})
	}()

	f.want(t)
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		if err := f.Box.Append(ctx, eventOf("first")); err != nil {
			return err
		}

		if n := len(f.Stored(t)); n != 0 {
			t.Errorf("%d are seen from outside before the commit", n)
		}

		return f.Box.Append(ctx, eventOf("second"))
	}); err != nil {
		t.Fatal(err)
	}

	f.want(t, "first", "second")
}

func orderIsKept(t *testing.T, f Fixture) {
	var want []string
	for i := range 3 {
		var events []event.Event
		for j := range 40 {
			typ := fmt.Sprintf("%d-%02d", i, j)
			want, events = append(want, typ), append(events, eventOf(typ))
		}

		f.append(t, events...)
	}

	f.want(t, want...)
}

func storedEnvelope(t *testing.T, f Fixture) {
	id := uuid.MustParse("018f3f5c-0000-7000-8000-000000000001")
	at := time.UnixMilli(1_750_000_000_456)
	payload := []byte{0, 255, 1}
	ev := event.New("order", "o-1", "OrderPlaced", payload, event.WithID(id), event.WithKey("k"), event.WithTopic("t"), event.WithPartition(3),
		event.WithHeader("dup", []byte{0, 255}), event.WithHeader("dup", nil), event.WithContentType("c"), event.WithSchemaVersion("3"),
		event.WithSource("/s"), event.WithSubject("u"), event.WithTime(at), event.WithExpiresAt(at.Add(time.Hour)))
	payload[0] = 9 // the caller's own again
	f.append(t, ev, event.New("order", "o-2", "Gone", nil), event.New("order", "o-3", "Doc", bson.D{{Key: "a", Value: 1}}))
	got := f.views(t)
	if len(got) != 3 {
		t.Fatalf("%d are stored", len(got))
	}

	v := got[0]
	texts := []string{string(v.AppendID(nil)), string(v.AggregateType), string(v.AggregateID), string(v.Type), string(v.Payload), string(v.OrderingKey()), string(v.Topic), string(v.ContentType), string(v.SchemaVersion), string(v.Source), string(v.Subject)}
	equal(t, "fields", texts, []string{id.String(), "order", "o-1", "OrderPlaced", "\x00\xff\x01", "k", "t", "c", "3", "/s", "u"})
	equal(t, "numbers", []int64{int64(v.Partition), v.Time, v.ExpiresAt, int64(v.Slot)}, []int64{3, at.UnixMilli(), at.Add(time.Hour).UnixMilli(), int64(event.Slot([]byte("k")))})
	var headers []string
	for it := v.Headers.Iter(); it.Next(); {
		headers = append(headers, fmt.Sprintf("%s=%q nil %t", it.Key, it.Value, it.Value == nil))
	}

	equal(t, "headers", headers, []string{`dup="\x00\xff" nil false`, `dup="" nil true`})
	if !got[1].Tombstone() || got[2].Tombstone() {
		t.Error("nil is a tombstone, a document is none")
	}
}

func duplicateID(t *testing.T, f Fixture) {
	id := bson.NewObjectID()
	f.append(t, eventOf("first", event.WithID(id)))
	again := func(ctx context.Context) error {
		return f.Box.Append(ctx, eventOf("new"), eventOf("again", event.WithID(id)))
	}
	if err := f.Transaction(t.Context(), again); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("in a transaction: %v", err)
	}

	if err := f.Plain.Append(t.Context(), eventOf("again", event.WithID(id))); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("alone: %v", err)
	}

	same := eventOf("same")
	if err := f.Transaction(t.Context(), func(ctx context.Context) error { return f.Box.Append(ctx, same, same) }); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("twice in one call: %v", err)
	}

	f.append(t, eventOf("text", event.WithID(id.Hex()))) // another type of id is another id
	f.want(t, "first", "text")
}

func everythingWrong(t *testing.T, f Fixture) {
	big := event.New("order", "o-1", "big", bytes.Repeat([]byte("x"), SmallSize))
	if err := f.Transaction(t.Context(), func(ctx context.Context) error {
		err := f.Small.Append(ctx, eventOf("fine"), event.New("", "o-1", "bad", nil), big)
		var tooLarge *outbox.TooLargeError
		var invalid *event.InvalidError
		switch {
		case !errors.Is(err, event.ErrInvalid) || !errors.As(err, &invalid) || !errors.Is(err, outbox.ErrTooLarge) || !errors.As(err, &tooLarge):
			t.Errorf("got %v", err)
		case tooLarge.ID != big.ID() || tooLarge.Limit != SmallSize || tooLarge.Size != big.Size():
			t.Errorf("got %+v", tooLarge)
		}

		return f.Small.Append(ctx, eventOf("fine")) // nothing was written, so the transaction can go on
	}); err != nil {
		t.Error(err)
	}

	limit := event.New("order", "o-1", "limit", make([]byte, outbox.DefaultMaxSize))
	if err := f.Plain.Append(t.Context(), limit); !errors.Is(err, outbox.ErrTooLarge) {
		t.Errorf("above the default: %v", err)
	}

	f.want(t, "fine")
}

func traceContext(t *testing.T, f Fixture) {
	w3c := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	in := propagation.MapCarrier{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "a=1", "baggage": "user=7"}
	own := "00-ffffffffffffffffffffffffffffffff-b7ad6b7169203331-01"
	if err := f.Transaction(w3c.Extract(t.Context(), in), func(ctx context.Context) error {
		return f.Box.Append(ctx, eventOf("traced", event.WithHeader("mine", []byte("x"))), eventOf("own", event.WithHeader("traceparent", []byte(own))))
	}); err != nil {
		t.Fatal(err)
	}

	f.append(t, eventOf("untraced"))
	want := []map[string]string{
		{"mine": "x", "traceparent": in["traceparent"], "tracestate": "a=1", "baggage": "user=7"},
		{"traceparent": own, "baggage": "user=7"},
		{},
	}

	for i, v := range f.views(t) {
		got := map[string]string{}
		for it := v.Headers.Iter(); it.Next(); {
			got[string(it.Key)] += string(it.Value)
		}

		equal(t, string(v.Type), got, want[i])
	}
}

func emptyCalls(t *testing.T, f Fixture) {
	if err := f.Box.Append(t.Context()); err != nil {
		t.Errorf("no events, no transaction: %v", err)
	}
	if err := f.Transaction(t.Context(), func(ctx context.Context) error { return f.Box.AppendMany(ctx, nil) }); err != nil {
		t.Error(err)
	}
	f.want(t)
}
