package admin_test

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// reject makes MongoDB reject changes of the documents of coll whose field has a value.
func reject(t *testing.T, coll *mongo.Collection, field, value string) {
	t.Helper()
	validator := bson.D{{Key: field, Value: bson.D{{Key: "$ne", Value: value}}}}
	if err := coll.Database().RunCommand(t.Context(), bson.D{{Key: "collMod", Value: coll.Name()}, {Key: "validator", Value: validator}}).Err(); err != nil {
		t.Fatal(err)
	}
}

// The audit log has the parts of an action that succeeded before the error.
func TestAnActionThatFailsInPartIsLogged(t *testing.T) {
	t.Parallel()
	expectLogged := func(f *office, err error, kind nodes.Kind) {
		t.Helper()
		if n := len(f.findLogged(kind)); err == nil || n != 1 {
			t.Errorf("%d entries of %s, error %v; want one and an error", n, kind, err)
		}
	}

	f := openOffice(t)
	watchers := f.state.Collection("watchers")
	mustInsert(t, f.state.Collection("slots"), bson.D{{Key: "_id", Value: "orders"}, {Key: "of", Value: 2}})
	reject(t, watchers, "_id", "orders/1of2")
	expectLogged(f, f.op.Recovery().OrderSweep(t.Context(), time.Time{}), "recover_ordered")

	f = openOffice(t)
	watchers = f.state.Collection("watchers")
	mustInsert(t, watchers, bson.D{{Key: "_id", Value: "zoo/0of1"}, {Key: "node", Value: "n1"}, {Key: "owner", Value: "n1/x"}, {Key: "expiresAt", Value: time.Now().Add(time.Hour)}})
	reject(t, watchers, "_id", "zoo/0of1")
	released, err := f.op.Nodes().Release(t.Context(), "n1", time.Minute)
	if len(released) != 1 {
		t.Errorf("released %v", released)
	}
	expectLogged(f, err, "node_released")

	f = openOffice(t)
	f.insertWaiting(f.a, "1", "retry", "k1", "orders")
	f.insertWaiting(f.a, "2", "retry", "k1", "orders")
	reject(t, f.state.Collection("waiting"), "id", "2")
	_, err = f.op.Waiting().Retry(t.Context(), admin.WaitingFilter{All: true}, admin.KeepAttempts, admin.ForReal)
	expectLogged(f, err, "failed_retried")
}
