package lease

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// Control is what operators ask of a watcher. It is honoured at each acquisition and seen by the owner at each renewal.
type Control struct {
	Paused        bool      `bson:"paused,omitempty"`        // nobody runs it
	Pin           string    `bson:"pin,omitempty"`           // only this node runs it, while it lives
	StepDownUntil time.Time `bson:"stepDownUntil,omitempty"` // until then StepDownNode does not run it
	StepDownNode  string    `bson:"stepDownNode,omitempty"`  // "" is every node
	// Yield is why the owner that was handed this Control must release now, "" if it need not. It is not stored.
	Yield string `bson:"-"`
}

// equal compares what is stored, and the order that follows from it.
func (c Control) equal(d Control) bool {
	return c.Paused == d.Paused && c.Pin == d.Pin && c.StepDownNode == d.StepDownNode && c.Yield == d.Yield &&
		c.StepDownUntil.Equal(d.StepDownUntil)
}

// stepsDown reports whether node must not run the watcher at now, a time of the server.
func (c Control) stepsDown(node string, now time.Time) bool {
	return c.StepDownUntil.After(now) && (c.StepDownNode == "" || c.StepDownNode == node)
}

// Pause stops the watcher until Resume, whoever owns it; the owner drains and releases at its next renewal.
func Pause(ctx context.Context, coll *mongo.Collection, id string) error {
	return updateControl(ctx, coll, id, bson.D{{Key: "$set", Value: bson.D{{Key: "control.paused", Value: true}}}})
}

// Resume ends a pause.
func Resume(ctx context.Context, coll *mongo.Collection, id string) error {
	return updateControl(ctx, coll, id, bson.D{{Key: "$unset", Value: bson.D{{Key: "control.paused", Value: ""}}}})
}

// Pin hands the watcher to node and keeps it there while node lives; "" ends it.
func Pin(ctx context.Context, coll *mongo.Collection, id, node string) error {
	if node == "" {
		return updateControl(ctx, coll, id, bson.D{{Key: "$unset", Value: bson.D{{Key: "control.pin", Value: ""}}}})
	}
	return updateControl(ctx, coll, id, bson.D{{Key: "$set", Value: bson.D{{Key: "control.pin", Value: node}}}})
}

// StepDown makes the present owner release and keep away for hold, by the server's clock.
func StepDown(ctx context.Context, coll *mongo.Collection, id string, hold time.Duration) error {
	return updateControl(ctx, coll, id, mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "control", Value: stepDownControl(hold)}}}}})
}

func stepDownControl(hold time.Duration) bson.D {
	return op("$mergeObjects", "$control", bson.D{
		{Key: "stepDownUntil", Value: op("$add", "$$NOW", hold.Milliseconds())},
		{Key: "stepDownNode", Value: "$node"},
	})
}

// OrderSweep makes the next owner sweep from a time on, and makes the present one step down for hold. A document that is not
// there is made. A stretch that is half swept is part of the order from then on.
func OrderSweep(ctx context.Context, coll *mongo.Collection, id string, from bson.Timestamp, hold time.Duration) error {
	open := op("$ne", ifNull("$gap", nil), nil)
	gap := Gap{Reason: GapOrdered, From: from, Since: time.Now()}
	_, err := withMajority(coll).UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "gap", Value: op("$mergeObjects", lit(gap), bson.D{{Key: "from", Value: op("$cond", open, op("$min", "$gap.from", from), from)}})},
		{Key: "control", Value: stepDownControl(hold)},
		{Key: "owner", Value: ifNull("$owner", nil)},
		{Key: "expiresAt", Value: ifNull("$expiresAt", time.UnixMilli(0))},
	}}}}, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return fmt.Errorf("ordering a sweep for watcher %s: %w", id, err)
	}
	return nil
}

// Adopt makes the state of a watcher that was copied from another replica set this one's (N5): it stores here, the id of
// this replica set, and a new instance, because the transactional ids of the old one may be in use where it came from.
// It refuses while somebody owns the watcher.
func Adopt(ctx context.Context, coll *mongo.Collection, id, here string) error {
	res, err := withMajority(coll).UpdateOne(ctx, bson.D{
		{Key: "_id", Value: id},
		{Key: "$expr", Value: op("$lte", ifNull("$expiresAt", time.UnixMilli(0)), "$$NOW")},
	}, bson.D{{Key: "$set", Value: bson.D{{Key: "replicaSetId", Value: here}, {Key: "instance", Value: uuid.NewString()}}}})
	if err != nil {
		return fmt.Errorf("adopting watcher %s: %w", id, err)
	}
	if res.MatchedCount == 0 {
		return fmt.Errorf("adopting watcher %s: it is owned by a running relay, or: %w", id, ErrNotFound)
	}
	return nil
}

func updateControl(ctx context.Context, coll *mongo.Collection, id string, update any) error {
	res, err := withMajority(coll).UpdateOne(ctx, bson.D{{Key: "_id", Value: id}}, update)
	if err != nil {
		return fmt.Errorf("writing control of watcher %s: %w", id, err)
	}
	if res.MatchedCount == 0 {
		return fmt.Errorf("writing control of watcher %s: %w", id, ErrNotFound)
	}
	return nil
}

// Read returns the watcher document and the server's time of the reading. A missing one is [ErrNotFound].
func Read(ctx context.Context, coll *mongo.Collection, id string) (Document, time.Time, error) {
	return readDocument(ctx, withMajority(coll), id)
}

func readDocument(ctx context.Context, coll *mongo.Collection, id string) (Document, time.Time, error) {
	cur, err := coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: id}}}},
		{{Key: "$project", Value: bson.D{{Key: "doc", Value: "$$ROOT"}, {Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return Document{}, time.Time{}, fmt.Errorf("reading watcher %s: %w", id, err)
	}
	var found []struct {
		Doc Document  `bson:"doc"`
		Now time.Time `bson:"now"`
	}
	if err := cur.All(ctx, &found); err != nil {
		return Document{}, time.Time{}, fmt.Errorf("reading watcher %s: %w", id, err)
	}
	if len(found) == 0 {
		return Document{}, time.Time{}, fmt.Errorf("reading watcher %s: %w", id, ErrNotFound)
	}
	return found[0].Doc, found[0].Now, nil
}

// withMajority is coll with the concerns that ownership needs, whatever its client was set to.
func withMajority(coll *mongo.Collection) *mongo.Collection {
	return coll.Clone(options.Collection().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary()))
}

// ReplicaSetID asks the server for the id of its replica set. It is "" without an error where the server does not tell:
// it needs the action replSetGetConfig on the cluster, and a mongos has none. `hello` names the set only, and every
// second set is called rs0.
func ReplicaSetID(ctx context.Context, client *mongo.Client) (string, error) {
	var reply struct {
		Config struct {
			Settings struct {
				ReplicaSetID bson.ObjectID `bson:"replicaSetId"`
			} `bson:"settings"`
		} `bson:"config"`
	}
	err := client.Database("admin").RunCommand(ctx, bson.D{{Key: "replSetGetConfig", Value: 1}},
		options.RunCmd().SetReadPreference(readpref.Primary())).Decode(&reply)
	switch {
	case hasCode(err, codeUnauthorized, codeCommandNotFound):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("reading the replica set's id: %w", err)
	case reply.Config.Settings.ReplicaSetID.IsZero():
		return "", nil
	}
	return reply.Config.Settings.ReplicaSetID.Hex(), nil
}

// isNotFound reports whether err says that there is no such document.
func isNotFound(err error) bool {
	return errors.Is(err, ErrNotFound) || errors.Is(err, mongo.ErrNoDocuments)
}
