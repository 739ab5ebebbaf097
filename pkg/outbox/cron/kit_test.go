package cron_test

import (
	"context"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"
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

// bundle contains the database and the box of one test.
type bundle struct {
	db   *mongo.Database
	box  *outbox.Box
	coll *mongo.Collection
}

func setup(t *testing.T) bundle {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	box, err := outbox.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return bundle{db, box, db.Collection("outbox")}
}

// appendOrdinary appends an event that is not scheduled.
func (b bundle) appendOrdinary(t *testing.T, typ string) {
	t.Helper()
	if err := b.box.Transaction(t.Context(), func(ctx context.Context) error {
		return b.box.Append(ctx, event.New(event.Aggregate{Type: "order", ID: "o-1"}, typ, event.Bytes("", []byte("p"))))
	}); err != nil {
		t.Fatal(err)
	}
}

// checkTypes fails the test unless the outbox contains events of these types, in the order of their timestamps.
func (b bundle) checkTypes(t *testing.T, types ...string) {
	t.Helper()
	boxtest.RequireStored(t, b.coll, types...)
}
