package waiting

import (
	"context"
	"math"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// MaxFailed is how many failed envelopes a list has at most.
const MaxFailed = 100

// ExceptionCount is how many envelopes of a collection wait in one state for one topic. An envelope that waits for
// several topics counts for each.
type ExceptionCount struct {
	State  string // retry, blocked, parked, or scheduled
	Topic  string // "" if the envelope has none
	N      int64
	Oldest time.Time // when the oldest one was committed; of scheduled ones, when the first is due; zero if unknown
}

// CountExceptions counts the waiting envelopes of coll. It reads every exception of coll, and an index entry for each
// scheduled envelope.
func CountExceptions(ctx context.Context, coll *mongo.Collection, p slot.Range) ([]ExceptionCount, error) {
	type row struct {
		ID struct {
			State string `bson:"state"`
			Topic string `bson:"topic"`
		} `bson:"_id"`
		N   int64         `bson:"n"`
		Pos bson.RawValue `bson:"pos"`
	}
	rows, err := mongodb.AggregateAll[row](ctx, coll, "counting exceptions of "+mongodb.Namespace(coll), mongo.Pipeline{
		{{Key: "$match", Value: p.AddFilter(outboxes.IsException())}},
		// An exception that lists no topics counts for the topic "".
		{{Key: "$unwind", Value: bson.D{{Key: "path", Value: "$pending"}, {Key: "preserveNullAndEmptyArrays", Value: true}}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "state", Value: "$state"}, {Key: "topic", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$pending", ""}}}}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, err
	}

	out := make([]ExceptionCount, 0, len(rows)+1)
	for _, r := range rows {
		pos, _ := r.Pos.StringValueOK()
		out = append(out, ExceptionCount{State: r.ID.State, Topic: r.ID.Topic, N: r.N, Oldest: timeOf(pos)})
	}

	scheduled, first, err := outboxes.CountDue(ctx, coll, p, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	if scheduled > 0 {
		out = append(out, ExceptionCount{State: "scheduled", N: scheduled, Oldest: first})
	}
	return out, nil
}

// timeOf returns the time in a position, in seconds, or zero if it has none.
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

// filterFailed returns a filter for the envelopes that have failed at least once and are retried.
func filterFailed(and ...bson.E) bson.D {
	return append(bson.D{{Key: "state", Value: "retry"}, {Key: "attempts", Value: bson.D{{Key: "$gt", Value: 0}}}}, and...)
}

// ListFailed returns up to limit failed envelopes of coll, the latest failures first. limit is at most [MaxFailed],
// which is also the default for 0. m reads the documents.
func ListFailed(ctx context.Context, coll *mongo.Collection, m *envelope.Mapping, limit int) ([]Failed, error) {
	if limit <= 0 || limit > MaxFailed {
		limit = MaxFailed
	}
	fields := m.Project("type", "attempts", "nextAt", "pending", "delivery", "lastError")
	fields = append(fields, bson.E{Key: "key", Value: 1})
	return mongodb.FindAll[Failed](ctx, mongodb.Majority(coll), "listing failed envelopes of "+mongodb.Namespace(coll), filterFailed(),
		options.Find().SetLimit(int64(limit)).SetAllowDiskUse(true).SetProjection(fields).
			SetSort(bson.D{{Key: "lastError.at", Value: -1}, {Key: "_id", Value: -1}}))
}

// ResetFailed clears the count of attempts and the error of the failed envelopes among ids, makes them due now, and
// returns their number. It keeps their history. It does not change other envelopes, for example an envelope that was
// blocked, parked or sent in the meantime. Call it within [mongodb.Foreign], with the client of the transaction, for at most [mongodb.MaxDocuments] ids at a time.
func ResetFailed(tx context.Context, coll *mongo.Collection, ids []bson.RawValue) (int64, error) {
	return makeDue(tx, coll, ids, bson.D{{Key: "attempts", Value: int32(0)}, {Key: "nextAt", Value: "$$NOW"}}, bson.A{"lastError"})
}

// HurryFailed makes the failed envelopes among ids due now and keeps their count of attempts. An operator uses it to
// have one batch processed at once. Otherwise it works like [ResetFailed].
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
	res, err := coll.UpdateMany(tx, filterFailed(bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: slices.Clone(ids)}}}), update)
	if err != nil {
		return 0, mongodb.Refusal(err, "resetting failed envelopes of "+mongodb.Namespace(coll), "update", mongodb.Namespace(coll))
	}
	return res.MatchedCount, nil
}
