package deadletter

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// Behind is a letter of an envelope whose event stands behind a position of the stream.
type Behind struct {
	ID    bson.RawValue `bson:"id"`
	Pos   string        `bson:"pos"`
	Topic string        `bson:"topic"` // which alone refused it; "" where it was none
}

// behind is the filter of the letters that a relay wrote of events behind a position. Those of later deliveries are nobody's: what
// was requeued does not come by the stream.
func behind(after string) bson.D {
	return bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: after}}}, {Key: "source.kind", Value: FromRelay}, {Key: "_id.delivery", Value: 0}}
}

// EachBehind hands the letters to take whose event stands behind the position after, in no order, so that an owner that reads the
// stream from there does not send them (N15). letters is a collection of dead letters; it may be missing. Everything that was
// committed before the call is seen; one reply is held in memory.
func EachBehind(ctx context.Context, letters *mongo.Collection, after string, take func(Behind) error) error {
	at, err := store.ClusterTime(ctx, letters.Database().Client())
	if err != nil {
		return err
	}
	sess, err := store.Causal(ctx, letters.Database().Client(), at)
	if err != nil {
		return err
	}
	defer sess.EndSession(context.WithoutCancel(ctx))
	ctx = mongo.NewSessionContext(ctx, sess)
	cur, err := store.Majority(letters).Find(ctx, behind(after), options.Find().SetBatchSize(5000).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "id", Value: "$_id.id"}, {Key: "pos", Value: 1}, {Key: "topic", Value: 1}}))
	if err != nil {
		return refusedBehind(letters, err)
	}
	defer func() { _ = cur.Close(context.WithoutCancel(ctx)) }()
	for cur.Next(ctx) {
		var b Behind
		if err := cur.Decode(&b); err != nil {
			return fmt.Errorf("reading a dead letter of %s: %w", store.Namespace(letters), err)
		}
		if err := take(b); err != nil {
			return err
		}
	}
	if err := cur.Err(); err != nil {
		return refusedBehind(letters, err)
	}
	return nil
}

func refusedBehind(letters *mongo.Collection, err error) error {
	ns := store.Namespace(letters)
	return store.Refusal(err, "looking for dead letters behind the position in "+ns, "find", ns)
}

// AnyBehind reports whether there is one. In a transaction it sees what that sees.
func AnyBehind(ctx context.Context, letters *mongo.Collection, after string) (bool, error) {
	err := letters.FindOne(ctx, behind(after), options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return false, nil
	}
	if err != nil {
		return false, refusedBehind(letters, err)
	}
	return true, nil
}

// dirty are the collections of a part whose letters an owner would look for.
func dirty(part []prepared) (names []string) {
	seen := map[string]bool{}
	for i := range part {
		p := &part[i]
		if ns := p.id.NS; p.dead.Pos != "" && p.dead.Source.Kind == FromRelay && p.id.Delivery == 0 && !seen[ns] {
			seen[ns], names = true, append(names, ns)
		}
	}
	return names
}
