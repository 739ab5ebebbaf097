package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// maxSkips bounds the events that one position may pass over.
const maxSkips = 100

// ErrManySkips reports that the stream has not passed the events of earlier orders yet.
var ErrManySkips = fmt.Errorf("%d events are to be passed over: wait until the stream has passed the first of them", maxSkips)

// CheckSkip returns the watcher document, or the error that RequestSkip would return now.
func CheckSkip(ctx context.Context, coll *mongo.Collection, id string, skip Skip) (doc Document, err error) {
	err = mongodb.Majority(coll).FindOne(ctx, acceptsSkip(id, skip)).Decode(&doc)
	return doc, explainSkip(ctx, coll, id, err)
}

// RequestSkip makes the next owner pass over an event, and makes the current owner step down for hold. It replaces an earlier order for
// the event. Orders whose time the position has passed are done, and are removed. The error is [ErrManySkips] if too many are left.
func RequestSkip(ctx context.Context, coll *mongo.Collection, id string, skip Skip, hold time.Duration) error {
	skips := op("$concatArrays", otherSkips(skip), bson.A{mongodb.Literal(skip)})
	set := bson.D{{Key: "control", Value: op("$mergeObjects", stepDownControl(hold), bson.D{{Key: "skips", Value: skips}})}}
	res, err := mongodb.Majority(coll).UpdateOne(ctx, acceptsSkip(id, skip), mongo.Pipeline{{{Key: "$set", Value: set}}})
	if err == nil && res.MatchedCount == 0 {
		err = mongo.ErrNoDocuments
	}
	return explainSkip(ctx, coll, id, err)
}

// acceptsSkip is the filter for the document of a watcher that has room for an order.
func acceptsSkip(id string, skip Skip) bson.D {
	return bson.D{{Key: "_id", Value: id}, {Key: "$expr", Value: op("$lt", op("$size", otherSkips(skip)), maxSkips)}}
}

// otherSkips returns the expression for the orders for other events that are not done.
func otherSkips(skip Skip) bson.D {
	isOpen := op("$gt", "$$this.at", mongodb.IfNull("$clusterTime", bson.Timestamp{}))
	atSameTime := op("$mergeObjects", "$$this", bson.D{{Key: "at", Value: skip.At}})
	return bson.D{{Key: "$filter", Value: bson.D{
		{Key: "input", Value: mongodb.IfNull("$control.skips", bson.A{})},
		{Key: "cond", Value: op("$and", isOpen, op("$ne", atSameTime, mongodb.Literal(skip)))},
	}}}
}

// explainSkip returns the reason why no document accepts an order.
func explainSkip(ctx context.Context, coll *mongo.Collection, id string, err error) error {
	if errors.Is(err, mongo.ErrNoDocuments) {
		if _, _, err = Read(ctx, coll, id); err == nil {
			err = ErrManySkips
		}
	}
	if err != nil {
		return fmt.Errorf("passing over an event of watcher %s: %w", id, err)
	}
	return nil
}
