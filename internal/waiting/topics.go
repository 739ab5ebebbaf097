package waiting

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
)

// Topic counts the exceptions of one collection that wait for one topic. An envelope that waits for several topics
// counts for each.
type Topic struct {
	NS                     string
	Topic                  string // "" if the envelopes do not list their topics
	Retry, Blocked, Parked int64
	Keys                   int64     // ordering keys with such envelopes
	Oldest                 time.Time // commit time of the oldest envelope; zero if unknown
}

// CountWaiting counts the exceptions of coll by topic. It reads every exception of coll, and nothing else.
func CountWaiting(ctx context.Context, coll *mongo.Collection) ([]Topic, error) {
	ns := mongodb.Namespace(coll)
	countState := func(state string) bson.E {
		is := bson.D{{Key: "$eq", Value: bson.A{"$state", state}}}
		one := bson.D{{Key: "$cond", Value: bson.A{is, int64(1), int64(0)}}}
		return bson.E{Key: state, Value: bson.D{{Key: "$sum", Value: one}}}
	}
	sum := func(field string) bson.E {
		return bson.E{Key: field, Value: bson.D{{Key: "$sum", Value: "$" + field}}}
	}
	oldest := bson.E{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}}

	// The first group is per topic and key, so that the second one can count the keys.
	type row struct {
		Topic                        string `bson:"_id"`
		Retry, Blocked, Parked, Keys int64
		Pos                          bson.RawValue `bson:"pos"`
	}
	rows, err := mongodb.AggregateAll[row](ctx, coll, "counting exceptions of "+ns, mongo.Pipeline{
		{{Key: "$match", Value: outboxes.IsException()}},
		{{Key: "$unwind", Value: bson.D{{Key: "path", Value: "$pending"}, {Key: "preserveNullAndEmptyArrays", Value: true}}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "topic", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$pending", ""}}}}, {Key: "key", Value: "$key"}}},
			countState("retry"), countState("blocked"), countState("parked"), oldest,
		}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: "$_id.topic"},
			sum("retry"), sum("blocked"), sum("parked"), oldest,
			{Key: "keys", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, err
	}

	out := make([]Topic, len(rows))
	for i, r := range rows {
		pos, _ := r.Pos.StringValueOK()
		out[i] = Topic{NS: ns, Topic: r.Topic, Retry: r.Retry, Blocked: r.Blocked, Parked: r.Parked, Keys: r.Keys, Oldest: timeOf(pos)}
	}
	return out, nil
}
