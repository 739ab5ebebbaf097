package mongodb_test

import (
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// N22: a majority read right after a write was acknowledged may not show it yet.
func TestN22_CatchUpReadsAcknowledgedWrites(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("letters")
	early := coll.Database().Collection("letters", options.Collection().SetWriteConcern(&writeconcern.WriteConcern{W: 1}))
	for i := range 20 {
		if _, err := early.InsertOne(t.Context(), bson.D{{Key: "_id", Value: i}}); err != nil {
			t.Fatal(err)
		}

		if err := mongodb.CatchUp(t.Context(), coll); err != nil {
			t.Fatal(err)
		}
		if n, err := mongodb.Majority(coll).CountDocuments(t.Context(), bson.D{}); err != nil || n != int64(i+1) {
			t.Fatalf("%d are seen of %d, %v", n, i+1, err)
		}
	}
}
