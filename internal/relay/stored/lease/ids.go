package lease

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// ListIDs returns the ids of the documents of a watcher, in the order of the slots.
func ListIDs(ctx context.Context, watchers *mongo.Collection, watcher string) ([]string, error) {
	// The character after / is 0.
	ofWatcher := bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: watcher + "/"}, {Key: "$lt", Value: watcher + "0"}}}}
	type document struct {
		ID string `bson:"_id"`
	}
	docs, err := mongodb.FindAll[document](ctx, watchers, "listing the documents of watcher "+watcher, ofWatcher,
		options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return nil, err
	}

	parts := map[string]slot.Range{}
	var ids []string
	for _, d := range docs {
		if name, slotRange, ok := slot.ParseID(d.ID); ok && name == watcher {
			parts[d.ID] = slotRange
			ids = append(ids, d.ID)
		}
	}
	slices.SortFunc(ids, func(a, b string) int { return parts[a].I - parts[b].I })
	return ids, nil
}
