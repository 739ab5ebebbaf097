package scheduled

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

// maxClaim is how many scheduled envelopes one fenced transaction claims at most (N3).
const maxClaim = 1000

// dueClaim is the mark of an owner on the scheduled envelopes that it has claimed (N19). An owner uses one token for its
// whole term, so it can repeat its own claims. No other owner can claim these envelopes before its epoch is over.
type dueClaim struct {
	Token string
	Epoch int64
}

// filterClaimable returns the condition for an envelope that this owner can claim. N19: the envelope has no claim, or a claim of an
// owner whose epoch is over, or a claim of this owner. An envelope with a state is no longer scheduled.
func (c dueClaim) filterClaimable(and ...bson.E) bson.D {
	return c.claimCondition(and, bson.D{{Key: "claim.token", Value: c.Token}})
}

// filterUnclaimed is like filterClaimable, but excludes the envelopes that this owner has already claimed.
func (c dueClaim) filterUnclaimed(and ...bson.E) bson.D {
	return c.claimCondition(and)
}

func (c dueClaim) claimCondition(and bson.D, or ...any) bson.D {
	by := append(bson.A{bson.D{{Key: "claim", Value: nil}}, bson.D{{Key: "claim.epoch", Value: bson.D{{Key: "$lt", Value: c.Epoch}}}}}, or...)
	return append(and, bson.E{Key: "state", Value: nil}, bson.E{Key: "$or", Value: by})
}

// scheduledUntil opens a cursor over the scheduled envelopes of coll that are due by until and that this owner can claim and
// has not claimed yet, in the order of their due times. They have `_id` and `dueAt`. Its replies have up to batch documents.
func scheduledUntil(ctx context.Context, coll *mongo.Collection, c dueClaim, until time.Time, batch int32, p slot.Range) (*mongo.Cursor, error) {
	cur, err := mongodb.Majority(coll).Find(ctx, // N21
		p.AddFilter(c.filterUnclaimed(bson.E{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}})),
		options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}, {Key: "dueAt", Value: 1}}).SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetBatchSize(batch).SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "looking for scheduled envelopes in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	return cur, nil
}

// claimGroups claims the envelopes that are due by the server's clock and can be claimed, and sets have of each group. It
// uses one transaction, which commits only while the caller owns the watcher (N3) and adds the namespaces to `dirty`. All
// groups together have at most [maxClaim] ids. After that, only this owner or one with a later epoch changes the
// envelopes. now is the server's time as the caller estimates it, and is stored for operators. If the server is too slow
// for so many, the error is [mongodb.ErrSlow], and nothing is claimed.
func claimGroups(ctx context.Context, f mongodb.Fencer, c dueClaim, now time.Time, groups []*claimGroup) error {
	dirty := make([]string, len(groups))
	n := 0
	for i, g := range groups {
		dirty[i] = mongodb.Namespace(g.coll)
		n += len(g.ids)
	}
	if n > maxClaim {
		return fmt.Errorf("claiming %d scheduled envelopes at once; %d is the most", n, maxClaim)
	}

	set := bson.D{{Key: "$set", Value: bson.D{{Key: "claim", Value: bson.D{
		{Key: "token", Value: c.Token},
		{Key: "epoch", Value: c.Epoch},
		{Key: "at", Value: bson.NewDateTimeFromTime(now)},
	}}}}}
	return f.Fenced(ctx, dirty, mongodb.LimitRuns(n, func(ctx context.Context) error {
		fenced := mongo.SessionFromContext(ctx).Client()
		for _, g := range groups {
			coll := mongodb.Database(fenced, g.coll.Database().Name()).Collection(g.coll.Name())
			res, err := coll.UpdateMany(ctx, c.filterClaimable(
				bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: g.ids}}},
				// $expr compares across types, where a number or null is less than any time.
				bson.E{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
				bson.E{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$dueAt", "$$NOW"}}}},
			), set, options.UpdateMany().SetHint(outboxes.PickedByID))
			if err != nil {
				return mongodb.Refusal(err, "claiming scheduled envelopes of "+mongodb.Namespace(g.coll), "update", mongodb.Namespace(g.coll))
			}
			g.have = res.MatchedCount
		}
		return nil
	}))
}

// readClaimed calls take for each of the envelopes that has the claim, in no order, and returns their number. The bytes are
// valid only during the call. batch bounds the documents of a reply. An error of take ends the read and is returned.
//
// readClaimed reads majority-committed data (N21). If at is not zero, it sees everything up to this cluster time.
func readClaimed(ctx context.Context, g claimGroup, c dueClaim, at bson.Timestamp, batch int32, take func(bson.Raw) error) (n int64, err error) {
	if !at.IsZero() {
		sess, err := mongodb.Causal(ctx, g.coll.Database().Client(), at)
		if err != nil {
			return 0, fmt.Errorf("reading claimed envelopes: %w", err)
		}
		defer sess.EndSession(context.WithoutCancel(ctx))
		ctx = mongo.NewSessionContext(ctx, sess)
	}

	err = mongodb.FindEach(ctx, mongodb.Majority(g.coll), "reading claimed envelopes of "+mongodb.Namespace(g.coll), bson.D{ // N21
		{Key: "_id", Value: bson.D{{Key: "$in", Value: g.ids}}}, {Key: "claim.token", Value: c.Token},
	}, func(raw bson.Raw) error {
		n++
		return take(raw)
	}, options.Find().SetBatchSize(batch))
	return n, err
}
