package saga_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	driverevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/saga"
)

func nothing(context.Context, *saga.Instance[order], any) error { return nil }

func nothingLate(context.Context, *saga.Instance[order]) error { return nil }

func TestADefinitionReportsAllItsProblems(t *testing.T) {
	t.Parallel()
	s := saga.Define[order]("orders")
	saga.On(s, newType[any](""), nothing)
	saga.On[order, any](s, newType[any]("NoStep"), nil)
	saga.On(s, newType[any]("order.*"), nothing)
	saga.On(s, newType[any]("Twice"), nothing)
	saga.StartOrOn(s, newType[any]("Twice"), nothing)
	saga.On(s, newType[any]("Payloads"), nothing)
	saga.Start(s, newType[begin]("Payloads"), step[begin])
	s.Timeout("", nothingLate)
	s.Timeout("none", nil)
	s.Timeout("late", nothingLate)
	s.Timeout("late", nothingLate)
	saga.Missing[order, any](s, newType[any]("Twice"), nil)
	for range 2 {
		saga.Missing(s, newType[any]("Unknown"), func(context.Context, string, any) error { return nil })
	}
	_, err := s.Handler(nil)
	if !errors.Is(err, saga.ErrDefinition) {
		t.Fatal(err)
	}

	for _, want := range []string{
		"has no name", `"NoStep" has no step`, `"order.*" is a pattern`, `"Twice" is defined twice`, `"Payloads" has the payloads interface {} and saga_test.begin`,
		"without a name", `timeout "none" has no step`, `"orders.late" is defined twice`, `Missing for type "Twice" has no function`,
		`Missing for type "Unknown", which has no step`, `Missing is given twice for type "Unknown"`, "the outbox is nil",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}

	only := saga.Define[order]("orders")
	saga.On(only, newType[any]("Step"), nothing)
	if _, err := only.Handler(memoryBox(t)); err == nil || !strings.Contains(err.Error(), "no message starts it") {
		t.Errorf("a saga that nothing starts: %v", err)
	}
}

func TestBadOptionsAreRejected(t *testing.T) {
	t.Parallel()
	for what, s := range map[string]*saga.Saga[order]{
		"empty":  saga.Define[order](""),
		"dollar": saga.Define[order]("a$b"),
		"own":    saga.Define[order]("saga_types"),
		"ids":    saga.Define[order]("a", saga.WithIDs("float")),
	} {
		saga.Start(s, newType[any]("Start"), nothing)
		if _, err := s.Handler(memoryBox(t)); !errors.Is(err, saga.ErrDefinition) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestANameIsTakenOnce(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	// Handler does no I/O. A consumer prepares the saga when it starts, and so does the first message of a unit test.
	start := func(h consumer.Handler, err error) error {
		if err != nil {
			t.Fatal(err)
		}
		return h.Handle(t.Context(), newMessage(t, "Start", uuid.NewString(), nil))
	}
	starting := func(opts ...saga.Option) (consumer.Handler, error) {
		s := saga.Define[order]("orders", opts...)
		saga.Start(s, newType[any]("Start"), nothing)
		return s.Handler(p.box)
	}
	// The second start is another process of the same program.
	for range 2 {
		if err := start(starting(saga.WithIDs(saga.UUIDs))); err != nil {
			t.Fatal(err)
		}
	}

	ledgers := func(opts ...saga.Option) error {
		s := saga.Define[ledger]("orders", append(opts, saga.WithIDs(saga.UUIDs))...)
		saga.Start(s, newType[any]("Start"), func(context.Context, *saga.Instance[ledger], any) error { return nil })
		return start(s.Handler(p.box))
	}
	if err := ledgers(); !errors.Is(err, saga.ErrDefinition) || !strings.Contains(err.Error(), "saga_test.order with uuid ids") {
		t.Errorf("another saga of the name: %v", err)
	}
	if err := start(starting()); !errors.Is(err, saga.ErrDefinition) {
		t.Errorf("the same with other ids: %v", err)
	}
	if err := ledgers(saga.WithOwner(reflect.TypeFor[order]().PkgPath() + ".order")); err != nil {
		t.Errorf("a renamed type with its former name: %v", err)
	}
}

// A consumer prepares its sagas when it starts, and ends if it cannot run one of them.
func TestAConsumerRejectsASagaWhoseNameIsTaken(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	// Its Kafka is not available.
	run := func(ctx context.Context, opts ...saga.Option) error {
		c, err := consumer.New("g", p.db, consumer.WithBrokers("localhost:1"), consumer.WithTopics("t"))
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Handle("orders", handlerOf(t, orders("orders", opts...), p.box)); err != nil {
			t.Fatal(err)
		}
		return c.Run(ctx)
	}

	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- run(ctx) }()
	stacktest.Eventually(t, "the saga is prepared", func() bool {
		types, err := sagas.NewMongo(p.db).Types(t.Context())
		return err == nil && len(types) == 1
	})
	cancel()
	if err := <-first; err != nil {
		t.Errorf("stopping the first consumer: %v", err)
	}

	if err := run(t.Context(), saga.WithIDs(saga.UUIDs)); !errors.Is(err, saga.ErrDefinition) {
		t.Errorf("Run with another saga of the name: got %v, want ErrDefinition", err)
	}
}

func TestSeveralSagasAndHandlersTakeOneMessage(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	c, err := consumer.New("g", p.db, consumer.WithBrokers("localhost:1"), consumer.WithTopics("t"))
	if err != nil {
		t.Fatal(err)
	}

	plain := 0
	handlers := map[string]consumer.Handler{
		"first":  handlerOf(t, orders("first"), p.box),
		"second": handlerOf(t, orders("second"), p.box),
		"plain":  consumer.Func(func(context.Context, *consumer.Message) error { plain++; return nil }, "Begin"),
	}
	for name, h := range handlers {
		if err := c.Handle(name, h); err != nil {
			t.Fatal(err)
		}
		mustHandle(t, h, newMessage(t, "Begin", "", begin{ID: "a"}))
	}

	if p.findDocument(t, "first", "a") == nil || p.findDocument(t, "second", "a") == nil || plain != 1 {
		t.Errorf("not everybody has run: %d plain", plain)
	}

	p.wantEvents(t, "Begun", "Begun")
}

func TestDesk(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, orders("orders", saga.WithIDs(saga.Int32IDs), saga.WithTombstone(time.Hour)), p.box)

	const n = 5
	for i := range n {
		mustHandle(t, h, newMessage(t, "Begin", "", begin{ID: fmt.Sprint(i), Name: fmt.Sprint(i)}))
	}

	// Times have millisecond precision: the last change must be later than the previous ones.
	last := p.findDocument(t, "orders", int32(n-1)).Lookup("updatedAt").Time()
	stacktest.Eventually(t, "the server's next millisecond", func() bool { return p.serverTime(t).After(last) })
	mustHandle(t, h, newMessage(t, "End", "", begin{ID: "2"}))

	if got := readSnapshot(t, p.box, "orders", "3"); got.Ref != (saga.Ref{Saga: "orders", ID: "3"}) || string(got.State) != `{"name":"3","steps":null}` {
		t.Errorf("read %+v", got)
	}
	if got := readSnapshot(t, p.box, "orders", "2"); got.CompletedAt.IsZero() || got.Version != 2 {
		t.Errorf("a finished one is %+v", got)
	}

	desk := saga.NewDesk(p.box)
	for ref, want := range map[saga.Ref]error{
		{Saga: "orders", ID: "77"}: saga.ErrNotFound, {Saga: "unknown", ID: "77"}: saga.ErrNotFound, {Saga: "orders", ID: "x"}: saga.ErrNoID,
	} {
		if _, err := desk.Get(t.Context(), ref); !errors.Is(err, want) {
			t.Errorf("%v: %v, want %v", ref, err, want)
		}
	}

	for name, want := range map[string]int{"orders": n, "unknown": 0} {
		var ids []string
		for s, err := range desk.Recent(t.Context(), name) {
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, s.ID)
		}
		if len(ids) != want || want > 0 && ids[0] != "2" {
			t.Errorf("%s: changed last were %v", name, ids)
		}
	}

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	calls := 0
	for _, err := range desk.Recent(ended, "orders") {
		if calls++; !errors.Is(err, context.Canceled) || calls > 1 {
			t.Errorf("with a context that has ended: %v, call %d", err, calls)
		}
	}
}

// The document of a saga may have 16 MiB, and a list a thousand of them.
func TestAListOfSagasIsReadInParts(t *testing.T) {
	t.Parallel()
	var read atomic.Int64
	monitor := &driverevent.CommandMonitor{Succeeded: func(_ context.Context, e *driverevent.CommandSucceededEvent) { read.Add(int64(len(e.Reply))) }}
	p := placeIn(t, stacktest.Database(t, stacktest.Client(t, options.Client().SetMonitor(monitor))))
	store := sagas.NewMongo(p.db)
	body, err := bson.Marshal(bson.D{{Key: "state", Value: make([]byte, 4<<20)}})
	if err != nil {
		t.Fatal(err)
	}
	for n := range 12 {
		if _, err := store.Save(t.Context(), "ledgers", sagas.Record{ID: fmt.Sprint(n), Body: body}); err != nil {
			t.Fatal(err)
		}
	}

	read.Store(0)
	n := 0
	for _, err := range saga.NewDesk(p.box).Recent(t.Context(), "ledgers") {
		if n++; err != nil || n == 1 && read.Load() > 24<<20 {
			t.Errorf("saga %d: %d MiB are read, want at most 24 for the first one: %v", n, read.Load()>>20, err)
		}
	}
	if n != 12 {
		t.Errorf("sagas: got %d, want 12", n)
	}
}
