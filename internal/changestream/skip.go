package changestream

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/changes"
	"github.com/outrelay/outrelay/resume"
)

// skipStages returns the stages that leave out the events, one for each: MongoDB 6.0 cannot optimize a $nor of several. They are no
// part of the hash of the pipeline: the tokens stay valid.
func skipStages(list []changes.Skip) (stages []bson.D) {
	for _, s := range list {
		skipped := bson.D{
			{Key: "operationType", Value: "insert"},
			{Key: "ns.db", Value: s.DB},
			{Key: "ns.coll", Value: s.Coll},
			{Key: "documentKey._id", Value: s.ID},
			{Key: "clusterTime", Value: bson.D{{Key: "$lte", Value: s.Until}}},
		}
		stages = append(stages, bson.D{{Key: "$match", Value: bson.D{{Key: "$nor", Value: bson.A{skipped}}}}})
	}
	return stages
}

// NextInsert returns the first insert of the scope after the position, without its document. It is for an operator who looks for
// the event at which a stream stands. The error is [changes.ErrNoEvent] if there is none, or if the server cannot return it.
func NextInsert(ctx context.Context, client *mongo.Client, scope *changes.Scope, at resume.Position) (changes.Skip, error) {
	opts := options.ChangeStream().SetMaxAwaitTime(defaultPace.maxAwait)
	switch ts, ok := at.Time(); {
	case !at.Token.IsZero():
		opts.SetStartAfter(bson.Raw(at.Token))
	case ok:
		opts.SetStartAtOperationTime(&ts)
	default:
		return changes.Skip{}, fmt.Errorf("%w: the watcher has no position", changes.ErrNoEvent)
	}

	// The document may be the reason why the server cannot return the event.
	pipeline := append(scope.Pipeline(), bson.D{{Key: "$match", Value: bson.D{{Key: "operationType", Value: "insert"}}}},
		bson.D{{Key: "$project", Value: bson.D{{Key: "ns", Value: 1}, {Key: "documentKey", Value: 1}, {Key: "clusterTime", Value: 1}}}})
	stream, err := scope.Watch(ctx, client, nil, pipeline, opts)
	if err != nil {
		return changes.Skip{}, fmt.Errorf("%w: %w", changes.ErrNoEvent, err)
	}
	defer stream.Close(context.WithoutCancel(ctx))

	// The first reply may be empty although there is an event.
	for range emptyReplies {
		if !stream.TryNext(ctx) {
			if err := stream.Err(); err != nil {
				return changes.Skip{}, fmt.Errorf("%w: %w", changes.ErrNoEvent, err)
			}
			continue
		}
		var ev struct {
			NS struct {
				DB   string `bson:"db"`
				Coll string `bson:"coll"`
			} `bson:"ns"`
			Key struct {
				ID bson.RawValue `bson:"_id"`
			} `bson:"documentKey"`
			At bson.Timestamp `bson:"clusterTime"`
		}
		if err := stream.Decode(&ev); err != nil {
			return changes.Skip{}, fmt.Errorf("%w: %w", changes.ErrNoEvent, err)
		}
		return changes.Skip{DB: ev.NS.DB, Coll: ev.NS.Coll, ID: ev.Key.ID, Until: ev.At}, nil
	}
	return changes.Skip{}, fmt.Errorf("%w: no event follows the position of the watcher", changes.ErrNoEvent)
}

// emptyReplies is the number of empty replies after which no event follows.
const emptyReplies = 4
