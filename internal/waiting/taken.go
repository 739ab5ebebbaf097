package waiting

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// Lookahead is the time by which an envelope is read from the index before it is due. It is longer
// than the time between two reads of the index.
const Lookahead = time.Second

// ClaimedAhead is by how much the due time of a claimed envelope may be ahead of the clock of the server. A claim needs a due
// time that has come, but the clock of another primary may be behind.
const ClaimedAhead = time.Minute

// EachTaken calls take, in no order, for each envelope that an earlier owner may have sent outside of the
// order of the stream: the exceptions of coll, and its scheduled envelopes that are due by until and
// have a claim. The envelopes have no headers and a null payload, because only their ids and targets
// matter. Their bytes are valid only during the call of take. EachTaken sees everything that was
// committed before it was called, and holds one reply in memory.
func EachTaken(ctx context.Context, coll *mongo.Collection, p slot.Range, until time.Time, take func(bson.Raw) error) error {
	claimed := bson.D{
		{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}},
		{Key: "state", Value: nil},
		{Key: "claim.token", Value: bson.D{{Key: "$ne", Value: nil}}},
	}

	// Claimed envelopes come first: one of them may become an exception between the two reads, but an
	// exception never becomes a claimed envelope.
	for _, filter := range []bson.D{claimed, outboxes.IsException()} {
		if err := eachWithoutPayload(ctx, coll, p.AddFilter(filter), take); err != nil {
			return err
		}
	}
	return nil
}

// eachWithoutPayload calls take for each envelope that filter matches, without its headers, history and
// payload.
func eachWithoutPayload(ctx context.Context, coll *mongo.Collection, filter bson.D, take func(bson.Raw) error) error {
	project := bson.D{{Key: "$unset", Value: bson.A{"headers", "history", "lastError"}}}
	null := bson.D{{Key: "$set", Value: bson.D{{Key: "payload", Value: nil}}}}
	pipeline := mongo.Pipeline{{{Key: "$match", Value: filter}}, project, null}

	doing := "reading envelopes of " + mongodb.Namespace(coll) + " that an earlier owner may have sent"
	return mongodb.AfterCommitted(ctx, coll, func(ctx context.Context) error {
		cur, err := mongodb.Majority(coll).Aggregate(ctx, pipeline, options.Aggregate().SetBatchSize(1000))
		if err != nil {
			return mongodb.Refusal(err, doing, "find", mongodb.Namespace(coll))
		}
		return mongodb.EachDocument(ctx, cur, doing, take)
	})
}
