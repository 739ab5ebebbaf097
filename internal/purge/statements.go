package purge

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Purged is what one statement removed.
type Purged struct {
	Deleted int64
	Upto    bson.Timestamp // everything up to here is done; where the next one begins
	More    bool           // there is more in front of the cut
}

// PurgeBatch removes the first n or so healthy envelopes with stamps in (after, before): those that share the last stamp
// go together, and those that are exceptions are passed over, so that it may remove fewer, or none.
//
// It is a read of the index on ts for the n-th stamp and one deletion of the range up to it, which costs the server less
// than naming n ids. Both conditions of the purge are in the deletion itself, so an envelope that becomes an exception
// between the two stays. The deletion waits for the majority: the next batch begins when the members have this one, so
// deletions never queue up in front of the majority writes of services.
func PurgeBatch(ctx context.Context, coll *mongo.Collection, after, before bson.Timestamp, n int) (Purged, error) {
	upto, more, err := nthStamp(ctx, coll, after, before, n)
	if err != nil {
		return Purged{}, mongodb.DescribeRefusal(err, "looking for what to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	// The cut itself is not part of the range; every other bound is a stamp that was read below it.
	bound := "$lte"
	if !more {
		bound = "$lt"
	}
	res, err := mongodb.Majority(coll).DeleteMany(ctx, outboxes.Healthy(bson.E{Key: "ts", Value: bson.D{
		{Key: "$gt", Value: after}, {Key: bound, Value: upto}, noArray,
	}}))
	if err != nil {
		return Purged{}, mongodb.DescribeRefusal(err, "purging "+mongodb.Namespace(coll), "remove", mongodb.Namespace(coll), "")
	}
	return Purged{Deleted: res.DeletedCount, Upto: upto, More: more}, nil
}

// noArray keeps a list of stamps, which is no stamp, out of a range that two of its elements may fall into.
var noArray = bson.E{Key: "$not", Value: bson.D{{Key: "$type", Value: "array"}}}

// nthStamp is the n-th stamp in (after, before), from the index alone; before and false if there are fewer.
func nthStamp(ctx context.Context, coll *mongo.Collection, after, before bson.Timestamp, n int) (bson.Timestamp, bool, error) {
	within := bson.D{{Key: "$gt", Value: after}, {Key: "$lt", Value: before}}
	for {
		var last struct {
			TS bson.RawValue `bson:"ts"`
		}
		err := coll.FindOne(ctx, bson.D{{Key: "ts", Value: within}}, options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).
			SetSkip(int64(max(n, 1)-1)).SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})).Decode(&last)
		t, i, stamp := last.TS.TimestampOK()
		switch {
		case errors.Is(err, mongo.ErrNoDocuments):
			return before, false, nil
		case err != nil:
			return bson.Timestamp{}, false, err
		case stamp:
			return bson.Timestamp{T: t, I: i}, true, nil
		case len(within) > 2:
			return before, false, nil
		}
		within = append(within, noArray) // reads documents too, so only where it must
	}
}

// PurgeUnstamped removes up to n envelopes without a stamp (0,0, missing, or no timestamp) that were marked as sent before
// then. One that was not marked is never removed: nothing says that it was sent. [RecordSent] gives what it marks a stamp,
// so there are few of them, from elsewhere; all there are are read.
func PurgeUnstamped(ctx context.Context, coll *mongo.Collection, sentBefore time.Time, n int) (Purged, error) {
	filter := unstampedSent(sentBefore)
	cur, err := coll.Find(ctx, filter, options.Find().SetLimit(int64(max(n, 1))).SetProjection(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return Purged{}, mongodb.DescribeRefusal(err, "looking for what to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	var found []struct {
		ID bson.RawValue `bson:"_id"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return Purged{}, fmt.Errorf("looking for what to purge of %s: %w", mongodb.Namespace(coll), err)
	}
	if len(found) == 0 {
		return Purged{}, nil
	}
	ids := make([]bson.RawValue, len(found))
	for i, f := range found {
		ids[i] = f.ID
	}
	res, err := mongodb.Majority(coll).DeleteMany(ctx, append(filter, bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}))
	if err != nil {
		return Purged{}, mongodb.DescribeRefusal(err, "purging "+mongodb.Namespace(coll), "remove", mongodb.Namespace(coll), "")
	}
	return Purged{Deleted: res.DeletedCount, More: len(found) == n && res.DeletedCount > 0}, nil
}

// unstampedSent finds those on both sides of all stamps in the order of BSON, by the index on ts.
func unstampedSent(before time.Time) bson.D {
	side := func(op string, t bson.Timestamp) bson.D {
		return bson.D{{Key: "$expr", Value: bson.D{{Key: op, Value: bson.A{"$ts", t}}}}}
	}
	return outboxes.Healthy(
		bson.E{Key: "sentAt", Value: bson.D{{Key: "$lt", Value: before}}},
		bson.E{Key: "$or", Value: bson.A{side("$lte", bson.Timestamp{}), side("$gt", bson.Timestamp{T: math.MaxUint32, I: math.MaxUint32})}},
	)
}
