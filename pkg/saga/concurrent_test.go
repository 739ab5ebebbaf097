package saga_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	driverevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/saga"
)

var load = flag.Int("saga.messages", 300, "messages of the tests with two nodes")

// chooseSize returns the number of messages per saga and the number of sagas. With -saga.messages=10000
// it is a hundred each.
func chooseSize() (perSaga, sagas int) {
	perSaga = min(max(*load/30, 1), 100)
	return perSaga, *load / perSaga
}

// One of the concurrent messages prepares the saga, and the others wait for it.
func TestOfManyDuplicateStartsOneStarts(t *testing.T) {
	t.Parallel()
	// A preparation begins with this command. Its second one, createIndexes, is repeated if the machine is so busy that it looks like
	// an index that waits for open transactions.
	var preparations atomic.Int64
	monitor := &driverevent.CommandMonitor{Started: func(_ context.Context, e *driverevent.CommandStartedEvent) {
		if e.CommandName == "findAndModify" && e.Command.Lookup("findAndModify").StringValue() == "saga_types" {
			preparations.Add(1)
		}
	}}
	p := placeIn(t, stacktest.Database(t, stacktest.Client(t, options.Client().SetMonitor(monitor))))
	h := handlerOf(t, orders("orders", saga.WithIDs(saga.Int32IDs)), p.box)
	var wg sync.WaitGroup
	gate := make(chan struct{})
	for i := range 200 {
		m := newMessage(t, "Begin", "", begin{ID: "7", Name: strconv.Itoa(i)})
		wg.Go(func() {
			<-gate
			if err := handleWithRetry(t.Context(), h, m); err != nil {
				t.Error(err)
			}
		})
	}

	close(gate)
	wg.Wait()
	if n := preparations.Load(); n != 1 {
		t.Errorf("%d messages prepared the saga, want one", n)
	}
	p.wantEvents(t, "Begun")
	if v := p.findDocument(t, "orders", int32(7)).Lookup("version").Int64(); v != 1 {
		t.Errorf("after one start the version is %d", v)
	}
}

func TestDuplicatesThatComeAtOnceCountOnce(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	h := handlerOf(t, orders("orders"), p.box)
	var wg sync.WaitGroup
	for i := range 100 {
		for range 3 {
			m := newMessage(t, "Begin", "", begin{ID: strconv.Itoa(i)})
			wg.Go(func() {
				if err := handleWithRetry(t.Context(), h, m); err != nil {
					t.Error(err)
				}
			})
		}
	}

	wg.Wait()
	if types, err := p.listTypes(t.Context()); err != nil || len(types) != 100 {
		t.Errorf("%d events of 100 starts that came three times each, %v", len(types), err)
	}
}

type ledger struct{ Steps []int64 }

// newCounting defines a saga that stores the numbers of its messages, handles them in sequence, and
// completes after the last one.
func newCounting(tb testing.TB, p *place, last int64) consumer.Handler {
	s := saga.Define[ledger]("ledgers", saga.WithIDs(saga.Int32IDs), saga.WithHeld(int(last)))
	saga.StartOrOn(s, newType[int64]("Step"), func(_ context.Context, in *saga.Instance[ledger], n int64) error {
		in.State.Steps = append(in.State.Steps, n)
		in.Emit(event.New(event.Aggregate{Type: "ledger", ID: in.ID()}, "Stepped", event.JSON(n)))
		if n == last {
			in.Complete()
		}

		return nil
	}, inSequence())

	return handlerOf(tb, s, p.box)
}

// Two nodes receive every message, as if a partition moved between them repeatedly, each in a
// different order and in several goroutines. Each step runs once and in order.
func TestTwoNodesTakeEveryStepOnce(t *testing.T) {
	t.Parallel()
	const lanes = 4
	perSaga, sagas := chooseSize()
	db := stacktest.Database(t, stacktest.Client(t))
	first := placeIn(t, db)
	other := placeIn(t, stacktest.Client(t).Database(db.Name()))
	began := time.Now()
	var wg sync.WaitGroup
	for _, node := range []*place{first, other} {
		h := newCounting(t, node, int64(perSaga))
		for lane := range lanes {
			var work []*consumer.Message
			for n := 1; n <= perSaga; n++ {
				for id := lane; id < sagas; id += lanes {
					work = append(work, newMessage(t, "Step", strconv.Itoa(id), n))
				}
			}

			// Slightly out of order, so that messages of each saga arrive early and late.
			for i := range work {
				j := min(i+rand.IntN(3*sagas/lanes+1), len(work)-1)
				work[i], work[j] = work[j], work[i]
			}

			wg.Go(func() {
				for _, m := range work {
					if err := handleWithRetry(t.Context(), h, m); err != nil {
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

func wantAllSteps(t *testing.T, p *place, sagas, perSaga int) {
	t.Helper()
	envelopes, err := p.listEnvelopes(t.Context())
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

func TestAStaleCompletionIsRejected(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	var h consumer.Handler
	var runs atomic.Int32
	saga.StartOrOn(s, newType[any]("Step"), step[any])
	saga.On(s, newType[any]("End"), func(_ context.Context, in *saga.Instance[order], _ any) error {
		in.Emit(event.New(event.Aggregate{Type: "order", ID: "a"}, fmt.Sprint("Ended", in.State.Steps), event.Bytes("", []byte("{}"))))
		in.Complete()
		if runs.Add(1) == 1 {
			// Another step is committed at the same time.
			return h.Handle(t.Context(), newMessage(t, "Step", "a", nil))
		}
		return nil
	})

	h = handlerOf(t, s, p.box)
	mustHandle(t, h, newMessage(t, "Step", "a", nil), newMessage(t, "End", "a", nil))
	if doc := p.findDocument(t, "orders", "a"); doc.Lookup("version").Int64() != 3 || runs.Load() != 2 {
		t.Errorf("after %d runs the saga is %s", runs.Load(), doc)
	}
	p.wantEvents(t, "Stepped", "Stepped", "Ended[Step Step]")
}

// The server finds the conflict, and the transaction runs again without a retry of the consumer.
func TestAConflictIsRetriedOnTheDocumentOfTheOther(t *testing.T) {
	t.Parallel()
	p := newPlace(t)
	s := saga.Define[order]("orders")
	var h consumer.Handler
	var runs atomic.Int32
	saga.StartOrOn(s, newType[any]("Other"), step[any])
	saga.StartOrOn(s, newType[any]("Step"), func(ctx context.Context, in *saga.Instance[order], payload any) error {
		if runs.Add(1) == 1 {
			// The context is outside of the step.
			return h.Handle(t.Context(), newMessage(t, "Other", "a", nil))
		}
		return step(ctx, in, payload)
	})

	h = handlerOf(t, s, p.box)
	mustHandle(t, h, newMessage(t, "Step", "a", nil))
	if got := readSnapshot(t, p.box, "orders", "a"); string(got.State) != `{"name":"","steps":["Other","Step"]}` || runs.Load() != 2 {
		t.Errorf("%s after %d runs", got.State, runs.Load())
	}
}
