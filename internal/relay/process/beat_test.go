package process_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
)

// Nodes that were killed do not pile up: one that was silent for weeks is forgotten, one of the week before is not.
func TestNodesThatAreGoneAreForgotten(t *testing.T) {
	t.Parallel()
	b := setup(t)
	nodes := statetest.Set(t, b.state).Collection("nodes")
	for _, days := range []int{1, 13, 15, 400} {
		gone := bson.D{{Key: "_id", Value: fmt.Sprint("killed-", days)}, {Key: "seenAt", Value: time.Now().AddDate(0, 0, -days)}}
		if _, err := nodes.InsertOne(t.Context(), gone); err != nil {
			t.Fatal(err)
		}
	}

	b.start()
	var left []string
	stacktest.Eventually(t, "the nodes that are gone for long are removed", func() bool {
		left = nil
		if err := nodes.Distinct(t.Context(), "_id", bson.D{{Key: "_id", Value: bson.D{{Key: "$regex", Value: "^killed-"}}}}).Decode(&left); err != nil {
			t.Fatal(err)
		}
		return len(left) == 2
	})

	slices.Sort(left)
	if !slices.Equal(left, []string{"killed-1", "killed-13"}) {
		t.Errorf("left are %v", left)
	}
}
