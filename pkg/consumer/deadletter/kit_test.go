package deadletter_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/base/module"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/memory"
	"github.com/outrelay/outrelay/internal/service/setaside"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
	"github.com/outrelay/outrelay/pkg/event"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

var errFlaky = errors.New("flaky")

// graveyard is a Desk and the messages that it hands back.
type graveyard struct {
	*testing.T
	*deadletter.Desk
	waiting setaside.Store
	db      *mongo.Database // nil in memory
	count   func(ctx context.Context, handler string) (int, error)
}

// newGraveyard returns a Desk over MongoDB, without its indexes.
func newGraveyard(t *testing.T, opts ...deadletter.Option) *graveyard {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	desk, err := deadletter.New(db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return &graveyard{T: t, Desk: desk, waiting: setaside.New(db, setaside.DefaultCollection), db: db, count: countIn(db)}
}

// countIn returns a function that counts the messages of a handler in db.
func countIn(db *mongo.Database) func(ctx context.Context, handler string) (int, error) {
	return func(ctx context.Context, handler string) (int, error) {
		n, err := db.Collection(setaside.DefaultCollection).CountDocuments(ctx, bson.D{{Key: "h", Value: handler}})
		return int(n), err
	}
}

// onBothStores runs a test with a Desk over MongoDB, and with one in memory.
func onBothStores(t *testing.T, test func(g *graveyard)) {
	t.Helper()
	t.Run("MongoDB", func(t *testing.T) {
		t.Parallel()
		g := newGraveyard(t)
		if err := g.Desk.EnsureIndexes(t.Context(), module.Key{}); err != nil {
			t.Fatal(err)
		}
		test(g)
	})

	t.Run("memory", func(t *testing.T) {
		t.Parallel()
		db := memory.NewDB()
		desk, err := memory.NewLetters(db)
		if err != nil {
			t.Fatal(err)
		}
		inbox, err := memory.NewInbox(db)
		if err != nil {
			t.Fatal(err)
		}
		count := func(ctx context.Context, handler string) (int, error) { return memory.CountSetAside(ctx, db, handler) }
		test(&graveyard{T: t, Desk: desk, waiting: inbox.Waiting(), count: count})
	})
}

// newLetter returns the letter of message n of a type, for a handler of the group "g".
func newLetter(n int, handler, name string) *deadletter.Letter {
	return &deadletter.Letter{
		ID: deadletter.ID{
			Group: "g", Handler: handler, Topic: "orders", Partition: 2, Offset: int64(n), Message: fmt.Sprint("m", n),
		},
		Class: deadletter.ClassHandler, Reason: errFlaky.Error(),
		Name: name, Aggregate: event.Aggregate{Type: "order", ID: "7"},
		Time: time.UnixMilli(1_700_000_000_000).UTC(),
		Key:  []byte{0, byte(n)}, Value: []byte{255, byte(n)},
		Headers:  []event.Header{{Key: "id", Value: fmt.Append(nil, "m", n)}, {Key: "bin", Value: []byte{0, 1}}, {Key: "null"}},
		Attempts: 1,
	}
}

// bury stores letters.
func (g *graveyard) bury(letters ...*deadletter.Letter) {
	g.Helper()
	for _, l := range letters {
		if _, err := g.Desk.Put(g.Context(), module.Key{}, l, noTopic); err != nil {
			g.Fatal(err)
		}
	}
}

func noTopic(context.Context, string) error { return errors.New("there is no topic") }

// list returns the letters that q selects.
func (g *graveyard) list(q deadletter.Query) (list []deadletter.Letter) {
	g.Helper()
	for l, err := range g.List(g.Context(), q) {
		if err != nil {
			g.Fatal(err)
		}
		list = append(list, l)
	}
	return list
}

// requeue requeues the letters that q selects, and checks their number.
func (g *graveyard) requeue(q deadletter.Query, r deadletter.RequeueOptions, want int64) {
	g.Helper()
	if n, err := g.Requeue(g.Context(), q, r); n != want || err != nil {
		g.Errorf("requeued letters: got %d (%v), want %d", n, err, want)
	}
}

// handedBack returns the first message of a key that waits for a handler, or nil.
func (g *graveyard) handedBack(handler string, key []byte) *setaside.Message {
	g.Helper()
	place := setaside.Place{Handler: "g/" + handler, Topic: "orders", Partition: 2}
	m, err := g.waiting.First(g.Context(), place, setaside.KeyQueue(key))
	if err != nil {
		g.Fatal(err)
	}
	return m
}

// countHandedBack returns how many messages wait for a handler.
func (g *graveyard) countHandedBack(handler string) int {
	g.Helper()
	n, err := g.count(g.Context(), "g/"+handler)
	if err != nil {
		g.Fatal(err)
	}
	return n
}

// isRejected reports whether err has a rejected letter.
func isRejected(err error) bool {
	_, ok := errors.AsType[*deadletter.RejectedError](err)
	return ok
}
