package waiting

import (
	"context"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Count is how many envelopes of an outbox wait for one reason and one topic. An envelope that waits for several topics counts
// for each.
type Count struct {
	NS     string
	Reason Reason
	Topic  string // "" if the envelopes do not list their topics
	N      int64
	Oldest time.Time // commit time of the oldest one; zero if unknown
}

// CountGroups counts the matching envelopes by outbox, reason and topic. The server reads only the index.
func CountGroups(ctx context.Context, coll *mongo.Collection, query Query) ([]Count, error) {
	type row struct {
		ID struct {
			NS     string `bson:"ns"`
			Reason Reason `bson:"reason"`
			Topic  string `bson:"topic"`
		} `bson:"_id"`
		N   int64  `bson:"n"`
		Pos string `bson:"pos"`
	}
	rows, err := mongodb.AggregateAll[row](ctx, mongodb.Majority(coll), "counting waiting envelopes", mongo.Pipeline{
		{{Key: "$match", Value: query.filter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "ns", Value: "$ns"}, {Key: "reason", Value: "$reason"}, {Key: "topics", Value: "$topics"}}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}},
		}}},
		{{Key: "$set", Value: bson.D{{Key: "topic", Value: bson.D{{Key: "$split", Value: bson.A{"$_id.topics", ","}}}}}}},
		{{Key: "$unwind", Value: "$topic"}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{
				{Key: "ns", Value: "$_id.ns"},
				{Key: "reason", Value: "$_id.reason"},
				{Key: "topic", Value: "$topic"},
			}},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: "$n"}}},
			{Key: "pos", Value: bson.D{{Key: "$min", Value: "$pos"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, err
	}

	out := make([]Count, len(rows))
	for i, r := range rows {
		out[i] = Count{NS: r.ID.NS, Reason: r.ID.Reason, Topic: r.ID.Topic, N: r.N, Oldest: readTime(r.Pos)}
	}
	return out, nil
}

// readTime returns the time in a position, in seconds, or zero if it has none.
func readTime(pos string) time.Time {
	if len(pos) < 10 {
		return time.Time{}
	}
	sec, err := strconv.ParseUint(pos[2:10], 16, 32)
	if err != nil || sec == 0 {
		return time.Time{}
	}
	return time.Unix(int64(sec), 0)
}
