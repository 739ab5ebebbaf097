package deadletter

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// LaterLetter is a letter whose event comes after a given position of the stream.
type LaterLetter struct {
	ID    bson.RawValue `bson:"id"`
	Pos   string        `bson:"pos"`
	Topic string        `bson:"topic"` // the topic that rejected the envelope, or "" if no single topic did
}

// afterPosition returns the filter for the letters that a relay wrote for events after a position.
// It leaves out letters of later deliveries: a requeued envelope is not delivered by the stream.
func afterPosition(after string) bson.D {
	return bson.D{
		{Key: "pos", Value: bson.D{{Key: "$gt", Value: after}}},
		{Key: "source.kind", Value: FromRelay},
		{Key: "_id.delivery", Value: 0},
	}
}

// EachLater calls take for each letter whose event comes after the position after, in no
// particular order. An owner that reads the stream from that position must not send these events
// (N15). letters is a collection of dead letters and may be missing.
//
// EachLater sees every letter that was committed before the call. It holds one reply of the server
// in memory. It returns the first error of take.
func EachLater(ctx context.Context, letters *mongo.Collection, after string, take func(LaterLetter) error) error {
	// A majority read alone may miss a letter that was committed just before, so the session waits
	// for it (N22).
	client := letters.Database().Client()
	now, err := mongodb.ClusterTime(ctx, client)
	if err != nil {
		return err
	}
	sess, err := mongodb.Causal(ctx, client, now)
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)

	cur, err := mongodb.Majority(letters).Find(ctx, afterPosition(after), options.Find().
		SetBatchSize(5000).
		SetProjection(bson.D{
			{Key: "_id", Value: 0},
			{Key: "id", Value: "$_id.id"},
			{Key: "pos", Value: 1},
			{Key: "topic", Value: 1},
		}))
	if err != nil {
		return findError(letters, err)
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()

	for cur.Next(ctx) {
		var b LaterLetter
		if err := cur.Decode(&b); err != nil {
			return fmt.Errorf("decoding a dead letter of %s: %w", mongodb.Namespace(letters), err)
		}
		if err := take(b); err != nil {
			return err
		}
	}
	if err := cur.Err(); err != nil {
		return findError(letters, err)
	}
	return nil
}

// findError wraps the error of a search for letters, and names the privilege if that is missing.
func findError(letters *mongo.Collection, err error) error {
	ns := mongodb.Namespace(letters)
	return mongodb.Refusal(err, "finding dead letters after the position in "+ns, "find", ns)
}

// HasLater reports whether letters has a letter whose event comes after the position after. If ctx
// is that of a transaction, AnyBehind reads the snapshot of the transaction.
func HasLater(ctx context.Context, letters *mongo.Collection, after string) (bool, error) {
	onlyID := options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})
	err := letters.FindOne(ctx, afterPosition(after), onlyID).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return false, nil
	}
	if err != nil {
		return false, findError(letters, err)
	}
	return true, nil
}

// namespacesToMarkDirty returns the outboxes of those letters in part that a later owner has to
// look up, because the stream may repeat their events.
func namespacesToMarkDirty(part []preparedLetter) []string {
	var names []string
	seen := map[string]bool{}
	for i := range part {
		p := &part[i]
		fromStream := p.dead.Pos != "" && p.dead.Source.Kind == FromRelay && p.id.Delivery == 0
		if !fromStream || seen[p.id.NS] {
			continue
		}

		seen[p.id.NS] = true
		names = append(names, p.id.NS)
	}
	return names
}
