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
	"github.com/outrelay/outrelay/internal/waiting"
)

// DueClaim is the mark of an owner on the scheduled envelopes that it has claimed (N19). An owner uses one token for its
// whole term, so it can repeat its own claims. No other owner can claim these envelopes before its epoch is over.
type DueClaim struct {
	Token string
	Epoch int64
}

// Due are scheduled envelopes of one collection by id.
type Due struct {
	Coll *mongo.Collection
	IDs  []bson.RawValue
	Have int64 // how many of them bear the claim, after ClaimDue
}

// Ahead is a scheduled envelope that was found in the index: what a timer needs of it.
type Ahead struct {
	ID    bson.RawValue `bson:"_id"`
	DueAt bson.DateTime `bson:"dueAt"`
}

// free returns the condition for an envelope that this owner can claim. N19: the envelope has no claim, or a claim of an
// owner whose epoch is over, or a claim of this owner. An envelope with a state is no longer scheduled.
func (c DueClaim) free(and ...bson.E) bson.D {
	return c.claimed(and, bson.D{{Key: "claim.token", Value: c.Token}})
}

// unheld is like free, but excludes the envelopes that this owner has already claimed.
func (c DueClaim) unheld(and ...bson.E) bson.D {
	return c.claimed(and)
}

func (c DueClaim) claimed(and bson.D, or ...any) bson.D {
	by := append(bson.A{bson.D{{Key: "claim", Value: nil}}, bson.D{{Key: "claim.epoch", Value: bson.D{{Key: "$lt", Value: c.Epoch}}}}}, or...)
	return append(and, bson.E{Key: "state", Value: nil}, bson.E{Key: "$or", Value: by})
}

// ScheduledUntil opens a cursor over the scheduled envelopes of coll that are due by until and that this owner can have and
// has not yet, in the order in which they are due; decode them as [Ahead]. Its replies have up to batch documents.
func ScheduledUntil(ctx context.Context, coll *mongo.Collection, c DueClaim, until time.Time, batch int32, p slot.Range) (*mongo.Cursor, error) {
	cur, err := mongodb.Majority(coll).Find(ctx, // N21
		p.AddFilter(c.unheld(bson.E{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}})),
		options.Find().SetProjection(ahead).SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetBatchSize(batch).SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "looking for scheduled envelopes in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	return cur, nil
}

// ScheduledAfter are the next scheduled envelopes of coll that are due after that time, in the order in which they are due.
// None means that the collection holds nothing that is still ahead.
func ScheduledAfter(ctx context.Context, coll *mongo.Collection, after time.Time, limit int64, p slot.Range) ([]Ahead, error) {
	later := bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gt", Value: bson.NewDateTimeFromTime(after)}}}, {Key: "state", Value: nil}}
	return mongodb.FindAll[Ahead](ctx, mongodb.Majority(coll), "looking ahead in "+mongodb.Namespace(coll), p.AddFilter(later),
		options.Find().SetProjection(ahead).SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetLimit(limit))
}

var ahead = bson.D{{Key: "_id", Value: 1}, {Key: "dueAt", Value: 1}}

// ClaimDue marks those of the envelopes that are due by the server's clock and free, in one transaction that commits only
// while the caller owns the watcher (N3), and counts in each group how many now bear the claim; the namespaces are entered
// in `dirty` with it. All groups together have at most [waiting.MaxClaim] ids. After that, only the owner or one with a later epoch
// changes them. now is the server's time as the caller knows it, for people to read. Where the server is too slow for so many it is
// [mongodb.ErrSlow], and nothing is claimed.
func ClaimDue(ctx context.Context, f mongodb.Fencer, c DueClaim, now time.Time, groups []Due) error {
	dirty := make([]string, len(groups))
	n := 0
	for i, g := range groups {
		dirty[i] = mongodb.Namespace(g.Coll)
		n += len(g.IDs)
	}
	if n > waiting.MaxClaim {
		return fmt.Errorf("claiming %d scheduled envelopes at once; %d is the most", n, waiting.MaxClaim)
	}

	set := bson.D{{Key: "$set", Value: bson.D{{Key: "claim", Value: bson.D{
		{Key: "token", Value: c.Token},
		{Key: "epoch", Value: c.Epoch},
		{Key: "at", Value: bson.NewDateTimeFromTime(now)},
	}}}}}
	return mongodb.FencedSoon(ctx, f, dirty, n, func(ctx context.Context) error {
		fenced := mongo.SessionFromContext(ctx).Client()
		for i, g := range groups {
			coll := fenced.Database(g.Coll.Database().Name()).Collection(g.Coll.Name())
			res, err := coll.UpdateMany(ctx, c.free(
				bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: g.IDs}}},
				bson.E{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
				bson.E{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$dueAt", "$$NOW"}}}},
			), set, options.UpdateMany().SetHint(outboxes.PickedByID))
			if err != nil {
				return mongodb.Refusal(err, "claiming scheduled envelopes of "+mongodb.Namespace(g.Coll), "update", mongodb.Namespace(g.Coll))
			}
			groups[i].Have = res.MatchedCount
		}
		return nil
	})
}

// ReadClaimed hands those of the envelopes that bear the claim to take, in no order; the bytes are valid during the call
// only. batch bounds the documents of a reply. An error of take ends it and is returned. It returns how many there were.
//
// The read is of majority-committed data (N21) and sees everything up to at, a time of the cluster, if at is not zero.
func ReadClaimed(ctx context.Context, g Due, c DueClaim, at bson.Timestamp, batch int32, take func(bson.Raw) error) (n int64, err error) {
	if !at.IsZero() {
		sess, err := mongodb.Causal(ctx, g.Coll.Database().Client(), at)
		if err != nil {
			return 0, fmt.Errorf("reading claimed envelopes: %w", err)
		}
		defer sess.EndSession(context.WithoutCancel(ctx))
		ctx = mongo.NewSessionContext(ctx, sess)
	}

	err = mongodb.FindEach(ctx, mongodb.Majority(g.Coll), "reading claimed envelopes of "+mongodb.Namespace(g.Coll), bson.D{ // N21
		{Key: "_id", Value: bson.D{{Key: "$in", Value: g.IDs}}}, {Key: "claim.token", Value: c.Token},
	}, func(raw bson.Raw) error {
		n++
		return take(raw)
	}, options.Find().SetBatchSize(batch))
	return n, err
}
