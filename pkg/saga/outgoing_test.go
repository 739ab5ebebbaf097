package saga_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.opentelemetry.io/otel/baggage"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

func newStepped() event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "a"}, "Stepped", event.Bytes("", []byte("{}")))
}

// newReminders returns a saga with timeouts. Remind requests the timeout that its value names.
func newReminders(t *testing.T, p *place, opts ...saga.Option) consumer.Handler {
	type instance = saga.Instance[order]
	s := saga.Define[order]("orders", opts...)
	saga.StartOrOn(s, newType[string]("Remind"), func(_ context.Context, in *instance, name string) error {
		in.TimeoutIn(name, time.Hour)
		return nil
	})
	saga.On(s, newType[string]("Forget"), func(_ context.Context, in *instance, name string) error {
		in.State.Name = fmt.Sprint(in.CancelTimeout(name))
		return nil
	})
	saga.On(s, newType[any]("Both"), func(_ context.Context, in *instance, _ any) error {
		in.TimeoutIn("first", time.Minute)
		in.CancelTimeout("first")
		return nil
	})

	saga.On(s, newType[any]("End"), func(_ context.Context, in *instance, _ any) error {
		in.Complete()
		in.TimeoutIn("first", 0)
		return nil
	})
	for _, name := range []string{"first", "second"} {
		s.Timeout(name, func(_ context.Context, in *instance) error {
			in.State.Steps = append(in.State.Steps, name)
			return nil
		})
	}

	return handlerOf(t, s, p.box)
}

// listScheduled returns the types of the scheduled events in the outbox.
func (p *place) listScheduled(t *testing.T) map[string]bson.Raw {
	t.Helper()
	envelopes, err := p.listEnvelopes(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	m := map[string]bson.Raw{}
	for _, e := range envelopes {
		if _, err := e.LookupErr("dueAt"); err != nil {
			continue
		}

		typ := e.Lookup("type").StringValue()
		if m[typ] != nil {
			t.Errorf("two timeouts of type %s", typ)
		}

		m[typ] = e
	}

	return m
}

func TestTimeouts(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := newReminders(t, p)
	state := func() (o order) {
		t.Helper()
		if err := p.findDocument(t, "orders", "a").Lookup("state").Unmarshal(&o); err != nil {
			t.Fatal(err)
		}

		return o
	}

	mustHandle(t, h, newMessage(t, "Remind", "a", "first"), newMessage(t, "Remind", "a", "second"))
	due := p.listScheduled(t)["orders.second"]
	if at := p.findDocument(t, "orders", "a").Lookup("updatedAt").Time().Add(time.Hour); !at.Equal(due.Lookup("dueAt").Time()) {
		t.Errorf("due at %v, want an hour after the step by the server's clock, %v", due.Lookup("dueAt"), at)
	}

	if due.Lookup("aggregatetype").StringValue() != "orders" || due.Lookup("aggregateid").StringValue() != "a" || string(publishedMessage(t, due).Value) != "{}" {
		t.Errorf("the timeout is %s", due)
	}

	old := p.listScheduled(t)["orders.first"]
	mustHandle(t, h, newMessage(t, "Remind", "a", "first")) // again
	renewed := p.listScheduled(t)["orders.first"]
	if renewed.Lookup("_id").Equal(old.Lookup("_id")) {
		t.Error("the timeout that was set again is the old one")
	}

	mustHandle(t, h, publishedMessage(t, old)) // was on its way
	if got := state(); len(got.Steps) != 0 {
		t.Errorf("a timeout that was set again has run: %v", got.Steps)
	}

	// The second delivery is a repeat.
	for range 2 {
		mustHandle(t, h, publishedMessage(t, renewed))
	}

	if got := fmt.Sprint(state().Steps); got != "[first]" {
		t.Errorf("steps %s", got)
	}

	mustHandle(t, h, newMessage(t, "Forget", "a", "second"))
	if _, there := p.listScheduled(t)["orders.second"]; there || state().Name != "true" {
		t.Error("the timeout was not taken back")
	}

	mustHandle(t, h, publishedMessage(t, due), newMessage(t, "Forget", "a", "second"), newMessage(t, "Both", "a", nil))
	if got := state(); len(got.Steps) != 1 || got.Name != "false" {
		t.Errorf("after a timeout was taken back: %+v", got)
	}

	if n := len(p.findDocument(t, "orders", "a").Lookup("timeouts").Value); n != 0 {
		t.Errorf("the document still names timeouts: %s", p.findDocument(t, "orders", "a"))
	}
}

func TestTimeoutsEndWithTheSaga(t *testing.T) {
	t.Parallel()
	for name, opt := range map[string]saga.Option{"deleted": saga.WithTombstone(-1), "tombstone": saga.WithTombstone(time.Hour)} {
		p := newPlace(t)
		h := newReminders(t, p, opt)
		mustHandle(t, h, newMessage(t, "Remind", "a", "first"), newMessage(t, "Remind", "a", "second"))
		late := p.listScheduled(t)["orders.second"]
		mustHandle(t, h, newMessage(t, "End", "a", nil))
		if left := p.listScheduled(t); len(left) != 0 {
			t.Errorf("%s: completion has left %v", name, left)
		}

		before := p.findDocument(t, "orders", "a")
		mustHandle(t, h, publishedMessage(t, late))
		if after := p.findDocument(t, "orders", "a"); string(after) != string(before) {
			t.Errorf("%s: a late timeout has made %s of %s", name, after, before)
		}
	}
}

func TestBadTimeoutsAreRejected(t *testing.T) {
	t.Parallel()
	s := saga.Define[order]("orders")
	s.Timeout("known", nothingLate)
	saga.Start(s, newType[any]("Start"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		in.TimeoutIn("unknown", time.Hour)
		in.TimeoutIn("known", -1)
		return nil
	})
	err := handlerOf(t, s, memoryBox(t)).Handle(t.Context(), newMessage(t, "Start", "a", nil))
	if err == nil || !strings.Contains(err.Error(), `"unknown" has no step`) || !strings.Contains(err.Error(), "must not be negative") {
		t.Errorf("a timeout without a step, one in the past: %v", err)
	}
}

// newTrip defines a saga that books three things, and cancels the earlier bookings if one fails.
func newTrip(t *testing.T, p *place) consumer.Handler {
	type instance = saga.Instance[order]
	s := saga.Define[order]("trips")
	saga.StartOrOn(s, newType[string]("Book"), func(_ context.Context, in *instance, what string) error {
		in.Emit(event.New(event.Aggregate{Type: "trip", ID: in.ID()}, "Booked"+what, event.Bytes("", []byte("{}"))))
		in.OnCompensate(event.New(event.Aggregate{Type: "trip", ID: in.ID()}, "Cancel"+what, event.Bytes("", []byte("{}"))))
		return nil
	})

	saga.On(s, newType[any]("Fail"), func(_ context.Context, in *instance, _ any) error {
		if in.Compensate() == 0 {
			in.State.Name = "nothing to undo"
		}
		return nil
	})

	return handlerOf(t, s, p.box)
}

func TestCompensationRunsInReverse(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := newTrip(t, p)
	mustHandle(t, h, newMessage(t, "Book", "a", "Flight"), newMessage(t, "Book", "a", "Hotel"), newMessage(t, "Book", "a", "Car"), newMessage(t, "Fail", "a", nil), newMessage(t, "Fail", "a", nil))
	p.wantEvents(t, "BookedFlight", "BookedHotel", "BookedCar", "CancelCar", "CancelHotel", "CancelFlight")
	doc := p.findDocument(t, "trips", "a")
	if doc.Lookup("state", "name").StringValue() != "nothing to undo" {
		t.Errorf("the second failure has found something to undo: %s", doc)
	}

	envelopes, _ := p.listEnvelopes(t.Context())
	if v, _ := publishedMessage(t, envelopes[3]).Header(saga.HeaderID); string(v) != "a" {
		t.Errorf("a compensation has %s %q", saga.HeaderID, v)
	}
}

func TestABadCompensationIsRejectedWhenItIsRemembered(t *testing.T) {
	t.Parallel()
	s := saga.Define[order]("orders")
	saga.Start(s, newType[any]("Start"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		in.OnCompensate(event.New(event.Aggregate{Type: "", ID: ""}, "", event.Payload{}))
		return nil
	})
	if err := handlerOf(t, s, memoryBox(t)).Handle(t.Context(), newMessage(t, "Start", "a", nil)); !errors.Is(err, event.ErrInvalid) {
		t.Error(err)
	}
}

// An event that was stored as a compensation has the same bytes when it is emitted.
func TestCompensationsComeBackAsTheyWere(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		ev := anyEvent(t)
		want, err := ev.MarshalBSON()
		if err != nil {
			t.Fatal(err)
		}

		raw, err := saga.Restore(want)
		if err != nil {
			t.Fatal(err)
		}

		got, err := raw.MarshalBSON()
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%v\n%s\n%s", err, bson.Raw(got), bson.Raw(want))
		}
	})
}

func anyEvent(t *rapid.T) event.Event {
	text := rapid.StringMatching(`[a-z]{1,8}`)
	b := rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")
	payload := rapid.SampledFrom([]event.Payload{
		{},
		event.Bytes("", b), event.Bytes("application/json", b), event.Bytes("text/plain", []byte(text.Draw(t, "text"))),
		event.Document(bson.D{{Key: "a", Value: text.Draw(t, "value")}}), event.Document(bson.A{int32(1), "x"}),
	}).Draw(t, "payload")
	opts := []event.Option{
		event.WithKey(text.Draw(t, "key")), event.WithTopic(text.Draw(t, "topic")), event.WithPartition(rapid.Int32Range(0, 99).Draw(t, "partition")),
		event.WithHeader("x-"+text.Draw(t, "header"), b), event.WithHeader("null", nil),
		event.WithSchemaVersion("2"), event.WithSource("/shop"), event.WithSubject("s"),
		event.WithTime(time.UnixMilli(rapid.Int64Range(1, 1e12).Draw(t, "time"))), event.WithDueAt(time.UnixMilli(1e12)), event.WithExpiry(time.UnixMilli(2e12)),
		event.WithID(uuid.New()), event.WithID(bson.NewObjectID()), event.WithID(text.Draw(t, "id")),
	}

	var chosen []event.Option
	for _, o := range opts {
		if rapid.Bool().Draw(t, "with") {
			chosen = append(chosen, o)
		}
	}

	return event.New(event.Aggregate{Type: text.Draw(t, "aggregate"), ID: text.Draw(t, "aggregate id")}, text.Draw(t, "type"), payload, chosen...)
}

func TestHeadersAndBaggageLeaveWithTheStep(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	saga.Start(s, newType[any]("Start"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "a"}, "Raw", event.Bytes("", []byte(`{"raw":true}`)), event.WithHeader("tenant", []byte{0xff, 0}), event.WithHeader(saga.HeaderID, []byte("kept"))))
		return nil
	})
	member, err := baggage.NewMember("customer", "c-7")
	if err != nil {
		t.Fatal(err)
	}

	bag, err := baggage.New(member)
	if err != nil {
		t.Fatal(err)
	}
	if err := handlerOf(t, s, p.box).Handle(baggage.ContextWithBaggage(t.Context(), bag), newMessage(t, "Start", "a", nil)); err != nil {
		t.Fatal(err)
	}

	envelopes, err := p.listEnvelopes(t.Context())
	if err != nil || len(envelopes) != 1 {
		t.Fatal(err, envelopes)
	}

	m := publishedMessage(t, envelopes[0])
	for name, want := range map[string]string{"tenant": "\xff\x00", "baggage": "customer=c-7", saga.HeaderID: "kept"} {
		if v, _ := m.Header(name); string(v) != want {
			t.Errorf("header %s is %q, want %q", name, v, want)
		}
	}

	if string(m.Value) != `{"raw":true}` {
		t.Errorf("the value is %s", m.Value)
	}
}
