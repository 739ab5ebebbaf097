package demo

import (
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/lab/demo/check"
)

// deliverAll acts as relay and consumer: it delivers the documents of the collection in the order of
// their server stamps.
func deliverAll(t *testing.T, coll *mongo.Collection, c *check.Checker) {
	t.Helper()
	cur, err := coll.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		t.Fatal(err)
	}

	for offset := int64(0); cur.Next(t.Context()); offset++ {
		var v envelope.View
		if err := envelope.Parse(cur.Current, &v); err != nil {
			t.Fatal(err)
		}
		value, err := envelope.AppendPayload(nil, &v)
		if err != nil {
			t.Fatal(err)
		}
		d := check.Delivery{ID: string(v.AppendID(nil)), Key: string(v.Key), Topic: defaultNames().topicName(aggregate), Offset: offset, Value: value, Seen: time.Now()}
		if c.Delivered(d) != check.First {
			t.Fatalf("envelope %s", d.ID)
		}
	}
	if err := cur.Err(); err != nil {
		t.Fatal(err)
	}
}
