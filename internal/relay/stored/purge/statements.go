package purge

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
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
	within := envelope.Stamped(bson.E{Key: "$gt", Value: start}, bson.E{Key: bound, Value: upto})
	res, err := mongodb.Majority(coll).DeleteMany(ctx, outboxes.WithoutDueAt(within))
	if err != nil {
		return Purged{}, mongodb.DescribeError(err, "purging "+mongodb.Namespace(coll), "remove", mongodb.Namespace(coll))
	}
	return Purged{Deleted: res.DeletedCount, Upto: upto, More: more}, nil
}

// readNthStamp returns the n-th stamp in (start, end) and true. If there are fewer, it returns end and false. It
// normally reads the index only.
func readNthStamp(
	ctx context.Context, coll *mongo.Collection, start, end bson.Timestamp, n int,
) (bson.Timestamp, bool, error) {
	bounds := bson.D{{Key: "$gt", Value: start}, {Key: "$lt", Value: end}}
	opts := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).SetSkip(int64(max(n, 1) - 1)).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})

	// The first attempt reads the index only. If the n-th entry is an element of a list, the second one also reads documents.
	for _, within := range []bson.E{{Key: "ts", Value: bounds}, envelope.Stamped(bounds...)} {
		var last struct {
			TS bson.RawValue `bson:"ts"`
		}
		err := coll.FindOne(ctx, bson.D{within}, opts).Decode(&last)
		seconds, i, stamp := last.TS.TimestampOK()
		switch {
		case errors.Is(err, mongo.ErrNoDocuments):
			return end, false, nil
		case err != nil:
			return bson.Timestamp{}, false, err
		case stamp:
			return bson.Timestamp{T: seconds, I: i}, true, nil
		}
	}
	return end, false, nil
}
