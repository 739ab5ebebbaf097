package cursor_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

func TestDistinctReturnsTheErrorOfTheStatement(t *testing.T) {
	t.Parallel()
	coll := stacktest.Database(t, stacktest.Client(t)).Collection("c")
	if _, err := coll.InsertMany(t.Context(), []bson.D{{{Key: "n", Value: 1}}, {{Key: "n", Value: 2}}, {{Key: "n", Value: 2}}}); err != nil {
		t.Fatal(err)
	}

	got, err := cursor.Distinct[int]("reading numbers", coll.Distinct(t.Context(), "n", bson.D{}))
	if err != nil || !slices.Equal(got, []int{1, 2}) {
		t.Errorf("values: got %v (%v), want 1 and 2", got, err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := cursor.Distinct[int]("reading numbers", coll.Distinct(ctx, "n", bson.D{})); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: got %v, want %v", err, context.Canceled)
	}
}
