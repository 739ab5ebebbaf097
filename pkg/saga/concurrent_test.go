package saga_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

var load = flag.Int("saga.messages", 300, "messages of the tests with two nodes")

// size returns the number of messages per saga and the number of sagas. With -saga.messages=10000
// it is a hundred each.
func size() (perSaga, sagas int) {
	perSaga = min(max(*load/30, 1), 100)
	return perSaga, *load / perSaga
}

func TestOfManyDuplicateStartsOneStarts(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	s := orders[int32](t, r, "orders")
	if err := r.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	h := handlerOf(t, s)
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for i := range 200 {
		m := msg(t, "Begin", "", begin[int32]{ID: 7, Name: strconv.Itoa(i)})
		wg.Go(func() {
			<-gate
			if err := h.Handle(t.Context(), m); err != nil {
				t.Error(err)
			}
		})
	}

	close(gate)
	wg.Wait()
	p.wantEvents(t, "Begun")
	if v := p.document(t, "orders", int32(7)).Lookup("version").Int64(); v != 1 {
		t.Errorf("after one start the version is %d", v)
	}
}

func TestDuplicatesThatComeAtOnceCountOnce(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	r := p.registry(t)
	s := orders[int64](t, r, "orders", saga.WithTombstone(time.Hour))
	if err := r.Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	h := handlerOf(t, s)
	var wg sync.WaitGroup
	for i := range int64(100) {
		for range 3 {
			m := msg(t, "Begin", "", begin[int64]{ID: i})
			wg.Go(func() {
				if err := h.Handle(t.Context(), m); err != nil {
					t.Error(err)
				}
			})
		}
	}

	wg.Wait()
	if types, err := p.types(t.Context()); err != nil || len(types) != 100 {
		t.Errorf("%d events of 100 starts that came three times each, %v", len(types), err)
	}
}

type ledger struct{ Steps []int64 }

// counter defines a saga that stores the numbers of its messages, handles them in sequence, and
// completes after the last one. done receives the result.
func counting(tb testing.TB, r *saga.Registry, last int64) consumer.Handler {
	s := define[ledger, int32](tb, r, "ledgers", saga.WithTombstone(time.Hour), saga.WithHeldLimit(int(last)))
	number := func(m *consumer.Message) (int64, error) {
		v, _ := m.Header("number")
		return strconv.ParseInt(string(v), 10, 64)
	}
	s.StartOrHandle("Step", saga.ByKey[int32](), func(_ context.Context, in *saga.Instance[ledger, int32], m *consumer.Message) error {
		n, _ := number(m)
		in.State.Steps = append(in.State.Steps, n)
		in.Emit(event.New(event.Aggregate{Type: "ledger", ID: saga.FormatID(in.ID())}, "Stepped", event.JSON(n)))
		if n == last {
			in.Complete()
		}

		return nil
	}, saga.InSequence(number))

	return handlerOf(tb, s)
}

// Two nodes receive every message, as if a partition moved between them repeatedly, each in a
// different order and in several goroutines. Each step runs once and in order.
func TestTwoNodesTakeEveryStepOnce(t *testing.T) {
	t.Parallel()
	const lanes = 4
	perSaga, sagas := size()
	db := stacktest.Database(t, stacktest.Client(t))
	first := placeIn(t, db)
	other := placeIn(t, stacktest.Client(t).Database(db.Name()))
	if err := first.registry(t).Prepare(t.Context()); err != nil {
		t.Fatal(err)
	}

	began := time.Now()
	var wg sync.WaitGroup
	for _, node := range []*place{first, other} {
		h := counting(t, node.registry(t), int64(perSaga))
		for lane := range lanes {
			var work []*consumer.Message
			for n := 1; n <= perSaga; n++ {
				for id := lane; id < sagas; id += lanes {
					work = append(work, msg(t, "Step", strconv.Itoa(id), nil, "number", strconv.Itoa(n)))
				}
			}

			// Slightly out of order, so that messages of each saga arrive early and late.
			for i := range work {
				j := min(i+rand.IntN(3*sagas/lanes+1), len(work)-1)
				work[i], work[j] = work[j], work[i]
			}

			wg.Go(func() {
				for _, m := range work {
					if err := policy(t.Context(), h, m); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}

	wg.Wait()
	t.Logf("%d messages over %d sagas on two nodes in %s", 2*sagas*perSaga, sagas, time.Since(began).Round(time.Millisecond))
	wantAllSteps(t, first, sagas, perSaga)
}

// policy runs a message again as long as there are conflicts.
func policy(ctx context.Context, h consumer.Handler, m *consumer.Message) error {
	for {
		if err := h.Handle(ctx, m); !errors.Is(err, saga.ErrConflict) {
			return err
		}
	}
}

func wantAllSteps(t *testing.T, p *place, sagas, perSaga int) {
	t.Helper()
	envelopes, err := p.envelopes(t.Context())
	if err != nil || len(envelopes) != sagas*perSaga {
		t.Errorf("%d events of %d steps, %v", len(envelopes), sagas*perSaga, err)
	}

	next := map[string]int{}
	for _, e := range envelopes {
		id, n := e.Lookup("aggregateid").StringValue(), e.Lookup("payload").StringValue()
		next[id]++
		if strconv.Itoa(next[id]) != n {
			t.Fatalf("step %s of saga %s comes as number %d", n, id, next[id])
		}
	}

	var docs []struct {
		ID    int32 `bson:"_id"`
		State ledger
		End   time.Time `bson:"completedAt"`
	}
	cur, err := p.db.Collection("ledgers").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	if err := cur.All(t.Context(), &docs); err != nil || len(docs) != sagas {
		t.Fatalf("%d sagas, want %d, %v", len(docs), sagas, err)
	}

	for _, d := range docs {
		if len(d.State.Steps) != perSaga || !slices.IsSorted(d.State.Steps) || d.End.IsZero() {
			t.Errorf("saga %d took %v, and ended at %v", d.ID, d.State.Steps, d.End)
		}
	}
}

func TestAStaleCompletionIsRefused(t *testing.T) {
	t.Parallel()
	for _, unguarded := range []bool{false, true} {
		p := newPlace(t, outbox.WithoutTransaction())
		r := p.registry(t, saga.WithoutTransaction(), saga.WithRetries())
		var opts []saga.SagaOption
		if unguarded {
			opts = append(opts, saga.WithoutCompletionGuard())
		}

		s := define[order, string](t, r, "orders", opts...)
		by := saga.ByKey[string]()
		var h consumer.Handler
		s.StartOrHandle("Step", by, func(context.Context, *saga.Instance[order, string], *consumer.Message) error { return nil })
		s.Handle("End", by, func(_ context.Context, in *saga.Instance[order, string], _ *consumer.Message) error {
			in.Emit(event.New(event.Aggregate{Type: "order", ID: "a"}, "Ended", event.Bytes("", []byte("{}"))))
			in.Complete()
			return h.Handle(t.Context(), msg(t, "Step", "a", nil)) // another step, committed meanwhile
		})

		h = handlerOf(t, s)
		handle(t, h, msg(t, "Step", "a", nil))
		err := h.Handle(t.Context(), msg(t, "End", "a", nil))
		doc := p.document(t, "orders", "a")
		if unguarded {
			if err != nil || doc != nil {
				t.Errorf("unguarded: %v, %s", err, doc)
			}
			continue
		}

		var e *saga.ConflictError
		if !errors.Is(err, saga.ErrConflict) || !errors.As(err, &e) || e.Version != 1 || e.ID != "a" {
			t.Errorf("a stale completion: %v", err)
		}

		if doc == nil || doc.Lookup("version").Int64() != 2 {
			t.Errorf("it has left %s", doc)
		}

		p.wantEvents(t)
	}
}

func TestAConflictIsRetriedOnWhatTheOtherLeft(t *testing.T) {
	t.Parallel()
	p := newPlace(t, outbox.WithoutTransaction())
	// In a transaction the server finds the conflict, and the transaction runs again without a
	// retry of the saga.
	for what, opts := range map[string][]saga.Option{"without": {saga.WithoutTransaction()}, "own": {saga.WithRetries()}} {
		s := define[order, string](t, p.registry(t, opts...), "orders_"+what)
		by := saga.ByKey[string]()
		var h consumer.Handler
		var runs atomic.Int32
		note := func(in *saga.Instance[order, string], m *consumer.Message) {
			in.State.Steps = append(in.State.Steps, m.Name)
		}
		s.StartOrHandle("Other", by, func(_ context.Context, in *saga.Instance[order, string], m *consumer.Message) error {
			note(in, m)
			return nil
		})
		s.StartOrHandle("Step", by, func(_ context.Context, in *saga.Instance[order, string], m *consumer.Message) error {
			note(in, m)
			if runs.Add(1) == 1 {
				return h.Handle(t.Context(), msg(t, "Other", "a", nil)) // with a context outside of the step
			}

			return nil
		})

		h = handlerOf(t, s)
		handle(t, h, msg(t, "Step", "a", nil))
		doc := p.document(t, "orders_"+what, "a")
		var d struct{ State order }
		if err := bson.Unmarshal(doc, &d); err != nil || fmt.Sprint(d.State.Steps) != "[Other Step]" || runs.Load() != 2 {
			t.Errorf("%s: %s after %d runs, %v", what, doc, runs.Load(), err)
		}
	}
}

func TestConflictsAreRetriedAfter50And100And250ms(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for refused, want := range map[int]time.Duration{0: 0, 1: 50 * time.Millisecond, 2: 150 * time.Millisecond, 3: 400 * time.Millisecond, 4: 400 * time.Millisecond} {
			store := newMemory()
			store.refuse = refused
			s := define[order, string](t, registry(t, store), "orders")
			s.Start("Step", saga.ByKey[string](), func(context.Context, *saga.Instance[order, string], *consumer.Message) error { return nil })
			began := time.Now()
			err := handlerOf(t, s).Handle(t.Context(), msg(t, "Step", "a", nil))
			if took := time.Since(began); took != want || errors.Is(err, saga.ErrConflict) != (refused == 4) {
				t.Errorf("after %d conflicts: %v in %s, want %s", refused, err, took, want)
			}

			if want := min(refused+1, 4); store.saves != want {
				t.Errorf("%d attempts, want %d", store.saves, want)
			}
		}

		store := newMemory()
		store.refuse = 9
		s := define[order, string](t, registry(t, store), "orders")
		ctx, cancel := context.WithCancel(t.Context())
		s.Start("Step", saga.ByKey[string](), func(context.Context, *saga.Instance[order, string], *consumer.Message) error {
			cancel()
			return nil
		})
		if err := handlerOf(t, s).Handle(ctx, msg(t, "Step", "a", nil)); !errors.Is(err, saga.ErrConflict) || store.saves != 1 {
			t.Errorf("with a context that has ended: %v after %d attempts", err, store.saves)
		}
	})
}
