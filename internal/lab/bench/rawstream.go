package bench

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// streamBatch is the number of documents of a response. It reaches the full rate with a quarter of the memory of 16 MB
// responses.
const streamBatch = 2000

// connect returns a client that has reached its server.
func connect(ctx context.Context, uri string) (*mongo.Client, error) {
	return connectWith(ctx, options.Client().ApplyURI(uri))
}

func connectWith(ctx context.Context, clientOptions *options.ClientOptions) (*mongo.Client, error) {
	client, err := mongo.Connect(clientOptions.SetServerSelectionTimeout(10 * time.Second))
	if err != nil {
		return nil, fmt.Errorf("mongodb: %w", err)
	}
	if err := client.Ping(ctx, nil); err != nil {
		_ = client.Disconnect(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("mongodb: %w", err)
	}
	return client, nil
}

// rawStream reads inserts with the driver alone. It checks only the kind of the event and the length of the
// payload. So it measures the limit of every reader of one change stream.
type rawStream struct {
	spec
	client *mongo.Client
}

func newRawStream(ctx context.Context, spec spec) (work, error) {
	client, err := connect(ctx, spec.MongoDB)
	if err != nil {
		return nil, err
	}
	return &rawStream{spec, client}, nil
}

func (r *rawStream) disconnect() { _ = r.client.Disconnect(context.Background()) }

func (r *rawStream) run(ctx context.Context) (outcome, error) {
	cs, err := watch(ctx, r.client.Database(r.DB).Collection(r.Collection), &r.Start)
	if err != nil {
		return outcome{}, err
	}
	defer cs.Close(context.WithoutCancel(ctx))

	outcome := outcome{}
	for outcome.Events < r.Events {
		if !cs.TryNext(ctx) {
			if err := cs.Err(); err != nil {
				return outcome, err
			}
			continue
		}

		if outcome.Began == 0 {
			outcome.Began = time.Now().UnixNano()
		}

		payload, ok := insertPayload(cs.Current)
		if !ok {
			continue
		}
		if len(payload) != r.Payload {
			return outcome, fmt.Errorf("payload has %d bytes instead of %d", len(payload), r.Payload)
		}
		outcome.Events++
	}

	outcome.Ended = time.Now().UnixNano()
	return outcome, nil
}

// watch opens a change stream as the relay does. If start is nil, the stream starts now.
func watch(ctx context.Context, coll *mongo.Collection, start *bson.Timestamp) (*mongo.ChangeStream, error) {
	streamOptions := options.ChangeStream().SetBatchSize(0).SetMaxAwaitTime(500 * time.Millisecond)
	if start != nil {
		streamOptions.SetStartAtOperationTime(start)
	}

	cs, err := coll.Watch(ctx, mongo.Pipeline{}, streamOptions)
	if err != nil {
		return nil, fmt.Errorf("opening the change stream: %w", err)
	}
	cs.SetBatchSize(streamBatch)
	return cs, nil
}

// insertPayload returns the payload of an insert. ok is false for other events.
func insertPayload(change bson.Raw) (payload []byte, ok bool) {
	if op, ok := change.Lookup("operationType").StringValueOK(); !ok || op != "insert" {
		return nil, false
	}

	doc, ok := change.Lookup("fullDocument").DocumentOK()
	if !ok {
		return nil, false
	}

	_, payload, ok = doc.Lookup("payload").BinaryOK()
	return payload, ok
}
