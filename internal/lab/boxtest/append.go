package boxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.opentelemetry.io/otel/propagation"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// checkEqual fails the test unless got and want are deeply equal.
func checkEqual[T any](t *testing.T, name string, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%s: got %v, want %v", name, got, want)
	}
}

func transactionIsRequired(t *testing.T, fixture Fixture) {
	ctx := t.Context()
	if err := fixture.Box.Append(ctx, newEvent("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Append: %v", err)
	}

	if _, err := fixture.Box.Schedule(ctx, soon, newEvent("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("Schedule: %v", err)
	}

	if err := fixture.Transaction(ctx, func(context.Context) error {
		if err := fixture.Box.Append(ctx, newEvent("lost")); !errors.Is(err, outbox.ErrNoTransaction) {
			t.Errorf("Append with the context from outside of the callback: %v", err)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}

	fixture.checkTypes(t)
}

func plainJoins(t *testing.T, fixture Fixture) {
	if err := fixture.Plain.Append(t.Context(), newEvent("alone")); err != nil {
		t.Fatal(err)
	}

	undo := errors.New("undo")
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		if err := fixture.Plain.Append(ctx, newEvent("rolled back")); err != nil {
			return err
		}
		return undo
	}); !errors.Is(err, undo) {
		t.Error(err)
	}

	fixture.checkTypes(t, "alone")
}

func allOrNothing(t *testing.T, fixture Fixture) {
	no := errors.New("no")
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		if err := fixture.Box.Append(ctx, newEvent("aborted")); err != nil {
			return err
		}
		return no
	}); !errors.Is(err, no) {
		t.Error(err)
	}

	func() {
		defer func() { _ = recover() }()
		_ = fixture.Transaction(t.Context(), func(ctx context.Context) error {
			if err := fixture.Box.Append(ctx, newEvent("panicked")); err != nil {
				return err
			}
			panic("in the callback")
		})
	}()

	fixture.checkTypes(t)
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		if err := fixture.Box.Append(ctx, newEvent("first")); err != nil {
			return err
		}

		if n := len(fixture.Stored(t)); n != 0 {
			t.Errorf("%d envelopes are visible outside of the transaction before the commit, want 0", n)
		}

		return fixture.Box.Append(ctx, newEvent("second"))
	}); err != nil {
		t.Fatal(err)
	}

	fixture.checkTypes(t, "first", "second")
}

func orderIsKept(t *testing.T, fixture Fixture) {
	var want []string
	for i := range 3 {
		var events []event.Event
		for j := range 40 {
			typ := fmt.Sprintf("%d-%02d", i, j)
			want = append(want, typ)
			events = append(events, newEvent(typ))
		}
		fixture.appendEvents(t, events...)
	}

	fixture.checkTypes(t, want...)
}

func storedEnvelope(t *testing.T, fixture Fixture) {
	id := uuid.MustParse("018f3f5c-0000-7000-8000-000000000001")
	at := time.UnixMilli(1_750_000_000_456)
	payload := []byte{0, 255, 1}
	ev := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "OrderPlaced", event.Bytes("c", payload),
		event.WithID(id), event.WithKey("k"), event.WithTopic("t"), event.WithPartition(3),
		event.WithHeader("dup", []byte{0, 255}), event.WithHeader("dup", nil), event.WithSchemaVersion("3"),
		event.WithSource("/s"), event.WithSubject("u"),
		event.WithTime(at), event.WithExpiry(at.Add(time.Hour)))

	// The caller may change the bytes after New.
	payload[0] = 9
	fixture.appendEvents(t, ev,
		event.New(event.Aggregate{Type: "order", ID: "o-2"}, "Gone", event.Payload{}),
		event.New(event.Aggregate{Type: "order", ID: "o-3"}, "Doc", event.Document(bson.D{{Key: "a", Value: 1}})))

	got := fixture.parseStored(t)
	if len(got) != 3 {
		t.Fatalf("%d envelopes are stored, want 3", len(got))
	}

	view := got[0]
	texts := []string{
		string(view.AppendID(nil)), string(view.AggregateType), string(view.AggregateID), string(view.Type), string(view.Payload),
		string(view.OrderingKey()), string(view.Topic), string(view.ContentType), string(view.SchemaVersion),
		string(view.Source), string(view.Subject),
	}
	checkEqual(t, "fields", texts, []string{
		id.String(), "order", "o-1", "OrderPlaced", "\x00\xff\x01", "k", "t", "c", "3", "/s", "u",
	})
	checkEqual(t, "numbers",
		[]int64{int64(view.Partition), view.Time, view.ExpiresAt, int64(view.Slot)},
		[]int64{3, at.UnixMilli(), at.Add(time.Hour).UnixMilli(), int64(keyhash.Slot([]byte("k")))})

	var headers []string
	for it := view.Headers.Iter(); it.Next(); {
		headers = append(headers, fmt.Sprintf("%s=%q nil %t", it.Key, it.Value, it.Value == nil))
	}

	checkEqual(t, "headers", headers, []string{`dup="\x00\xff" nil false`, `dup="" nil true`})
	if !got[1].Tombstone() || got[2].Tombstone() {
		t.Error("want a tombstone for nil, and none for a document")
	}
}

func duplicateID(t *testing.T, fixture Fixture) {
	id := bson.NewObjectID()
	fixture.appendEvents(t, newEvent("first", event.WithID(id)))
	again := func(ctx context.Context) error {
		return fixture.Box.Append(ctx, newEvent("new"), newEvent("again", event.WithID(id)))
	}
	if err := fixture.Transaction(t.Context(), again); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("in a transaction: %v", err)
	}

	if err := fixture.Plain.Append(t.Context(), newEvent("again", event.WithID(id))); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("alone: %v", err)
	}

	same := newEvent("same")
	err := fixture.Transaction(t.Context(), func(ctx context.Context) error { return fixture.Box.Append(ctx, same, same) })
	if !mongo.IsDuplicateKeyError(err) {
		t.Errorf("twice in one call: %v", err)
	}

	// The same text as another type is another id.
	fixture.appendEvents(t, newEvent("text", event.WithID(id.Hex())))
	fixture.checkTypes(t, "first", "text")
}

func everythingWrong(t *testing.T, fixture Fixture) {
	big := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "big", event.Bytes("", bytes.Repeat([]byte("x"), SmallSize)))
	wantText := fmt.Sprintf("event %s has %d bytes, the limit is %d", big.ID(), big.Size(), SmallSize)
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		err := fixture.Small.Append(ctx, newEvent("fine"), event.New(event.Aggregate{ID: "o-1"}, "bad", event.JSON(make(chan int))), big)
		var invalid *event.InvalidError
		switch {
		case !errors.Is(err, event.ErrInvalid) || !errors.As(err, &invalid):
			t.Errorf("got %v, want an *event.InvalidError", err)
		case len(invalid.Problems) != 2:
			t.Errorf("got %q, want the payload and the aggregate", invalid.Problems)
		case !errors.Is(err, outbox.ErrTooLarge) || !strings.Contains(err.Error(), wantText):
			t.Errorf("got %v, want ErrTooLarge with %q", err, wantText)
		}

		// Nothing was written, so the transaction can continue.
		return fixture.Small.Append(ctx, newEvent("fine"))
	}); err != nil {
		t.Error(err)
	}

	limit := event.New(event.Aggregate{Type: "order", ID: "o-1"}, "limit", event.Bytes("", make([]byte, 900<<10)))
	if err := fixture.Plain.Append(t.Context(), limit); !errors.Is(err, outbox.ErrTooLarge) {
		t.Errorf("an event above the default limit: %v", err)
	}

	fixture.checkTypes(t, "fine")
}

func traceContext(t *testing.T, fixture Fixture) {
	w3c := propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})
	in := propagation.MapCarrier{
		"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"tracestate":  "a=1",
		"baggage":     "user=7",
	}
	own := "00-ffffffffffffffffffffffffffffffff-b7ad6b7169203331-01"
	if err := fixture.Transaction(w3c.Extract(t.Context(), in), func(ctx context.Context) error {
		return fixture.Box.Append(ctx,
			newEvent("traced", event.WithHeader("mine", []byte("x"))),
			newEvent("own", event.WithHeader("traceparent", []byte(own))))
	}); err != nil {
		t.Fatal(err)
	}

	fixture.appendEvents(t, newEvent("untraced"))
	want := []map[string]string{
		{"mine": "x", "traceparent": in["traceparent"], "tracestate": "a=1", "baggage": "user=7"},
		{"traceparent": own, "baggage": "user=7"},
		{},
	}

	for i, v := range fixture.parseStored(t) {
		got := map[string]string{}
		for it := v.Headers.Iter(); it.Next(); {
			got[string(it.Key)] += string(it.Value)
		}

		checkEqual(t, string(v.Type), got, want[i])
	}
}

func emptyCalls(t *testing.T, fixture Fixture) {
	if err := fixture.Box.Append(t.Context()); err != nil {
		t.Errorf("no events and no transaction: %v", err)
	}

	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error { return fixture.Box.Append(ctx) }); err != nil {
		t.Error(err)
	}

	fixture.checkTypes(t)
}

// middleware checks that middleware changes, multiplies and drops events, from the outermost to the innermost.
func middleware(t *testing.T, fixture Fixture) {
	var calls []string
	named := func(name string) outbox.Middleware {
		return func(next outbox.AppendFunc) outbox.AppendFunc {
			return func(ctx context.Context, ev event.Event) error {
				calls = append(calls, name+" "+ev.Name())
				return next(ctx, ev)
			}
		}
	}
	change := func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			switch ev.Name() {
			case "drop":
				return nil
			case "twice":
				return errors.Join(next(ctx, newEvent("first")), next(ctx, newEvent("second")))
			default:
				return next(ctx, ev.With(event.WithHeader("seen", []byte("yes"))))
			}
		}
	}
	box := fixture.With(named("outer"), change, named("inner"))

	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		calls = nil
		if err := box.Append(ctx, newEvent("drop"), newEvent("twice"), newEvent("plain")); err != nil {
			return err
		}

		id, err := box.Schedule(ctx, soon, newEvent("drop"))
		if !id.IsZero() {
			t.Errorf("the scheduled event that is left out has the id %s", id)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}

	checkEqual(t, "calls", calls, []string{
		"outer drop", "outer twice", "inner first", "inner second", "outer plain", "inner plain", "outer drop",
	})
	fixture.checkTypes(t, "first", "second", "plain")
	if it := fixture.parseStored(t)[2].Headers.Iter(); !it.Next() || string(it.Key) != "seen" {
		t.Errorf("the last event has the header %q, want that of the middleware", it.Key)
	}

	// Cancel needs this id.
	renamed := event.NewID("renamed")
	rename := func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error { return next(ctx, ev.With(event.WithID("renamed"))) }
	}
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		id, err := fixture.With(rename).Schedule(ctx, soon, newEvent("later"))
		if id != renamed {
			t.Errorf("Schedule returned %s, want %s", id, renamed)
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
}

func failingMiddleware(t *testing.T, fixture Fixture) {
	no := errors.New("no")
	box := fixture.With(func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error {
			if ev.Name() == "bad" {
				return no
			}
			return next(ctx, ev)
		}
	})

	runs := 0
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		runs++
		if err := box.Append(ctx, newEvent("good"), newEvent("bad")); !errors.Is(err, no) {
			t.Errorf("Append: %v, want the error of the middleware", err)
		}

		// Nothing was sent, so the transaction can continue.
		return box.Append(ctx, newEvent("other"))
	}); err != nil || runs != 1 {
		t.Errorf("got %v after %d runs, want success after 1", err, runs)
	}
	repeat := fixture.With(func(next outbox.AppendFunc) outbox.AppendFunc {
		return func(ctx context.Context, ev event.Event) error { return errors.Join(next(ctx, ev), next(ctx, ev)) }
	})
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error {
		return repeat.Append(ctx, newEvent("repeated"))
	}); !mongo.IsDuplicateKeyError(err) {
		t.Errorf("a middleware that passes an event on twice: %v, want an error for the second", err)
	}

	if err := box.Append(t.Context(), newEvent("bad")); !errors.Is(err, outbox.ErrNoTransaction) {
		t.Errorf("without a transaction the middleware must not run: %v", err)
	}

	fixture.checkTypes(t, "other")
}

func causeOfContext(t *testing.T, fixture Fixture) {
	own := event.Cause{CorrelationID: "own conversation", CausationID: "own cause"}
	ofContext := event.Cause{CorrelationID: "conversation", CausationID: "cause"}
	ctx := event.ContextWithCause(t.Context(), ofContext)
	if err := fixture.Transaction(ctx, func(ctx context.Context) error {
		return fixture.Box.Append(ctx, newEvent("none"), newEvent("both", event.WithCause(own)),
			newEvent("half", event.WithCause(event.Cause{CorrelationID: own.CorrelationID})))
	}); err != nil {
		t.Fatal(err)
	}
	if err := fixture.Transaction(t.Context(), func(ctx context.Context) error { return fixture.Box.Append(ctx, newEvent("outside")) }); err != nil {
		t.Fatal(err)
	}

	want := []event.Cause{ofContext, own, {CorrelationID: own.CorrelationID, CausationID: ofContext.CausationID}, {}}
	for i, doc := range fixture.Stored(t) {
		got := event.Cause{CorrelationID: headerOf(doc, event.HeaderCorrelationID), CausationID: headerOf(doc, event.HeaderCausationID)}
		checkEqual(t, bson.Raw(doc).Lookup("type").StringValue(), got, want[i])
	}
}

// headerOf returns the value of a header of an envelope, or "".
func headerOf(doc bson.Raw, name string) string {
	list, _ := doc.Lookup("headers").ArrayOK()
	values, _ := list.Values()
	for _, value := range values {
		if pair := value.Document(); pair.Lookup("k").StringValue() == name {
			_, data := pair.Lookup("v").Binary()
			return string(data)
		}
	}
	return ""
}
