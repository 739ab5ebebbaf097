package scheduled

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
	"github.com/outrelay/outrelay/internal/waiting"
)

// DisownStrayClaims removes claims of this epoch or a later one from scheduled envelopes. Call it at a takeover, before
// Run. Such claims belong to an earlier watcher document of the same name, which was lost or replaced by a backup, so the
// epochs have started again since. Without DisownStrayClaims, no owner would ever send these envelopes (N19).
func (s *Scheduled) DisownStrayClaims(ctx context.Context) error {
	for _, o := range s.Collections() {
		coll := mongodb.Database(s.Client, o.DB).Collection(o.Coll)
		ids, err := findStrayClaims(ctx, coll, s.Epoch, s.Now().Add(waiting.ClaimedAhead), s.Slot)
		if err != nil {
			return err
		}
		if len(ids) == 0 {
			continue
		}

		if err := disownClaims(ctx, s.Fencer, coll, s.Epoch, ids); err != nil {
			return err
		}
		s.Log.Warn("scheduled envelopes have claims of a deleted watcher document; sending them now",
			"collection", o.NS(), "envelopes", len(ids))
	}
	return nil
}

// findStrayClaims returns the ids of the scheduled envelopes of coll that are due by until and have a claim of epoch or a
// later one.
func findStrayClaims(
	ctx context.Context, coll *mongo.Collection, epoch int64, until time.Time, p slot.Range,
) ([]bson.RawValue, error) {
	stray := p.AddFilter(bson.D{
		{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}},
		{Key: "state", Value: nil},
		{Key: "claim.epoch", Value: bson.D{{Key: "$gte", Value: epoch}}},
	})

	var ids []bson.RawValue
	err := mongodb.FindEach(ctx, mongodb.Majority(coll), "looking for claims in "+mongodb.Namespace(coll), stray,
		func(raw bson.Raw) error {
			ids = append(ids, mongodb.CloneValue(raw.Lookup("_id")))
			return nil
		}, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}))
	return ids, err
}

// disownClaims moves the claims of the envelopes ids to an epoch that is over, so that the owner of epoch can claim the
// envelopes (N19). It uses as many fenced transactions as their number requires. Until this owner claims anything, no
// claim of such an epoch can be valid, because the fence of its owner would fail. disownClaims is idempotent.
func disownClaims(ctx context.Context, f mongodb.Fencer, coll *mongo.Collection, epoch int64, ids []bson.RawValue) error {
	write := func(tx context.Context, c *mongo.Client, part []bson.RawValue) error {
		fenced := c.Database(coll.Database().Name()).Collection(coll.Name())
		_, err := fenced.UpdateMany(tx, bson.D{
			{Key: "_id", Value: bson.D{{Key: "$in", Value: part}}},
			{Key: "state", Value: nil},
			{Key: "claim.epoch", Value: bson.D{{Key: "$gte", Value: epoch}}},
		}, bson.D{{Key: "$set", Value: bson.D{{Key: "claim.epoch", Value: epoch - 1}}}},
			options.UpdateMany().SetHint(outboxes.PickedByID))
		return mongodb.Refusal(err, "updating claims of "+mongodb.Namespace(coll), "update", mongodb.Namespace(coll))
	}
	return mongodb.WriteInParts(ctx, f, ids, mongodb.Parts[bson.RawValue]{Doing: "disowning claims", Write: write})
}
