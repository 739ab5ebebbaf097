package purge

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Purged is the result of one statement.
type Purged struct {
	Deleted int64
	Upto    bson.Timestamp // the statement covered everything up to this stamp; the next one begins after it
	More    bool           // there may be more before the cut
}

// PurgeBatch removes about n envelopes with stamps after start and before the cut, the oldest first. It removes all envelopes
// that share the last stamp, so it may remove more. It leaves out scheduled envelopes, so it may remove fewer, or none.
//
// It reads the n-th stamp from the index on ts and deletes the range up to this stamp. That costs the server less than a
// list of n ids. The deletion contains the conditions of the purge itself. The deletion waits for the majority, so the deletions do not delay the majority
// writes of services.
func PurgeBatch(ctx context.Context, coll *mongo.Collection, start bson.Timestamp, cut Cut, n int) (Purged, error) {
	upto, more, err := readNthStamp(ctx, coll, start, cut.Before, n)
	if err != nil {
		return Purged{}, mongodb.DescribeError(err, "looking for envelopes to purge of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}

	// The range does not contain the cut itself. Every other bound is a stamp below the cut, and belongs to the range.
	bound := "$lte"
	if !more {
		bound = "$lt"
	}
	within := envelope.Stamped(bson.E{Key: "$gt", Value: start}, bson.E{Key: bound, Value: upto})
	deleted, err := cut.deleteMany(ctx, coll, outboxes.WithoutDueAt(within), nil)
	if err != nil {
		return Purged{}, err
	}
	return Purged{Deleted: deleted, Upto: upto, More: more}, nil
}

// deleteMany removes the documents that match, and returns their number. hint is the name of an index, or nil.
func (c Cut) deleteMany(ctx context.Context, coll *mongo.Collection, filter bson.D, hint any) (int64, error) {
	statement := bson.D{{Key: "q", Value: filter}, {Key: "limit", Value: 0}}
	if hint != nil {
		statement = append(statement, bson.E{Key: "hint", Value: hint})
	}
	ns := mongodb.Namespace(coll)
	deleted, err := c.runWrite(ctx, coll, bson.D{{Key: "delete", Value: coll.Name()}, {Key: "deletes", Value: bson.A{statement}}})
	return deleted, mongodb.DescribeError(err, "purging "+ns, "remove", ns)
}

// runWrite runs a delete or update command with the majority write concern, and returns how many documents it has found. A rename may give the
// name to another collection at any time, whose envelopes are not delivered. So the server compares the UUID (N25): the error is then a
// [*HeldError].
func (c Cut) runWrite(ctx context.Context, coll *mongo.Collection, command bson.D) (int64, error) {
	command = append(command, concern.MajorityOfCommand())
	if c.UUID != [16]byte{} {
		command = append(command, mongodb.OnlyIn(c.UUID))
	}

	var result struct {
		N int64 `bson:"n"`
	}
	err := coll.Database().RunCommand(ctx, command).Decode(&result)
	if mongodb.HasCode(err, mongodb.CodeCollectionUUIDMismatch) {
		return 0, &HeldError{NS: mongodb.Namespace(coll), Hold: HoldReplaced}
	}
	return result.N, err
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
