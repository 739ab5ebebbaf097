package agenda

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
)

// partSize is the number of events that one statement of an operator's action changes.
const partSize = 1000

// CancelInParts is [CancelMatching] for an operator: it changes 1,000 events at a time, and calls did with the number so far after each of these
// parts. After an error some of the events are gone. ctx must have no transaction.
func CancelInParts(ctx context.Context, coll *mongo.Collection, query Query, did func(int64)) (n int64, err error) {
	filter, err := query.buildFilter()
	if err != nil {
		return 0, err
	}
	return changeInParts(ctx, coll, filter, did, func(part bson.D) (int64, error) {
		res, err := coll.DeleteMany(ctx, part)
		if err != nil {
			return 0, err
		}
		return res.DeletedCount, nil
	})
}

// MoveInParts sets the due time of the events that query selects to dueAt, and returns the number of the events that had another one. It
// works like [CancelInParts].
func MoveInParts(ctx context.Context, coll *mongo.Collection, query Query, dueAt time.Time, did func(int64)) (n int64, err error) {
	filter, err := query.buildFilter()
	if err == nil {
		err = CheckTime(dueAt)
	}
	if err != nil {
		return 0, err
	}

	// The cursor walks along the index of the due times. It must not find events again that were moved to a place before it.
	due := bson.NewDateTimeFromTime(dueAt)
	filter = listing.All(filter, bson.D{{Key: "dueAt", Value: bson.D{{Key: "$ne", Value: due}}}})
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: due}}}}
	return changeInParts(ctx, coll, filter, did, func(part bson.D) (int64, error) {
		res, err := coll.UpdateMany(ctx, part, set)
		if err != nil {
			return 0, err
		}
		return res.ModifiedCount, nil
	})
}

// changeInParts calls change with a filter for each part of the events that filter selects, and returns the sum of its results. It ends at the
// first error. An event that a watcher claims in the meantime matches the filter of its part no more.
func changeInParts(
	ctx context.Context, coll *mongo.Collection, filter bson.D, did func(int64), change func(part bson.D) (int64, error),
) (n int64, err error) {
	cursor, err := cursor.Find(ctx, coll, filter, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}).SetBatchSize(partSize))
	if err != nil {
		return 0, err
	}
	defer cursor.Close(context.WithoutCancel(ctx))

	var ids bson.A
	changePart := func() error {
		changed, err := change(listing.All(filter, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}))
		n, ids = n+changed, nil
		if err == nil && did != nil {
			did(n)
		}
		return err
	}
	for cursor.Next(ctx) {
		id := cursor.Current.Lookup("_id")
		ids = append(ids, bson.RawValue{Type: id.Type, Value: append([]byte{}, id.Value...)})
		if len(ids) < partSize {
			continue
		}
		if err := changePart(); err != nil {
			return n, err
		}
	}
	if err := cursor.Err(); err != nil || len(ids) == 0 {
		return n, err
	}
	return n, changePart()
}
