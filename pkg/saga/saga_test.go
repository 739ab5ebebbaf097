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
type begin[I saga.Identifier] struct {
	ID   I
	Name string
}

// orders is a saga that two types of messages start, that correlates by the body or the header, and
// that ends.
func orders[I saga.Identifier](tb testing.TB, r *saga.Registry, name string, opts ...saga.SagaOption) *saga.Saga[order, I] {
	s := define[order, I](tb, r, name, opts...)
	byBody := saga.ByJSON(func(b begin[I]) I { return b.ID })
	start := saga.JSON(func(_ context.Context, in *saga.Instance[order, I], b begin[I]) error {
		in.State.Name = b.Name
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "x"}, "Begun", event.Bytes("", []byte("{}"))))
		return nil
	})

	s.Start("Begin", byBody, start)
	s.Start("BeginToo", byBody, start)
	step := func(_ context.Context, in *saga.Instance[order, I], m *consumer.Message) error {
		in.State.Steps = append(in.State.Steps, m.Name)
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "x"}, "Stepped", event.Bytes("", []byte("{}"))))
		return nil
	}

	s.Handle("ByBody", byBody, step)
	s.Handle("ByHeader", saga.ByHeader[I](), step)
	s.Handle("ByKey", saga.ByKey[I](), step)
	s.Handle("ByAggregate", saga.ByAggregate[I](), step)
	s.Handle("End", byBody, func(_ context.Context, in *saga.Instance[order, I], _ *consumer.Message) error {
		in.Complete()
		return nil
	})
	return s
}

// kind runs a complete saga whose ids are of kind I.
func kind[I saga.Identifier](t *testing.T, id I, native any) {
	p := newPlace(t)
	r := p.registry(t)
	h := handlerOf(t, orders[I](t, r, "orders_of_kind"))
	text := saga.FormatID(id)
	for _, typ := range []string{"Begin", "BeginToo"} {
		handle(t, h, msg(t, typ, "k", begin[I]{id, typ}))
		doc := p.document(t, "orders_of_kind", native)
		if doc == nil {
			t.Fatalf("%s has not made a document with _id %v", typ, native)
		}

		byAggregate := msg(t, "ByAggregate", "k", nil)
		byAggregate.Aggregate.ID = text
		handle(t, h,
			msg(t, "ByBody", "k", begin[I]{ID: id}), msg(t, "ByHeader", "k", nil, saga.HeaderID, text),
			msg(t, "ByKey", text, nil), byAggregate)
		got, found, err := r.Desk().Read(t.Context(), "orders_of_kind", text)
		if err != nil || !found {
			t.Fatalf("read by the text %q: %v %v", text, found, err)
		}

		want := fmt.Sprintf(`{"name":%q,"steps":["ByBody","ByHeader","ByKey","ByAggregate"]}`, typ)
		if string(got.State) != want || got.Version != 5 || got.ID != text {
			t.Errorf("the saga is %s at version %d, want %s at 5", got.State, got.Version, want)
		}

		handle(t, h, msg(t, "End", "k", begin[I]{ID: id}))
		if p.document(t, "orders_of_kind", native) != nil {
			t.Error("completion has left the document")
		}
	}

	envelopes, err := p.envelopes(t.Context())
	if err != nil || len(envelopes) != 10 {
		t.Fatalf("%d events, %v", len(envelopes), err)
	}

	for _, e := range envelopes {
		if v, _ := arrived(t, e).Header(saga.HeaderID); string(v) != text {
			t.Errorf("an event has %s %q, want %q", saga.HeaderID, v, text)
		}
	}
}

func TestIDsOfEveryKindAreStoredNatively(t *testing.T) {
	t.Parallel()
	u := uuid.New()
	for name, f := range map[string]func(*testing.T){
		"uuid":   func(t *testing.T) { kind(t, u, bson.Binary{Subtype: 4, Data: u[:]}) },
		"string": func(t *testing.T) { kind(t, "order 7", "order 7") },
		"int32":  func(t *testing.T) { kind(t, int32(7), int32(7)) },
		"int64":  func(t *testing.T) { kind(t, int64(1)<<40, int64(1)<<40) },
		"zero":   func(t *testing.T) { kind(t, int64(0), int64(0)) },
	} {
		t.Run(name, func(t *testing.T) { t.Parallel(); f(t) })
	}
}

func TestWhatAnIDCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	for kind, bad := range map[saga.IDKind][]string{
		saga.KindUUID: {"", "x", uuid.Nil.String()}, saga.KindString: {""}, saga.KindInt32: {"", "x", "1.0", "2147483648"}, saga.KindInt64: {"", "9223372036854775808"},
	} {
		for _, text := range bad {
			_, err := saga.ParseID(kind, text)
			if e := new(saga.IDError); !errors.Is(err, saga.ErrID) || !errors.As(err, &e) || e.Kind != kind || e.Text != text {
				t.Errorf("%s %q: %v", kind, text, err)
			}
		}
	}

	if _, err := saga.ParseID("float", "1"); !errors.Is(err, saga.ErrID) {
		t.Errorf("an unknown kind: %v", err)
	}
}

func TestCorrelation(t *testing.T) {
	t.Parallel()
	s := define[order, uuid.UUID](t, registry(t, newMemory()), "orders")
	own := errors.New("own")
	answer := func(id uuid.UUID, err error) saga.Correlate[uuid.UUID] {
		return func(*consumer.Message) (uuid.UUID, error) { return id, err }
	}
	inBody, inHeader := uuid.New(), uuid.New()
	var got uuid.UUID
	f := func(_ context.Context, in *saga.Instance[order, uuid.UUID], _ *consumer.Message) error {
		got = in.ID()
		return nil
	}
	s.StartOrHandle("function", answer(inBody, nil), f)
	s.StartOrHandle("nil", answer(uuid.Nil, nil), f)
	s.StartOrHandle("none", answer(inBody, fmt.Errorf("wrapped: %w", saga.ErrNoSagaID)), f)
	s.StartOrHandle("fails", answer(inBody, own), f)
	s.StartOrHandle("payload", saga.ByJSON(func(b begin[uuid.UUID]) uuid.UUID { return b.ID }), f)
	s.StartOrHandle("extended", saga.ByExtJSON(func(b begin[uuid.UUID]) uuid.UUID { return b.ID }), f)
	s.StartOrHandle("key", saga.ByKey[uuid.UUID](), f)
	h := handlerOf(t, s)

	header := []string{saga.HeaderID, inHeader.String()}
	for _, c := range []struct {
		typ     string
		headers []string
		value   any
		want    uuid.UUID
		err     error
	}{
		{"function", nil, nil, inBody, nil},
		{"function", header, nil, inBody, nil},
		{"nil", header, nil, inHeader, nil},
		{"none", header, nil, inHeader, nil},
		{"none", nil, nil, uuid.Nil, saga.ErrNoSagaID},
		{"none", []string{saga.HeaderID, "7"}, nil, uuid.Nil, saga.ErrNoSagaID},
		{"none", []string{saga.HeaderID, "7"}, nil, uuid.Nil, saga.ErrID},
		{"fails", header, nil, uuid.Nil, own},
		{"payload", header, "text", uuid.Nil, saga.ErrPayload},
		{"extended", header, "text", uuid.Nil, saga.ErrPayload},
		{"key", nil, nil, uuid.Nil, saga.ErrID},
		{"other", header, nil, uuid.Nil, saga.ErrUnknownMessage},
	} {
		got = uuid.Nil
		err := h.Handle(t.Context(), msg(t, c.typ, "k", c.value, c.headers...))
		if !errors.Is(err, c.err) || got != c.want {
			t.Errorf("%s with %v: %v and %v, want %v and %v", c.typ, c.headers, got, err, c.want, c.err)
		}

		if e := new(saga.CorrelationError); errors.Is(err, saga.ErrNoSagaID) && (!errors.As(err, &e) || e.Type != c.typ || e.Saga != "orders") {
			t.Errorf("%v is no CorrelationError with the message", err)
		}
	}

	tombstone := msg(t, "payload", "k", nil)
	tombstone.Value = nil
	if err := h.Handle(t.Context(), tombstone); !errors.Is(err, saga.ErrPayload) {
		t.Errorf("a record without a value: %v", err)
	}
}

func TestUnknownSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := orders[string](t, p.registry(t), "orders")
	err := handlerOf(t, s).Handle(t.Context(), msg(t, "ByKey", "nobody", nil))
	var e *saga.NotFoundError
	if !errors.Is(err, saga.ErrNotFound) || !errors.As(err, &e) || e.ID != "nobody" || e.Saga != "orders" || e.Type != "ByKey" {
		t.Fatalf("a message for nobody: %v", err)
	}

	if p.document(t, "orders", "nobody") != nil {
		t.Error("it has made a saga")
	}

	p.wantEvents(t)

	s.NotFound(func(ctx context.Context, id string, m *consumer.Message) error {
		return saga.Emit(ctx, event.New(event.Aggregate{Type: "order", ID: id}, "Unknown", event.Bytes("", []byte("{}"))))
	}, "ByKey")
	s.NotFound(func(context.Context, string, *consumer.Message) error { return errors.New("any") })
	h := handlerOf(t, s)
	handle(t, h, msg(t, "ByKey", "nobody", nil))
	p.wantEvents(t, "Unknown")
	envelopes, _ := p.envelopes(t.Context())
	if _, ok := arrived(t, envelopes[0]).Header(saga.HeaderID); ok {
		t.Error("an event of no saga says that it is of one")
	}

	if err := h.Handle(t.Context(), msg(t, "ByHeader", "k", nil, saga.HeaderID, "nobody")); err == nil || err.Error() != "any" {
		t.Errorf("the callback for all types: %v", err)
	}
}

func TestADuplicateStartIsForTheSagaThatIsThere(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := define[order, string](t, p.registry(t), "orders")
	note := func(what string) saga.Func[order, string] {
		return func(_ context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
			in.State.Steps = append(in.State.Steps, what)
			return nil
		}
	}

	s.Start("Both", saga.ByKey[string](), note("started"))
	s.Handle("Both", saga.ByKey[string](), note("handled"))
	s.Start("Only", saga.ByKey[string](), note("started"))
	s.StartOrHandle("Either", saga.ByKey[string](), note("either"))
	h := handlerOf(t, s)
	for range 2 {
		handle(t, h, msg(t, "Only", "a", nil), msg(t, "Both", "a", nil), msg(t, "Either", "a", nil), msg(t, "Either", "b", nil))
	}

	for id, want := range map[string]string{"a": "[started handled either handled either]", "b": "[either either]"} {
		var d struct{ State order }
		if err := bson.Unmarshal(p.document(t, "orders", id), &d); err != nil || fmt.Sprint(d.State.Steps) != want {
			t.Errorf("%s: %v %v, want %s", id, d.State.Steps, err, want)
		}
	}
}

func TestVersionsAndTimes(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, orders[string](t, p.registry(t), "orders"))
	var created time.Time
	for i, m := range []*consumer.Message{msg(t, "Begin", "", begin[string]{ID: "a"}), msg(t, "ByKey", "a", nil), msg(t, "ByKey", "a", nil)} {
		handle(t, h, m)
		doc := p.document(t, "orders", "a")
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
	s := define[order, string](t, p.registry(t), "orders")
	boom := errors.New("boom")
	var fail error
	var size int
	s.StartOrHandle("Step", saga.ByKey[string](), func(_ context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
		in.State.Steps = append(in.State.Steps, "step")
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "a"}, "Stepped", event.Bytes("", []byte(strings.Repeat("x", size)))))
		return fail
	})

	h := handlerOf(t, s)
	step := msg(t, "Step", "a", nil)
	handle(t, h, step)
	before := p.document(t, "orders", "a")
	for what, want := range map[string]error{"callback": boom, "outbox": outbox.ErrTooLarge, "transaction": boom, "swallowed": outbox.ErrRollbackOnly} {
		fail, size = nil, 1
		var err error
		switch what {
		case "callback":
			fail = boom
			err = h.Handle(t.Context(), step)
		case "outbox": // the state was written by then
			size = 2000
			err = h.Handle(t.Context(), step)
		case "transaction": // of a consumer, which fails after the step
			err = p.box.Transaction(t.Context(), func(ctx context.Context) error {
				return errors.Join(h.Handle(ctx, step), boom)
			})
		case "swallowed": // by somebody who goes on to commit
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

		if after := p.document(t, "orders", "a"); !after.Lookup("updatedAt").Equal(before.Lookup("updatedAt")) || after.Lookup("version").Int64() != 1 {
			t.Errorf("%s failed, and the saga is %s", what, after)
		}

		p.wantEvents(t, "Stepped")
	}
}

func TestATombstoneIsNoSaga(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	s := orders[string](t, r, "orders", saga.WithTombstone(time.Hour))
	if err := r.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	h := handlerOf(t, s)
	begins := msg(t, "Begin", "", begin[string]{ID: "a", Name: "first"})
	handle(t, h, begins, msg(t, "End", "", begin[string]{ID: "a"}))
	before := p.document(t, "orders", "a")
	handle(t, h, begins, msg(t, "ByKey", "a", nil), msg(t, "End", "", begin[string]{ID: "a"}))
	if after := p.document(t, "orders", "a"); string(after) != string(before) {
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

func TestADroppedMessageLeavesTheSagaAlone(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := define[order, string](t, p.registry(t), "orders")
	s.Start("Start", saga.ByKey[string](), func(ctx context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
		in.Emit(stepped())
		_, err := p.db.Collection("notes").InsertOne(ctx, bson.D{{Key: "_id", Value: in.ID()}})
		return errors.Join(err, saga.ErrDrop)
	})

	h := handlerOf(t, s)
	err := h.Handle(t.Context(), msg(t, "Start", "own", nil))
	joined := p.box.Transaction(t.Context(), func(ctx context.Context) error {
		if err := h.Handle(ctx, msg(t, "Start", "joined", nil)); err != nil {
			t.Errorf("in a transaction: %v", err)
		}
		return nil
	})
	if err != nil || joined != nil {
		t.Errorf("dropped: %v and %v", err, joined)
	}

	for _, id := range []string{"own", "joined"} {
		if p.document(t, "orders", id) != nil || p.document(t, "notes", id) == nil {
			t.Errorf("%s: saga %s, note %s", id, p.document(t, "orders", id), p.document(t, "notes", id))
		}
	}

	p.wantEvents(t)
}
