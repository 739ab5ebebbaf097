package waiting

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// MaxFailed is how many failed envelopes a list has at most.
const MaxFailed = 100

// ExceptionCount is how many envelopes of a collection wait in one state for one topic. One that waits for several topics
// counts for each.
type ExceptionCount struct {
	NS     string
	State  string // retry, blocked, parked, or scheduled
	Topic  string // "" where the envelope does not say
	N      int64
	Oldest time.Time // when the oldest one was committed; of scheduled ones, when the first is due; zero if unknown
}

// CountExceptions counts what waits in coll. It reads every exception of it, and an index entry for each scheduled one.
func CountExceptions(ctx context.Context, coll *mongo.Collection, p slot.Range) ([]ExceptionCount, error) {
	ns := mongodb.Namespace(coll)
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: p.AddFilter(outboxes.IsException())}},
		{{Key: "$unwind", Value: bson.D{{Key: "path", Value: "$pending"}, {Key: "preserveNullAndEmptyArrays", Value: true}}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "state", Value: "$state"}, {Key: "topic", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$pending", ""}}}}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "counting exceptions of "+ns, "find", ns, "")
	}
	var rows []struct {
		ID struct {
			State string `bson:"state"`
			Topic string `bson:"topic"`
		} `bson:"_id"`
		N   int64         `bson:"n"`
		Pos bson.RawValue `bson:"pos"`
	}
	if err := cur.All(ctx, &rows); err != nil {
		return nil, fmt.Errorf("counting exceptions of %s: %w", ns, err)
	}
	out := make([]ExceptionCount, 0, len(rows)+1)
	for _, r := range rows {
		pos, _ := r.Pos.StringValueOK()
		out = append(out, ExceptionCount{NS: ns, State: r.ID.State, Topic: r.ID.Topic, N: r.N, Oldest: timeOf(pos)})
	}
	return countScheduled(ctx, coll, p, out)
}

func countScheduled(ctx context.Context, coll *mongo.Collection, p slot.Range, out []ExceptionCount) ([]ExceptionCount, error) {
	ns := mongodb.Namespace(coll)
	scheduled := p.AddFilter(outboxes.IsScheduled())
	n, err := coll.CountDocuments(ctx, scheduled)
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "counting scheduled envelopes of "+ns, "find", ns, "")
	}
	if n == 0 {
		return out, nil
	}
	var first struct {
		DueAt time.Time `bson:"dueAt"`
	}
	_ = coll.FindOne(ctx, scheduled, options.FindOne().SetSort(bson.D{{Key: "dueAt", Value: 1}}).
		SetProjection(bson.D{{Key: "dueAt", Value: 1}})).Decode(&first) // it may have gone meanwhile
	return append(out, ExceptionCount{NS: ns, State: "scheduled", N: n, Oldest: first.DueAt}), nil
}

// timeOf is the second that a position begins with; zero if it has none.
func timeOf(pos string) time.Time {
	if len(pos) < 10 {
		return time.Time{}
	}
	sec, err := strconv.ParseUint(pos[2:10], 16, 32)
	if err != nil {
		return time.Time{}
	}
	return time.Unix(int64(sec), 0)
}

// Failed is an envelope that was refused for its own reason, and will be tried again.
type Failed struct {
	ID        bson.RawValue `bson:"_id"`
	Type      string        `bson:"type"`
	Key       bson.RawValue `bson:"key"`
	Attempts  int32         `bson:"attempts"`
	NextAt    time.Time     `bson:"nextAt"`
	Pending   []string      `bson:"pending"`
	Delivery  int32         `bson:"delivery"`
	LastError struct {
		Class  string    `bson:"class"`
		Reason string    `bson:"reason"`
		Topic  string    `bson:"topic"`
		At     time.Time `bson:"at"`
	} `bson:"lastError"`
}

// failed are the envelopes that an attempt was spent on.
func failed(and ...bson.E) bson.D {
	return append(bson.D{{Key: "state", Value: "retry"}, {Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}, and...)
}

// ListFailed are up to limit failed envelopes of coll, those that failed last first. limit is at most [MaxFailed]; 0 is that.
func ListFailed(ctx context.Context, coll *mongo.Collection, limit int) ([]Failed, error) {
	if limit <= 0 || limit > MaxFailed {
		limit = MaxFailed
	}
	cur, err := mongodb.Majority(coll).Find(ctx, failed(), options.Find().SetLimit(int64(limit)).SetAllowDiskUse(true).
		SetSort(bson.D{{Key: "lastError.at", Value: -1}, {Key: "_id", Value: -1}}).SetProjection(bson.D{
		{Key: "type", Value: 1},
		{Key: "key", Value: 1},
		{Key: "attempts", Value: 1},
		{Key: "nextAt", Value: 1},
		{Key: "pending", Value: 1},
		{Key: "delivery", Value: 1},
		{Key: "lastError", Value: 1},
	}))
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "listing failed envelopes of "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll), "")
	}
	out := []Failed{}
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("listing failed envelopes of %s: %w", mongodb.Namespace(coll), err)
	}
	return out, nil
}

// ResetFailed clears the count of attempts and the error of those of ids that failed, and makes them due now; it returns how
// many they were. It leaves all others alone, so an envelope that is blocked, parked or sent meanwhile stays what it is. Their history
// is kept. Call it within [mongodb.Foreign], with the client of the transaction, for at most [MaxExceptions] ids at a time.
func ResetFailed(tx context.Context, coll *mongo.Collection, ids []bson.RawValue) (int64, error) {
	return makeDue(tx, coll, ids, bson.D{{Key: "attempts", Value: int32(0)}, {Key: "nextAt", Value: "$$NOW"}}, bson.A{"lastError"})
}

// HurryFailed makes those of ids that failed due now, with their count as it is: what a person does who wants one batch to be
// processed at once. Otherwise as [ResetFailed].
func HurryFailed(tx context.Context, coll *mongo.Collection, ids []bson.RawValue) (int64, error) {
	return makeDue(tx, coll, ids, bson.D{{Key: "nextAt", Value: "$$NOW"}}, nil)
}

func makeDue(tx context.Context, coll *mongo.Collection, ids []bson.RawValue, set bson.D, unset bson.A) (int64, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	update := mongo.Pipeline{{{Key: "$set", Value: set}}}
	if unset != nil {
		update = append(update, bson.D{{Key: "$unset", Value: unset}})
	}
	res, err := coll.UpdateMany(tx, failed(bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: slices.Clone(ids)}}}), update)
	if err != nil {
		return 0, mongodb.DescribeRefusal(err, "resetting failed envelopes of "+mongodb.Namespace(coll), "update", mongodb.Namespace(coll), "")
	}
	return res.MatchedCount, nil
}
