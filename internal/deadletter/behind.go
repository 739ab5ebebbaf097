package deadletter

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/resume"
)

// LaterLetter is a letter whose event comes after a given position of the stream.
type LaterLetter struct {
	ID      bson.RawValue `bson:"id"`
	Pos     string        `bson:"pos"`
	Topic   string        `bson:"topic"`   // the topic that rejected the envelope, or "" if no single topic did
	MovedAt time.Time     `bson:"movedAt"` // server time
}

// clockSlack is how far the cluster time may be ahead of the clock of a server.
const clockSlack = 10 * time.Second

// afterPosition returns the filter for the letters whose events a stream from a position contains.
// It leaves out letters of later deliveries: a requeued envelope is not delivered by the stream.
//
// The position of a swept envelope does not show when the envelope was committed. A letter that was
// moved before the time of the position is of an earlier commit.
func afterPosition(after resume.Position) bson.D {
	at, _ := after.Time()
	// The letter of a swept envelope has no position in the stream, so its time counts.
	isSwept := bson.D{{Key: "$regexMatch", Value: bson.D{
		{Key: "input", Value: "$pos"},
		{Key: "regex", Value: outboxes.SweptPattern},
	}}}

	return bson.D{
		{Key: "_id.delivery", Value: 0},
		{Key: "$or", Value: bson.A{
			bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: outboxes.PosOf(after)}}}},
			bson.D{
				{Key: "movedAt", Value: bson.D{{Key: "$gt", Value: time.Unix(int64(at.T), 0).Add(-clockSlack)}}},
				{Key: "$expr", Value: isSwept},
			},
		}},
	}
}

// EachLater calls take for each letter whose event comes after the position after, in no
// particular order. An owner that reads the stream from that position must not send these events
// (N15). letters is a collection of dead letters and may be missing.
//
// EachLater sees every letter that was committed before the call. It holds one reply of the server
// in memory. It returns the first error of take.
func EachLater(
	ctx context.Context, letters *mongo.Collection, after resume.Position, take func(LaterLetter) error,
) error {
	// A majority read alone may miss a letter that was committed just before (N22).
	return mongodb.AfterCommitted(ctx, letters, func(ctx context.Context) error {
		doing := "finding dead letters after the position in " + mongodb.Namespace(letters)
		fields := append(mongodb.Fields("pos", "topic", "movedAt"), bson.E{Key: "id", Value: "$_id.id"})

		return mongodb.FindEach(ctx, mongodb.Majority(letters), doing, afterPosition(after), func(raw bson.Raw) error {
			var b LaterLetter
			if err := bson.Unmarshal(raw, &b); err != nil {
				return fmt.Errorf("decoding a dead letter of %s: %w", mongodb.Namespace(letters), err)
			}
			return take(b)
		}, options.Find().SetBatchSize(5000).SetProjection(fields))
	})
}

// HasLater reports whether letters has a letter whose event comes after the position after. If ctx
// is that of a transaction, HasLater reads the snapshot of the transaction.
func HasLater(ctx context.Context, letters *mongo.Collection, after resume.Position) (bool, error) {
	return mongodb.Exists(ctx, letters, afterPosition(after))
}

// namespacesToMarkDirty returns the outboxes of those letters in part that a later owner has to
// look up, because the stream may repeat their events.
func namespacesToMarkDirty(part []preparedLetter) []string {
	var names []string
	seen := map[string]bool{}
	for i := range part {
		p := &part[i]
		fromStream := p.dead.Pos != "" && p.id.Delivery == 0
		if !fromStream || seen[p.id.NS] {
			continue
		}

		seen[p.id.NS] = true
		names = append(names, p.id.NS)
	}
	return names
}
