package scheduled

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

func hasField(field string) bson.D {
	return bson.D{{Key: field, Value: bson.D{{Key: "$exists", Value: true}}}}
}

// overdue is when a test fails because an expected event has not come. It only bounds a hang, so it is longer than a
// test may wait for the fail point of the server.
const overdue = 4 * time.Minute

func keysOf(t *testing.T, keys ...string) (list []bson.RawValue) {
	t.Helper()
	for _, k := range keys {
		typ, val, err := bson.MarshalValue(k)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, bson.RawValue{Type: typ, Value: val})
	}
	return list
}

func newDatabase(t *testing.T) *mongo.Database {
	t.Helper()
	return stacktest.Database(t, stacktest.Client(t))
}
