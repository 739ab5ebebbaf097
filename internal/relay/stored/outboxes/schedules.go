package outboxes

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// ListScheduled returns the stored list of the outboxes of a watcher that may hold scheduled envelopes, sorted. Only entries that match the
// conditions count.
func ListScheduled(ctx context.Context, coll *mongo.Collection, watcher string, conditions ...bson.E) ([]string, error) {
	filter := append(bson.D{{Key: "watcher", Value: watcher}}, conditions...)
	entries, err := mongodb.FindAll[struct {
		NS string `bson:"ns"`
	}](ctx, mongodb.Majority(coll), "reading the outboxes with scheduled envelopes", filter)
	list := make([]string, len(entries))
	for i, e := range entries {
		list[i] = e.NS
	}
	slices.Sort(list)
	return list, err
}
