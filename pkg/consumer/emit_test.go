package consumer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/transaction"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

type txKey struct{}

// fakeBox is an outbox that keeps what it was given, call by call.
type fakeBox struct {
	mu    sync.Mutex
	calls [][]event.Event
	fail  error
}

func (b *fakeBox) Append(_ context.Context, events ...event.Event) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail != nil {
		return b.fail
	}
	b.calls = append(b.calls, events)
	return nil
}

func (b *fakeBox) String() string {
	var out []string
	for _, c := range b.calls {
		var in []string
		for _, ev := range c {
			p, _ := ev.Payload()
			in = append(in, ev.Name()+"="+string(p))
		}
		out = append(out, "["+strings.Join(in, " ")+"]")
	}
	return strings.Join(out, " ")
}

func emitter(t *testing.T, box consumer.Outbox, opts ...consumer.EmitOption) *consumer.Emitter {
	t.Helper()
	e, err := consumer.NewEmitter(box, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

func order(name, payload string) event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "1"}, name, event.Bytes("", []byte(payload)))
}

// renamed returns a new event with the id, the aggregate and the payload of ev.
func renamed(ev event.Event, name string) event.Event {
	body, err := ev.Payload()
	if err != nil {
		panic(err)
	}
	return event.New(ev.Aggregate(), name, event.Bytes(ev.ContentType(), body), event.WithID(ev.ID()))
}

func emitMW(f func(ctx context.Context, ev event.Event, next consumer.Emit) error) consumer.EmitMiddleware {
	return func(next consumer.Emit) consumer.Emit {
		return func(ctx context.Context, ev event.Event) error { return f(ctx, ev, next) }
	}
}

func TestEmitMiddleware(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mw   consumer.EmitMiddleware
		want string
		err  error
	}{
		"pass": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error { return next(ctx, ev) }), "[A=1 B=2]", nil},
		"change payload and type": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			return next(ctx, renamed(ev, ev.Name()+"2").With(event.WithPayload(event.Bytes("", []byte("x")))))
		}), "[A2=x B2=x]", nil},
		"drop one": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			if ev.Name() == "A" {
				return consumer.ErrDrop
			}
			return next(ctx, ev)
		}), "[B=2]", nil},
		"drop all": {emitMW(func(context.Context, event.Event, consumer.Emit) error { return consumer.ErrDrop }), "", nil},
		"one becomes several": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			return errors.Join(next(ctx, ev), next(ctx, renamed(ev, "C").With(event.WithID(ev.ID().String()+"/copy"))))
		}), "[A=1 C=1 B=2 C=2]", nil},
		"the same twice": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			return errors.Join(next(ctx, ev), next(ctx, ev))
		}), "", consumer.ErrValidation},
		"an error keeps all of the call out": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			if ev.Name() == "B" {
				return errFlaky
			}
			return next(ctx, ev)
		}), "", errFlaky},
		"it sees the transaction": {emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			return next(ctx, ev.With(event.WithPayload(event.Bytes("", fmt.Append(nil, ctx.Value(txKey{}))))))
		}), "[A=tx B=tx]", nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var box fakeBox
			err := emitter(t, &box, consumer.EmitVia(c.mw)).Append(context.WithValue(t.Context(), txKey{}, "tx"), order("A", "1"), order("B", "2"))
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || box.String() != c.want {
				t.Errorf("stored %s, %v; want %s, %v", box.String(), err, c.want, c.err)
			}
		})
	}
}

func TestEmitMiddlewareIsAnOnion(t *testing.T) {
	t.Parallel()
	var j journal
	around := func(name string) consumer.EmitMiddleware {
		return emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
			j.add(name + "(" + ev.Name())
			defer j.add(")" + name)
			return next(ctx, ev)
		})
	}
	if err := emitter(t, &fakeBox{}, consumer.EmitVia(around("a"), around("b"))).Append(t.Context(), order("A", "1"), order("B", "2")); err != nil {
		t.Fatal(err)
	}
	if got, want := j.String(), "a(A b(A )b )a a(B b(B )b )a"; got != want {
		t.Errorf("ran %s, want %s", got, want)
	}
}

func TestBatchLimitAndBackpressure(t *testing.T) {
	t.Parallel()
	var box fakeBox
	e := emitter(t, &box, consumer.BatchLimit(2))
	err := e.Append(t.Context(), order("A", "1"), order("B", "2"), order("C", "3"))
	if size, ok := errors.AsType[*consumer.BatchSizeError](err); !ok || size.Size != 3 || size.Limit != 2 {
		t.Errorf("three events: %v", err)
	}
	if err := e.Append(t.Context(), order("A", "1"), order("B", "2")); err != nil {
		t.Error(err)
	}
	synctest.Test(t, func(t *testing.T) {
		hold := make(chan struct{})
		e := emitter(t, &fakeBox{}, consumer.EmitConcurrency(1), consumer.EmitBound(1),
			consumer.EmitVia(emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error { <-hold; return next(ctx, ev) })))
		var wg sync.WaitGroup
		for range 2 { // one runs, one waits
			wg.Go(func() {
				if err := e.Append(t.Context(), order("A", "1")); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		err := e.Append(t.Context(), order("A", "1"))
		if full, ok := errors.AsType[*consumer.BackpressureError](err); !ok || full.Limit != 1 {
			t.Errorf("a third call: %v", err)
		}
		close(hold)
		wg.Wait()
	})
}

// dueAt returns the time at which the stored event is due.
func dueAt(t *testing.T, ev event.Event) time.Time {
	t.Helper()
	raw, err := ev.MarshalBSON()
	if err != nil {
		t.Fatal(err)
	}
	return bson.Raw(raw).Lookup("dueAt").Time()
}

func TestScheduleGoesThroughMiddleware(t *testing.T) {
	t.Parallel()
	var box fakeBox
	e := emitter(t, &box, consumer.EmitVia(emitMW(func(ctx context.Context, ev event.Event, next consumer.Emit) error {
		if ev.Name() == "drop" {
			return consumer.ErrDrop
		}
		return next(ctx, renamed(ev, "B").With(event.WithDueAt(dueAt(t, ev))))
	})))
	at := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	id, err := e.Schedule(t.Context(), at, order("A", "1"))
	if err != nil || box.String() != "[B=1]" || id != box.calls[0][0].ID() {
		t.Fatalf("stored %s as %s: %v", box.String(), id, err)
	}
	if due := dueAt(t, box.calls[0][0]); !due.Equal(at) {
		t.Errorf("due at %v", due)
	}
	if _, err := e.Schedule(t.Context(), at, order("drop", "1")); !errors.Is(err, consumer.ErrDrop) {
		t.Errorf("a dropped one: %v", err)
	}
}

// published keeps what is published.
type published struct {
	mu   sync.Mutex
	list map[string][]*consumer.Message
	fail error
}

func (p *published) Publish(_ context.Context, topic string, ms []*consumer.Message) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fail != nil {
		return p.fail
	}
	if p.list == nil {
		p.list = map[string][]*consumer.Message{}
	}
	p.list[topic] = append(p.list[topic], ms...)
	return nil
}

func TestPublishDirectSkipsTheOutbox(t *testing.T) {
	t.Parallel()
	var box fakeBox
	var out published
	e := emitter(t, &box, consumer.EmitDirect(&out, nil), consumer.EmitVia(consumer.DeliverBy()))
	until := time.UnixMilli(1_900_000_000_000)
	ev := order("A", "1").With(event.WithHeader("h", []byte{0, 1}), event.WithExpiresAt(until))
	if err := e.PublishDirect(t.Context(), ev, order("B", "2").With(event.WithTopic("elsewhere"))); err != nil {
		t.Fatal(err)
	}
	if len(box.calls) != 0 || len(out.list["elsewhere"]) != 1 || len(out.list["outbox.event.order"]) != 1 {
		t.Fatalf("stored %d, published %v", len(box.calls), out.list)
	}
	// It is a record as the relay writes it.
	m := out.list["outbox.event.order"][0]
	got, err := consumer.Decode(&consumer.Record{Topic: "t", Key: m.Key, Value: m.Value, Headers: m.Headers})
	if err != nil || got.ID != ev.ID().String() || got.Name != "A" || got.Aggregate.Type != "order" || string(got.Value) != "1" || string(got.Key) != "1" {
		t.Errorf("decoded %+v, %v", got, err)
	}
	if v, _ := got.Header("h"); !bytes.Equal(v, []byte{0, 1}) {
		t.Errorf("header %v", v)
	}
	if err := consumer.Precheck(got, until.Add(-1)); err != nil {
		t.Errorf("before it expires: %v", err)
	}
	if late, ok := errors.AsType[*consumer.ExpiredError](consumer.Precheck(got, until)); !ok || !late.Deadline.Equal(until) {
		t.Errorf("when it has expired: %v", late)
	}
	if err := emitter(t, &box).PublishDirect(t.Context(), ev); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without a publisher: %v", err)
	}
	if err := e.PublishDirect(t.Context(), ev.With(event.WithDueAt(until.Add(-time.Hour)))); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("a scheduled one: %v", err)
	}
}

func TestABrokenEmitterIsRefused(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]func() (*consumer.Emitter, error){
		"no outbox":      func() (*consumer.Emitter, error) { return consumer.NewEmitter(nil) },
		"limit":          func() (*consumer.Emitter, error) { return consumer.NewEmitter(&fakeBox{}, consumer.BatchLimit(0)) },
		"bound":          func() (*consumer.Emitter, error) { return consumer.NewEmitter(&fakeBox{}, consumer.EmitBound(-1)) },
		"nil middleware": func() (*consumer.Emitter, error) { return consumer.NewEmitter(&fakeBox{}, consumer.EmitVia(nil)) },
	} {
		if _, err := f(); !errors.Is(err, consumer.ErrConfiguration) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A schema is compiled once and called by a validator, on both sides.
func TestValidationByAJSONSchema(t *testing.T) {
	t.Parallel()
	doc, err := jsonschema.UnmarshalJSON(strings.NewReader(`{"type": "object", "required": ["total"], "properties": {"total": {"type": "integer"}}}`))
	if err != nil {
		t.Fatal(err)
	}
	compiler := jsonschema.NewCompiler()
	if err := compiler.AddResource("order.json", doc); err != nil {
		t.Fatal(err)
	}
	schema := compiler.MustCompile("order.json")
	v, err := consumer.NewValidation(map[string]consumer.Validator{"A": func(_ context.Context, _ string, body []byte) error {
		var value any
		if err := json.Unmarshal(body, &value); err != nil {
			return errors.New("it is not JSON")
		}
		if err := schema.Validate(value); err != nil {
			return errors.New("it does not fit the schema") // without what it quotes
		}
		return nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	var box fakeBox
	e := emitter(t, &box, consumer.EmitVia(v.Emit()))
	for body, want := range map[string]string{`{"total": 5}`: "", `{"total": "5"}`: "it does not fit the schema", `{`: "it is not JSON"} {
		err := e.Append(t.Context(), order("A", body))
		bad, _ := errors.AsType[*consumer.InvalidError](err)
		if (want == "") != (err == nil) || bad != nil && !cmp.Equal(bad.Problems, []string{want}) {
			t.Errorf("%s: %v", body, err)
		}
	}
	if len(box.calls) != 1 {
		t.Errorf("%d stored", len(box.calls))
	}
}

func TestEmitMiddlewareWritesInTheTransaction(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"outbox", "audit"} {
		if err := db.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	e, err := consumer.NewEmitter(box, consumer.EmitVia(func(next consumer.Emit) consumer.Emit {
		return func(ctx context.Context, ev event.Event) error {
			if _, err := db.Collection("audit").InsertOne(ctx, bson.D{{Key: "_id", Value: ev.ID()}}); err != nil {
				return err
			}
			return next(ctx, ev)
		}
	}))
	if err != nil {
		t.Fatal(err)
	}
	wanted := errors.New("abort")
	for n, end := range []error{wanted, nil} {
		err := transaction.Run(t.Context(), db.Client(), func(ctx context.Context) error {
			return errors.Join(e.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "1"}, "A", event.Bytes("", []byte("1"))), event.New(event.Aggregate{Type: "order", ID: "2"}, "A", event.Bytes("", []byte("2")))), end)
		})
		if !errors.Is(err, end) {
			t.Fatal(err)
		}
		for _, name := range []string{"outbox", "audit"} {
			if got, err := db.Collection(name).CountDocuments(t.Context(), bson.D{}); int(got) != 2*n || err != nil {
				t.Errorf("%s has %d documents, %v; want %d", name, got, err, 2*n)
			}
		}
	}
}
