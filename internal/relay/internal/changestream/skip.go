package changestream

import (
	"context"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/relay/changes"
	"github.com/outrelay/outrelay/resume"
)

// pipeline returns the stages of the scope, and those that leave out the skipped events. The latter are no part of the hash of the
// pipeline: the tokens stay valid.
func (s *Stream) pipeline() mongo.Pipeline {
	return append(s.cfg.Scope.Pipeline(), skipStages(s.cfg.Skip)...)
}

// skipStages returns the stages that leave out the events, one for each: MongoDB 6.0 cannot optimize a $nor of several. The server
// applies them to the oplog, before it builds the events.
func skipStages(list []changes.Skip) (stages []bson.D) {
	for _, s := range list {
		which := bson.D{
			{Key: "documentKey._id", Value: s.ID},
			{Key: "clusterTime", Value: bson.D{{Key: "$lte", Value: s.Until}}},
		}

		// A large id would make the pipeline too large, so the moment and the size of the id identify the event.
		if !s.At.IsZero() {
			size := bson.D{{Key: "$bsonSize", Value: bson.D{{Key: "v", Value: "$documentKey._id"}}}}
			which = bson.D{
				{Key: "clusterTime", Value: s.At},
				{Key: "$expr", Value: bson.D{{Key: "$eq", Value: bson.A{size, sizeWithinDocument(s.Size)}}}},
			}
		}

		skipped := bson.D{
			{Key: "operationType", Value: "insert"},
			{Key: "ns.db", Value: s.DB},
			{Key: "ns.coll", Value: s.Coll},
		}
		skipped = append(skipped, which...)
		stages = append(stages, bson.D{{Key: "$match", Value: bson.D{{Key: "$nor", Value: bson.A{skipped}}}}})
	}
	return stages
}

// sizeWithinDocument returns the bytes of the document {v: value} of a value with size bytes: the length of the document, the type
// and the name of the field, and the end.
func sizeWithinDocument(size int) int { return 4 + 1 + len("v\x00") + size + 1 }

// describeNoEvent returns [changes.ErrNoEvent] with the reason and the fix.
func describeNoEvent(err error) error {
	if class, _, _ := classifyError(err); class == classOversize {
		return fmt.Errorf("%w: its id is too large for any change stream (%w). The owner sweeps past it without an order; "+
			"with lost_history: halt, run `outrelay recover`", changes.ErrNoEvent, err)
	}
	return fmt.Errorf("%w: %w; name the collection and the id of the event", changes.ErrNoEvent, err)
}

// NextInsert returns the first insert of the scope after the position, without its document. It is for an operator who looks for
// the event at which a stream stands. The error is [changes.ErrNoEvent] if there is none, or if the server cannot return it.
func NextInsert(ctx context.Context, client *mongo.Client, scope *changes.Scope, position resume.Position) (changes.Skip, error) {
	opts := options.ChangeStream().SetMaxAwaitTime(defaultPace.maxAwait)
	switch ts, ok := position.Time(); {
	case !position.Token.IsZero():
		opts.SetStartAfter(bson.Raw(position.Token))
	case ok:
		opts.SetStartAtOperationTime(&ts)
	default:
		return changes.Skip{}, fmt.Errorf("%w: the watcher has no position; name the collection and the id of the event", changes.ErrNoEvent)
	}

	// The document may be the reason why the server cannot return the event.
	pipeline := append(scope.Pipeline(), bson.D{{Key: "$match", Value: bson.D{{Key: "operationType", Value: "insert"}}}},
		bson.D{{Key: "$project", Value: bson.D{{Key: "ns", Value: 1}, {Key: "documentKey", Value: 1}, {Key: "clusterTime", Value: 1}}}})
	stream, err := scope.Watch(ctx, client, readpref.Primary(), pipeline, opts)
	if err != nil {
		return changes.Skip{}, describeNoEvent(err)
	}
	defer stream.Close(context.WithoutCancel(ctx))

	// The first response may be empty although there is an event.
	for range emptyResponses {
		if !stream.TryNext(ctx) {
			if err := stream.Err(); err != nil {
				return changes.Skip{}, describeNoEvent(err)
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
		found := changes.Skip{DB: ev.NS.DB, Coll: ev.NS.Coll, ID: ev.Key.ID, Until: ev.At}
		if size := len(ev.Key.ID.Value); size > changes.MaxSkippedID {
			found.At, found.Size = ev.At, size
		}
		return found, nil
	}
	return changes.Skip{}, fmt.Errorf("%w: no event follows the position of the watcher; if outrelay status still lists stream_stopped, name the collection and the id of the event", changes.ErrNoEvent)
}

// emptyResponses is the number of empty responses after which no event follows.
const emptyResponses = 4
