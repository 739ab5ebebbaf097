package changes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/resume"
)

// Skip is an insert that the stream does not read.
type Skip struct {
	DB, Coll string
	ID       bson.RawValue
	Until    bson.Timestamp // a later insert with this id is read
}

// ErrNoEvent is returned if there is no event after a position, or the server cannot return it.
var ErrNoEvent = errors.New("the event at which the stream stands is unknown")

// NextInsert returns the first insert of the scope after the position, without its document. It is for an operator who looks for
// the event at which a stream stands. The error is [ErrNoEvent] if there is none, or if the server cannot return it.
func NextInsert(ctx context.Context, client *mongo.Client, scope *Scope, at resume.Position) (Skip, error) {
	opts := options.ChangeStream().SetMaxAwaitTime(maxAwait)
	switch ts, ok := at.Time(); {
	case !at.Token.IsZero():
		opts.SetStartAfter(bson.Raw(at.Token))
	case ok:
		opts.SetStartAtOperationTime(&ts)
	default:
		return Skip{}, fmt.Errorf("%w: the watcher has no position", ErrNoEvent)
	}

	// The document may be the reason why the server cannot return the event.
	pipeline := append(scope.Pipeline(), bson.D{{Key: "$match", Value: bson.D{{Key: "operationType", Value: "insert"}}}},
		bson.D{{Key: "$project", Value: bson.D{{Key: "ns", Value: 1}, {Key: "documentKey", Value: 1}, {Key: "clusterTime", Value: 1}}}})
	stream, err := scope.Watch(ctx, client, nil, pipeline, opts)
	if err != nil {
		return Skip{}, fmt.Errorf("%w: %w", ErrNoEvent, err)
	}
	defer stream.Close(context.WithoutCancel(ctx))

	// The first reply may be empty although there is an event.
	for range emptyReplies {
		if !stream.TryNext(ctx) {
			if err := stream.Err(); err != nil {
				return Skip{}, fmt.Errorf("%w: %w", ErrNoEvent, err)
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
			return Skip{}, fmt.Errorf("%w: %w", ErrNoEvent, err)
		}
		return Skip{DB: ev.NS.DB, Coll: ev.NS.Coll, ID: ev.Key.ID, Until: ev.At}, nil
	}
	return Skip{}, fmt.Errorf("%w: no event follows the position of the watcher", ErrNoEvent)
}

// maxAwait limits how long the server waits before it sends an empty reply.
const maxAwait = 500 * time.Millisecond

// emptyReplies is the number of empty replies after which no event follows.
const emptyReplies = 4
