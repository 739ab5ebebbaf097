package saga_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/codec"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

type order struct {
	Name  string
	Steps []string
}

// begin has the id of the saga in its body.
type begin struct{ ID, Name string }

func byBody() saga.StepOption[begin] { return saga.By(func(b begin) string { return b.ID }) }

// orders is a saga that two types of messages start, that correlates by the body, the header or the aggregate, and that ends.
func orders(name string, opts ...saga.Option) *saga.Saga[order] {
	s := saga.Define[order](name, opts...)
	start := func(_ context.Context, in *saga.Instance[order], b begin) error {
		in.State.Name = b.Name
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "x"}, "Begun", event.Bytes("", []byte("{}"))))
		return nil
	}

	saga.Start(s, newType[begin]("Begin"), start, byBody())
	saga.Start(s, newType[begin]("BeginToo"), start, byBody())
	saga.On(s, newType[begin]("ByBody"), step[begin], byBody())
	saga.On(s, newType[any]("ByHeader"), step[any])
	saga.On(s, newType[any]("ByAggregate"), step[any])
	saga.On(s, newType[begin]("End"), func(_ context.Context, in *saga.Instance[order], _ begin) error {
		in.Complete()
		return nil
	}, byBody())
	return s
}

// step stores the name of the message and emits an event.
func step[P any](_ context.Context, in *saga.Instance[order], _ P) error {
	in.State.Steps = append(in.State.Steps, in.Message().Name)
	in.Emit(event.New(event.Aggregate{Type: "order", ID: "x"}, "Stepped", event.Bytes("", []byte("{}"))))
	return nil
}

// kind runs a complete saga whose ids are stored in this way.
func kind(t *testing.T, ids saga.IDs, id string, native any) {
	p := newPlace(t)
	h := handlerOf(t, orders("orders_of_kind", saga.WithIDs(ids), saga.WithTombstone(-1)), p.box)
	for _, typ := range []string{"Begin", "BeginToo"} {
		mustHandle(t, h, newMessage(t, typ, "k", begin{id, typ}))
		doc := p.findDocument(t, "orders_of_kind", native)
		if doc == nil {
			t.Fatalf("%s has not made a document with _id %v", typ, native)
		}

		mustHandle(t, h, newMessage(t, "ByBody", "k", begin{ID: id}), newMessage(t, "ByHeader", "k", nil, saga.HeaderID, id), newMessage(t, "ByAggregate", id, nil))
		got := readSnapshot(t, p.box, "orders_of_kind", id)
		want := fmt.Sprintf(`{"name":%q,"steps":["ByBody","ByHeader","ByAggregate"]}`, typ)
		if string(got.State) != want || got.Version != 4 || got.ID != id {
			t.Errorf("the saga is %s at version %d, want %s at 4", got.State, got.Version, want)
		}

		mustHandle(t, h, newMessage(t, "End", "k", begin{ID: id}))
		if p.findDocument(t, "orders_of_kind", native) != nil {
			t.Error("completion has left the document")
		}
	}

	envelopes, err := p.listEnvelopes(t.Context())
	if err != nil || len(envelopes) != 8 {
		t.Fatalf("%d events, %v", len(envelopes), err)
	}

	for _, e := range envelopes {
		if v, _ := publishedMessage(t, e).Header(saga.HeaderID); string(v) != id {
			t.Errorf("an event has %s %q, want %q", saga.HeaderID, v, id)
		}
	}
}

func TestIDsOfEveryKindAreStoredNatively(t *testing.T) {
	t.Parallel()
	u := uuid.New()
	for name, f := range map[string]func(*testing.T){
		"uuid":   func(t *testing.T) { kind(t, saga.UUIDs, u.String(), bson.Binary{Subtype: 4, Data: u[:]}) },
		"string": func(t *testing.T) { kind(t, "", "order 7", "order 7") },
		"int32":  func(t *testing.T) { kind(t, saga.Int32IDs, "7", int32(7)) },
		"int64":  func(t *testing.T) { kind(t, saga.Int64IDs, "1099511627776", int64(1)<<40) },
		"zero":   func(t *testing.T) { kind(t, saga.Int64IDs, "0", int64(0)) },
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); f(t) })
	}
}

func TestCorrelation(t *testing.T) {
	t.Parallel()
	s := saga.Define[order]("orders", saga.WithIDs(saga.UUIDs))
	inBody, inHeader, inAggregate := uuid.NewString(), uuid.NewString(), uuid.NewString()
	got := ""
	saga.StartOrOn(s, newType[begin]("body"), func(_ context.Context, in *saga.Instance[order], _ begin) error {
		got = in.ID()
		return nil
	}, byBody())
	saga.StartOrOn(s, newType[any]("default"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		got = in.ID()
		return nil
	})
	h := handlerOf(t, s, memoryBox(t))

	header := []string{saga.HeaderID, inHeader}
	wrong := []string{saga.HeaderID, "7"}
	for _, c := range []struct {
		typ, aggregate string
		headers        []string
		value          any
		want           string
		err            error
	}{
		{"body", inAggregate, nil, begin{ID: inBody}, inBody, nil},
		{"body", inAggregate, header, begin{ID: inBody}, inBody, nil},
		{"body", inAggregate, header, begin{ID: strings.ToUpper(inBody)}, inBody, nil},
		{"body", inAggregate, header, begin{}, inHeader, nil},
		{"body", inAggregate, nil, begin{}, "", saga.ErrNoID},
		{"body", inAggregate, wrong, begin{}, "", saga.ErrNoID},
		{"body", inAggregate, header, begin{ID: uuid.Nil.String()}, "", saga.ErrNoID},
		{"body", inAggregate, header, "text", "", consumer.ErrMalformed},
		{"default", inAggregate, header, nil, inHeader, nil},
		{"default", inAggregate, nil, nil, inAggregate, nil},
		{"default", inAggregate, wrong, nil, "", saga.ErrNoID},
		{"default", "7", nil, nil, "", saga.ErrNoID},
		{"default", "", nil, nil, "", saga.ErrNoID},
		{"other", inAggregate, header, nil, "", consumer.ErrNoHandler},
	} {
		got = ""
		err := h.Handle(t.Context(), newMessage(t, c.typ, c.aggregate, c.value, c.headers...))
		if !errors.Is(err, c.err) || got != c.want {
			t.Errorf("%s with %v: %v and %v, want %v and %v", c.typ, c.headers, got, err, c.want, c.err)
		}
		if errors.Is(err, saga.ErrNoID) && !errors.Is(err, consumer.ErrMalformed) {
			t.Errorf("%v does not make the message a dead letter at once", err)
		}
	}

	keyed := newMessage(t, "default", "", nil)
	keyed.Key = []byte(inAggregate)
	mustHandle(t, h, keyed)
	if got != inAggregate {
		t.Errorf("a record with nothing but a key is for %q, want %q", got, inAggregate)
	}

	tombstone := newMessage(t, "body", inAggregate, nil, header...)
	tombstone.Value = nil
	mustHandle(t, h, tombstone)
	if got != inHeader {
		t.Errorf("a record without a value is for %q, want %q", got, inHeader)
	}
}

// A codec that cannot reach its registry fails the message, but does not make it malformed.
func TestAPayloadThatCannotBeDecodedNowIsRetried(t *testing.T) {
	t.Parallel()
	s := saga.Define[order]("orders")
	saga.Start(s, event.Type[begin]{Aggregate: "order", Name: "Begin", Codec: unavailable{codec.JSON()}}, step[begin])
	err := handlerOf(t, s, memoryBox(t)).Handle(t.Context(), newMessage(t, "Begin", "a", begin{}))
	if !errors.Is(err, codec.ErrUnavailable) || errors.Is(err, consumer.ErrMalformed) {
		t.Error(err)
	}
}

type unavailable struct{ codec.Codec }

func (unavailable) Decode(context.Context, []byte, any) error { return codec.ErrUnavailable }

func TestAnAnswerHasTheIDOfTheQuestion(t *testing.T) {
	t.Parallel()
	answer := event.New(event.Aggregate{Type: "bank", ID: "b"}, "Answer", event.Payload{})
	if v, _ := saga.Reply(newMessage(t, "Question", "a", nil, saga.HeaderID, "s"), answer).Header(saga.HeaderID); string(v) != "s" {
		t.Errorf("the answer has the id %q", v)
	}
	if _, ok := saga.Reply(newMessage(t, "Question", "a", nil), answer).Header(saga.HeaderID); ok {
		t.Error("the answer to no saga has an id")
	}
}

func TestUnknownSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := orders("orders")
	err := handlerOf(t, s, p.box).Handle(t.Context(), newMessage(t, "ByAggregate", "unknown", nil))
	if !errors.Is(err, saga.ErrNotFound) || !strings.Contains(err.Error(), "orders unknown for message ByAggregate/unknown") {
		t.Fatalf("a message without a recipient: %v", err)
	}

	if p.findDocument(t, "orders", "unknown") != nil {
		t.Error("it has made a saga")
	}

	p.wantEvents(t)

	saga.Missing(s, newType[any]("ByAggregate"), func(ctx context.Context, id string, _ any) error {
		return p.box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: id}, "Unknown", event.Bytes("", []byte("{}"))))
	})
	h := handlerOf(t, s, p.box)
	mustHandle(t, h, newMessage(t, "ByAggregate", "unknown", nil))
	p.wantEvents(t, "Unknown")
	envelopes, _ := p.listEnvelopes(t.Context())
	if _, ok := publishedMessage(t, envelopes[0]).Header(saga.HeaderID); ok {
		t.Error("an event of no saga has the header of a saga")
	}

	if err := h.Handle(t.Context(), newMessage(t, "ByHeader", "k", nil, saga.HeaderID, "unknown")); !errors.Is(err, saga.ErrNotFound) {
		t.Errorf("a type without a callback: %v", err)
	}
}

func TestADuplicateStartIsForTheSagaThatIsThere(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	note := func(what string) saga.Step[order, any] {
		return func(_ context.Context, in *saga.Instance[order], _ any) error {
			in.State.Steps = append(in.State.Steps, what)
			return nil
		}
	}

	saga.Start(s, newType[any]("Both"), note("started"))
	saga.On(s, newType[any]("Both"), note("handled"))
	saga.Start(s, newType[any]("Only"), note("started"))
	saga.StartOrOn(s, newType[any]("Either"), note("either"))
	h := handlerOf(t, s, p.box)
	for range 2 {
		mustHandle(t, h, newMessage(t, "Only", "a", nil), newMessage(t, "Both", "a", nil), newMessage(t, "Either", "a", nil), newMessage(t, "Either", "b", nil))
	}

	for id, want := range map[string]string{"a": "[started handled either handled either]", "b": "[either either]"} {
		var d struct{ State order }
		if err := bson.Unmarshal(p.findDocument(t, "orders", id), &d); err != nil || fmt.Sprint(d.State.Steps) != want {
			t.Errorf("%s: %v %v, want %s", id, d.State.Steps, err, want)
		}
	}
}

func TestVersionsAndTimes(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, orders("orders"), p.box)
	var created time.Time
	for i, m := range []*consumer.Message{newMessage(t, "Begin", "", begin{ID: "a"}), newMessage(t, "ByAggregate", "a", nil), newMessage(t, "ByAggregate", "a", nil)} {
		mustHandle(t, h, m)
		doc := p.findDocument(t, "orders", "a")
		if v, ok := doc.Lookup("version").Int64OK(); !ok || v != int64(i+1) {
			t.Errorf("version %v after %d messages", doc.Lookup("version"), i+1)
		}

		if i == 0 {
			created = doc.Lookup("createdAt").Time()
		}

		if !created.Equal(doc.Lookup("createdAt").Time()) || doc.Lookup("updatedAt").Time().Before(created) {
			t.Errorf("created %v, then %v; updated %v", created, doc.Lookup("createdAt"), doc.Lookup("updatedAt"))
		}
	}
}

func TestAFailedStepLeavesNothing(t *testing.T) {
	t.Parallel()
	p := newPlace(t, outbox.WithMaxSize(1000))
	s := saga.Define[order]("orders")
	boom := errors.New("boom")
	var fail error
	var size int
	saga.StartOrOn(s, newType[any]("Step"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		in.State.Steps = append(in.State.Steps, "step")
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "a"}, "Stepped", event.Bytes("", []byte(strings.Repeat("x", size)))))
		return fail
	})

	h := handlerOf(t, s, p.box)
	step := newMessage(t, "Step", "a", nil)
	mustHandle(t, h, step)
	before := p.findDocument(t, "orders", "a")
	for what, want := range map[string]error{"callback": boom, "outbox": outbox.ErrTooLarge, "transaction": boom, "swallowed": outbox.ErrRollbackOnly} {
		fail, size = nil, 1
		var err error
		switch what {
		case "callback":
			fail = boom
			err = h.Handle(t.Context(), step)
		// The state was written before.
		case "outbox":
			size = 2000
			err = h.Handle(t.Context(), step)
		// The transaction of the consumer fails after the step.
		case "transaction":
			err = p.box.Transaction(t.Context(), func(ctx context.Context) error {
				return errors.Join(h.Handle(ctx, step), boom)
			})
		// The caller ignores the error and commits.
		case "swallowed":
			size = 2000
			err = p.box.Transaction(t.Context(), func(ctx context.Context) error {
				if err := h.Handle(ctx, step); !errors.Is(err, outbox.ErrTooLarge) {
					t.Errorf("in a transaction: %v", err)
				}
				return nil
			})
		}

		if !errors.Is(err, want) {
			t.Errorf("%s: %v", what, err)
		}

		if after := p.findDocument(t, "orders", "a"); !after.Lookup("updatedAt").Equal(before.Lookup("updatedAt")) || after.Lookup("version").Int64() != 1 {
			t.Errorf("%s failed, and the saga is %s", what, after)
		}

		p.wantEvents(t, "Stepped")
	}
}

func TestATombstoneIsNoSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, orders("orders", saga.WithTombstone(time.Hour)), p.box)
	begins := newMessage(t, "Begin", "", begin{ID: "a", Name: "first"})
	mustHandle(t, h, begins, newMessage(t, "End", "", begin{ID: "a"}))
	before := p.findDocument(t, "orders", "a")
	mustHandle(t, h, begins, newMessage(t, "ByAggregate", "a", nil), newMessage(t, "End", "", begin{ID: "a"}))
	if after := p.findDocument(t, "orders", "a"); string(after) != string(before) {
		t.Errorf("late messages have changed it from %s to %s", before, after)
	}

	p.wantEvents(t, "Begun")
	if expires := before.Lookup("expiresAt").Time(); !expires.Equal(before.Lookup("completedAt").Time().Add(time.Hour)) {
		t.Errorf("the tombstone goes at %v: %s", expires, before)
	}

	indexes, err := p.db.Collection("orders").Indexes().ListSpecifications(t.Context())
	if err != nil || len(indexes) != 2 || indexes[1].ExpireAfterSeconds == nil || *indexes[1].ExpireAfterSeconds != 0 {
		t.Errorf("indexes: %+v %v", indexes, err)
	}
}

// A completed saga is remembered for a week without an option.
func TestTombstonesAreTheDefault(t *testing.T) {
	t.Parallel()
	box := memoryBox(t)
	h := handlerOf(t, orders("orders"), box)
	mustHandle(t, h, newMessage(t, "Begin", "", begin{ID: "a"}), newMessage(t, "End", "", begin{ID: "a"}), newMessage(t, "Begin", "", begin{ID: "a"}))
	got := readSnapshot(t, box, "orders", "a")
	if got.Version != 2 || got.ExpiresAt.Sub(got.CompletedAt) != 7*24*time.Hour {
		t.Errorf("a late start has made %+v", got)
	}
}

func TestADiscardedMessageLeavesTheSagaAlone(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	saga.Start(s, newType[any]("Start"), func(ctx context.Context, in *saga.Instance[order], _ any) error {
		in.Emit(newStepped())
		_, err := p.db.Collection("notes").InsertOne(ctx, bson.D{{Key: "_id", Value: in.ID()}})
		return errors.Join(err, consumer.Discard(errors.New("not now")))
	})

	if err := handlerOf(t, s, p.box).Handle(t.Context(), newMessage(t, "Start", "a", nil)); err == nil {
		t.Error("the consumer does not learn that the message is discarded")
	}
	if p.findDocument(t, "orders", "a") != nil || p.findDocument(t, "notes", "a") != nil {
		t.Error("the discarded message has an effect")
	}
	p.wantEvents(t)
}
