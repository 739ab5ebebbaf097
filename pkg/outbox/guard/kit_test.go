package guard_test

import (
	"context"
	"slices"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	mongoevent "go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/boxtest"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

func TestMain(m *testing.M) {
	stacktest.Wide(4)
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find))
}

// bundle contains the client, the database and the box of one test.
type bundle struct {
	client *mongo.Client
	db     *mongo.Database
	box    *outbox.Box
}

func setup(t *testing.T, opts ...*options.ClientOptions) bundle {
	t.Helper()
	c := stacktest.Client(t, opts...)
	b := bundle{client: c, db: stacktest.Database(t, c)}
	b.box = b.newBox(t)
	return b
}

func (b bundle) newBox(t *testing.T, opts ...outbox.Option) *outbox.Box {
	t.Helper()
	box, err := outbox.New(b.db, opts...)
	if err != nil {
		t.Fatal(err)
	}
	return box
}

// checkTypes fails the test unless the outbox contains events of these types, in the order of their timestamps.
func (b bundle) checkTypes(t *testing.T, types ...string) {
	t.Helper()
	boxtest.RequireStored(t, b.db.Collection("outbox"), types...)
}

func newEvent(typ string, opts ...event.Option) event.Event {
	return event.New(event.Aggregate{Type: "order", ID: "o-1"}, typ, event.Bytes("", []byte("p")), opts...)
}

// watch records the commands of a client.
type watch struct {
	mu   sync.Mutex
	cmds []bson.Raw
}

func (w *watch) options() *options.ClientOptions {
	return options.Client().SetMonitor(&mongoevent.CommandMonitor{Started: func(_ context.Context, e *mongoevent.CommandStartedEvent) {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.cmds = append(w.cmds, slices.Clone(e.Command))
	}})
}

// lastCommand returns the last command of this name.
func (w *watch) lastCommand(t *testing.T, name string) bson.Raw {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range slices.Backward(w.cmds) {
		if elems, err := c.Elements(); err == nil && elems[0].Key() == name {
			return c
		}
	}

	t.Fatalf("no %s was sent", name)
	return nil
}
