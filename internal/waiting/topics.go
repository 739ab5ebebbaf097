package waiting

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// WaitingTopic is what waits for one topic in one collection. An envelope that waits for several topics counts for each.
type WaitingTopic struct {
	NS                     string
	Topic                  string // "" where the envelopes do not say
	Retry, Blocked, Parked int64
	Keys                   int64     // ordering keys that have any
	Oldest                 time.Time // when the oldest one was committed; zero if unknown
}

// CountWaiting counts what waits in coll by topic. It reads every exception of it, and nothing else.
func CountWaiting(ctx context.Context, coll *mongo.Collection) ([]WaitingTopic, error) {
	ns := mongodb.Namespace(coll)
	in := func(state string) bson.E {
		return bson.E{Key: state, Value: bson.D{{Key: "$sum", Value: bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$eq", Value: bson.A{"$state", state}}}, int64(1), int64(0)}}}}}}
	}
	sum := func(field string) bson.E {
		return bson.E{Key: field, Value: bson.D{{Key: "$sum", Value: "$" + field}}}
	}
	oldest := bson.E{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}}
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: outboxes.IsException()}},
		{{Key: "$unwind", Value: bson.D{{Key: "path", Value: "$pending"}, {Key: "preserveNullAndEmptyArrays", Value: true}}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "topic", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$pending", ""}}}}, {Key: "key", Value: "$key"}}},
			in("retry"), in("blocked"), in("parked"), oldest,
		}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: "$_id.topic"},
			sum("retry"), sum("blocked"), sum("parked"), oldest,
			{Key: "keys", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "counting exceptions of "+ns, "find", ns, "")
	}
	var rows []struct {
		Topic                        string `bson:"_id"`
		Retry, Blocked, Parked, Keys int64
		Pos                          bson.RawValue `bson:"pos"`
	}
	if err := cur.All(ctx, &rows); err != nil {
		return nil, fmt.Errorf("counting exceptions of %s: %w", ns, err)
	}
	out := make([]WaitingTopic, len(rows))
	for i, r := range rows {
		pos, _ := r.Pos.StringValueOK()
		out[i] = WaitingTopic{NS: ns, Topic: r.Topic, Retry: r.Retry, Blocked: r.Blocked, Parked: r.Parked, Keys: r.Keys, Oldest: timeOf(pos)}
	}
	return out, nil
}
