package boxtest

import (
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// RequireStored fails the test unless the outbox contains events of these types, in the order of their
// timestamps.
func RequireStored(t *testing.T, outbox *mongo.Collection, types ...string) {
	t.Helper()
	cur, err := outbox.Find(t.Context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "ts", Value: 1}}))
	if err != nil {
		t.Fatal(err)
	}

	var got []string
	for cur.Next(t.Context()) {
		got = append(got, cur.Current.Lookup("type").StringValue())
	}
	if err := cur.Err(); err != nil {
		t.Fatal(err)
	}

	if !slices.Equal(got, types) {
		t.Errorf("types in the outbox: got %q, want %q", got, types)
	}
}
