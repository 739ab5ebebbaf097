package waiting

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// Lookahead is the time by which an envelope is read from the index before it is due. It is longer
// than the time between two looks at the index.
const Lookahead = time.Second

// MaxClaim is how many scheduled envelopes one fenced transaction claims at most (N3).
const MaxClaim = 1000

// StrayClaims returns the ids of the scheduled envelopes of coll that are due by until and have a claim of epoch or a
// later one. If an owner has just acquired epoch, such claims come from a watcher document that was lost or replaced
// by a backup.
func StrayClaims(ctx context.Context, coll *mongo.Collection, epoch int64, until time.Time, p slot.Range) ([]bson.RawValue, error) {
	var ids []bson.RawValue
	err := mongodb.FindEach(ctx, mongodb.Majority(coll), "looking for claims in "+mongodb.Namespace(coll), p.AddFilter(bson.D{
		{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}},
		{Key: "state", Value: nil},
		{Key: "claim.epoch", Value: bson.D{{Key: "$gte", Value: epoch}}},
	}), func(raw bson.Raw) error {
		ids = append(ids, mongodb.CloneValue(raw.Lookup("_id")))
		return nil
	}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	return ids, err
}

// DisownClaims moves the claims of the envelopes ids to an epoch that is over, so that the owner of epoch can claim the
// envelopes (N19). It uses as many fenced transactions as their number requires. Call it before this owner claims
// anything: until then no claim of such an epoch can be valid, because the fence of its owner would fail. It is
// idempotent.
func DisownClaims(ctx context.Context, f mongodb.Fencer, coll *mongo.Collection, epoch int64, ids []bson.RawValue) error {
	err := mongodb.WriteInParts(ctx, f, ids, mongodb.Parts[bson.RawValue]{Top: MaxClaim, Write: func(tx context.Context, c *mongo.Client, part []bson.RawValue) error {
		_, err := c.Database(coll.Database().Name()).Collection(coll.Name()).UpdateMany(tx, bson.D{
			{Key: "_id", Value: bson.D{{Key: "$in", Value: part}}},
			{Key: "state", Value: nil},
			{Key: "claim.epoch", Value: bson.D{{Key: "$gte", Value: epoch}}},
		}, bson.D{{Key: "$set", Value: bson.D{{Key: "claim.epoch", Value: epoch - 1}}}}, options.UpdateMany().SetHint(outboxes.PickedByID))
		return mongodb.Refusal(err, "disowning claims of "+mongodb.Namespace(coll), "update", mongodb.Namespace(coll))
	}})
	if err != nil {
		return fmt.Errorf("disowning %d claims: %w", len(ids), err)
	}
	return nil
}
