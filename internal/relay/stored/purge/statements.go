package purge

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Purged is the result of one statement.
type Purged struct {
	Deleted int64
	Upto    bson.Timestamp // the statement covered everything up to this stamp; the next one begins after it
	More    bool           // there may be more before the cut
}

// PurgeBatch removes about n envelopes with stamps in (start, end), the oldest first. It removes all envelopes
// that share the last stamp, so it may remove more. It leaves out scheduled envelopes, so it may remove fewer, or none.
//
// It reads the n-th stamp from the index on ts and deletes the range up to this stamp. That costs the server less than a
// list of n ids. The deletion contains the conditions of the purge itself. The deletion waits for the majority, so the deletions do not delay the majority
// writes of services.
func PurgeBatch(ctx context.Context, coll *mongo.Collection, start, end bson.Timestamp, n int) (Purged, error) {
	upto, more, err := readNthStamp(ctx, coll, start, end, n)
	if err != nil {
		return Purged{}, mongodb.DescribeError(err, "looking for envelopes to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}

	// The range does not contain the cut itself. Every other bound is a stamp below the cut, and belongs to the range.
	bound := "$lte"
	if !more {
		bound = "$lt"
	}
	res, err := mongodb.Majority(coll).DeleteMany(ctx, outboxes.Unscheduled(bson.E{Key: "ts", Value: bson.D{
		{Key: "$gt", Value: start}, {Key: bound, Value: upto}, noArray,
	}}))
	if err != nil {
		return Purged{}, mongodb.DescribeError(err, "purging "+mongodb.Namespace(coll), "remove", mongodb.Namespace(coll))
	}
	return Purged{Deleted: res.DeletedCount, Upto: upto, More: more}, nil
}

// noArray excludes lists of stamps from a range. Without it, a list matches if its elements satisfy the two bounds.
var noArray = bson.E{Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}

// readNthStamp returns the n-th stamp in (start, end) and true. If there are fewer, it returns end and false. It
// normally reads the index only.
func readNthStamp(
	ctx context.Context, coll *mongo.Collection, start, end bson.Timestamp, n int,
) (bson.Timestamp, bool, error) {
	within := bson.D{{Key: "$gt", Value: start}, {Key: "$lt", Value: end}}
	opts := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).SetSkip(int64(max(n, 1) - 1)).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})

	for {
		var last struct {
			TS bson.RawValue `bson:"ts"`
		}
		err := coll.FindOne(ctx, bson.D{{Key: "ts", Value: within}}, opts).Decode(&last)
		seconds, i, stamp := last.TS.TimestampOK()
		switch {
		case errors.Is(err, mongo.ErrNoDocuments):
			return end, false, nil
		case err != nil:
			return bson.Timestamp{}, false, err
		case stamp:
			return bson.Timestamp{T: seconds, I: i}, true, nil
		case len(within) > 2:
			return end, false, nil
		}

		// The n-th entry of the index is an element of a list. The condition that excludes lists also reads documents.
		within = append(within, noArray)
	}
}
