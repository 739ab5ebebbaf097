package saga_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/saga"
)

func nothing[S any, I saga.Identifier](context.Context, *saga.Instance[S, I], *consumer.Message) error {
	return nil
}

func TestADefinitionSaysEverythingThatIsWrong(t *testing.T) {
	t.Parallel()
	s := define[order, string](t, registry(t, newMemory()), "orders")
	by := saga.ByKey[string]()
	s.Handle("", by, nothing)
	s.Handle("NoCorrelation", nil, nothing)
	s.Handle("NoCallback", by, nil)
	s.Handle("order.*", by, nothing)
	s.Handle("Twice", by, nothing)
	s.StartOrHandle("Twice", by, nothing)
	s.Timeout("", nothing)
	s.Timeout("late", nothing)
	s.Timeout("late", nothing)
	s.NotFound(nil)
	s.NotFound(func(context.Context, string, *consumer.Message) error { return nil }, "Nobody")
	_, err := s.Handler()
	var e *saga.DefinitionError
	if !errors.Is(err, saga.ErrDefinition) || !errors.As(err, &e) || e.Saga != "orders" {
		t.Fatal(err)
	}

	for _, want := range []string{
		"no type of message", `"NoCorrelation" has no correlation`, `"NoCallback" has no callback`, `"order.*" is a pattern`, `"Twice" is defined twice`,
		"without a name", `"orders.late" is defined twice`, "NotFound without a function", `NotFound for type "Nobody"`,
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q is not in %v", want, err)
		}
	}

	if register := s.Register(&registered{}); !errors.As(register, &e) {
		t.Errorf("Register: %v", register)
	}

	only := define[order, string](t, registry(t, newMemory()), "orders")
	only.Handle("Step", by, nothing)
	if _, err := only.Handler(); err == nil || !strings.Contains(err.Error(), "no message starts it") {
		t.Errorf("a saga that nothing starts: %v", err)
	}
}

func TestBadOptionsAreRefused(t *testing.T) {
	t.Parallel()
	if _, err := saga.NewMongoStore(nil); err == nil {
		t.Error("a store without a database")
	}

	if _, err := saga.NewRegistry(nil); err == nil {
		t.Error("a registry without a store")
	}

	if _, err := saga.NewRegistry(newMemory(), saga.WithRetries(-1)); err == nil {
		t.Error("a negative wait")
	}

	r := registry(t, newMemory())
	for what, f := range map[string]func() error{
		"empty":     func() error { _, err := saga.New[order, string](r, ""); return err },
		"dollar":    func() error { _, err := saga.New[order, string](r, "a$b"); return err },
		"own":       func() error { _, err := saga.New[order, string](r, saga.DefaultTypes); return err },
		"registry":  func() error { _, err := saga.New[order, string](nil, "a"); return err },
		"tombstone": func() error { _, err := saga.New[order, string](r, "a", saga.WithTombstone(0)); return err },
		"limit":     func() error { _, err := saga.New[order, string](r, "a", saga.WithHeldLimit(0)); return err },
		"owner":     func() error { _, err := saga.New[order, string](r, "a", saga.WithOwner("")); return err },
		"aggregate": func() error { _, err := saga.New[order, string](r, "a", saga.WithAggregate("")); return err },
	} {
		if err := f(); !errors.Is(err, saga.ErrDefinition) {
			t.Errorf("%s: %v", what, err)
		}
	}

	if types := r.Types(); len(types) != 0 {
		t.Errorf("refused sagas are registered: %v", types)
	}
}

func TestANameIsTakenOnce(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	define[order, uuid.UUID](t, r, "orders")
	_, err := saga.New[ledger, string](r, "orders")
	if e := new(saga.DuplicateSagaError); !errors.Is(err, saga.ErrDuplicateSaga) || !errors.As(err, &e) || e.Saga != "orders" {
		t.Errorf("a second saga of the name: %v", err)
	}

	if err := r.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	// Other programs on the same database.
	same := p.registry(t)
	define[order, uuid.UUID](t, same, "orders")
	if err := same.Prepare(t.Context()); err != nil {
		t.Errorf("another process of the same program: %v", err)
	}

	other := p.registry(t)
	define[ledger, uuid.UUID](t, other, "orders")
	err = other.Prepare(t.Context())
	if e := new(saga.OwnerError); !errors.Is(err, saga.ErrDuplicateSaga) || !errors.As(err, &e) || !strings.HasSuffix(e.Found.Owner, "saga_test.order") {
		t.Errorf("another saga of the name: %v", err)
	}

	kinds := p.registry(t)
	define[order, string](t, kinds, "orders")
	if err := kinds.Prepare(t.Context()); !errors.Is(err, saga.ErrDuplicateSaga) {
		t.Errorf("the same with other ids: %v", err)
	}

	renamed := p.registry(t)
	define[ledger, uuid.UUID](t, renamed, "orders", saga.WithOwner(new(owner).of(t, p)))
	if err := renamed.Prepare(t.Context()); err != nil {
		t.Errorf("a type that was renamed and says so: %v", err)
	}
}

type owner struct{}

func (*owner) of(t *testing.T, p *place) string {
	types, err := p.store.Types(t.Context())
	if err != nil || len(types) != 1 {
		t.Fatalf("types: %v %v", types, err)
	}
	return types[0].Owner
}

// registered is a Registrar that keeps the handlers by their names.
type registered struct {
	byName map[string]consumer.Handler
	fail   error
}

func (s *registered) Handle(name string, h consumer.Handler, _ ...consumer.HandlerOption) error {
	if s.byName == nil {
		s.byName = map[string]consumer.Handler{}
	}
	s.byName[name] = h
	return s.fail
}

func TestSeveralSagasAndHandlersTakeOneMessage(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	subs := &registered{}
	plain := 0
	first, second := orders[string](t, r, "first"), orders[string](t, r, "second")
	for _, err := range []error{
		first.Register(subs), second.Register(subs),
		subs.Handle("plain", consumer.Func(func(context.Context, *consumer.Message) error { plain++; return nil }, "Begin")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}

	for _, name := range []string{"first", "second", "plain"} {
		handle(t, subs.byName[name], msg(t, "Begin", "", begin[string]{ID: "a"}))
	}

	if p.document(t, "first", "a") == nil || p.document(t, "second", "a") == nil || plain != 1 {
		t.Errorf("not everybody has run: %d plain", plain)
	}

	p.wantEvents(t, "Begun", "Begun")
	subs.fail = errors.New("taken")
	if err := first.Register(subs); !errors.Is(err, subs.fail) {
		t.Errorf("a consumer that refuses: %v", err)
	}
}

func TestWithoutATransaction(t *testing.T) {
	t.Parallel()
	p := newPlace(t, outboxPlain())
	r := p.registry(t, saga.WithoutTransaction())
	s := define[order, string](t, r, "orders")
	s.StartOrHandle("Step", saga.ByKey[string](), func(ctx context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
		if p.store.InTransaction(ctx) {
			t.Error("there is a transaction")
		}

		in.State.Steps = append(in.State.Steps, "step")
		return saga.Emit(ctx, stepped())
	})

	h := handlerOf(t, s)
	handle(t, h, msg(t, "Step", "a", nil), msg(t, "Step", "a", nil))
	p.wantEvents(t, "Stepped", "Stepped")
	if v := p.document(t, "orders", "a").Lookup("version").Int64(); v != 2 {
		t.Errorf("version %d", v)
	}
}

func TestEmitNeedsARunningStepAndAnOutbox(t *testing.T) {
	t.Parallel()
	if err := saga.Emit(t.Context(), stepped()); !errors.Is(err, saga.ErrNoStep) {
		t.Errorf("without a step: %v", err)
	}

	s := define[order, string](t, registry(t, newMemory()), "orders")
	var kept context.Context
	s.Start("Step", saga.ByKey[string](), func(ctx context.Context, _ *saga.Instance[order, string], _ *consumer.Message) error {
		kept = ctx
		return saga.Emit(ctx, stepped())
	})
	if err := handlerOf(t, s).Handle(t.Context(), msg(t, "Step", "a", nil)); !errors.Is(err, saga.ErrNoOutbox) {
		t.Errorf("without an outbox: %v", err)
	}

	if err := saga.Emit(kept, stepped()); !errors.Is(err, saga.ErrNoStep) {
		t.Errorf("after the step: %v", err)
	}
}

func TestDesk(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	h := handlerOf(t, orders[int32](t, r, "orders", saga.WithTombstone(time.Hour)))
	define[ledger, uuid.UUID](t, r, "ledgers")
	if err := r.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	const n = 5
	for i := range int32(n) {
		handle(t, h, msg(t, "Begin", "", begin[int32]{ID: i, Name: fmt.Sprint(i)}))
	}

	// Times have millisecond precision: the last change must be later than the previous ones.
	last := p.document(t, "orders", int32(n-1)).Lookup("updatedAt").Time()
	stacktest.Eventually(t, "the server's next millisecond", func() bool { return p.serverTime(t).After(last) })
	handle(t, h, msg(t, "End", "", begin[int32]{ID: 2}))
	for what, desk := range map[string]*saga.Desk{"registry": r.Desk(), "store": saga.NewDesk(p.store)} {
		ctx := t.Context()
		types, err := desk.Types(ctx)
		if err != nil || len(types) != 2 || types[0].Name != "ledgers" || types[0].ID != saga.KindUUID || types[1].Name != "orders" || types[1].ID != saga.KindInt32 {
			t.Errorf("%s: types %+v %v", what, types, err)
		}

		if got, found, err := desk.Read(ctx, "orders", "3"); err != nil || !found || got.ID != "3" || string(got.State) != `{"name":"3","steps":null}` {
			t.Errorf("%s: read %+v %v %v", what, got, found, err)
		}

		if got, _, _ := desk.Read(ctx, "orders", "2"); got.CompletedAt.IsZero() || got.Version != 2 {
			t.Errorf("%s: a finished one is %+v", what, got)
		}

		for _, name := range []string{"orders", "unknown"} {
			if _, found, err := desk.Read(ctx, name, "77"); found || err != nil {
				t.Errorf("%s: %s 77: %v %v", what, name, found, err)
			}
		}

		if _, _, err := desk.Read(ctx, "orders", "x"); !errors.Is(err, saga.ErrID) {
			t.Errorf("%s: an id that is no number: %v", what, err)
		}

		for limit, want := range map[int]int{-1: 0, 0: 0, 3: 3, 1000: n, 5000: n} {
			list, err := desk.Recent(ctx, "orders", limit)
			if err != nil || len(list) != want {
				t.Errorf("%s: recent %d: %d, %v", what, limit, len(list), err)
			}

			if want > 0 && list[0].ID != "2" {
				t.Errorf("%s: changed last was %s", what, list[0].ID)
			}
		}

		if list, err := desk.Recent(ctx, "unknown", 10); err != nil || list == nil || len(list) != 0 {
			t.Errorf("%s: recent of an unknown saga: %v %v", what, list, err)
		}
	}
}
