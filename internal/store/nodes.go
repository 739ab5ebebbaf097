package store

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// Sign is what a node tells of itself.
type Sign struct {
	Node, Address, Version string
	Watchers               []string // that it owns or stands by for
	KafkaReachable         bool
	// SinceAck is how long ago Kafka acknowledged a record last; below 0 is never. A duration, because the clocks of
	// nodes differ.
	SinceAck time.Duration
}

// Node is a node as the others see it. Ages are by the server's clock at the reading.
type Node struct {
	Node           string     `bson:"_id"`
	Address        string     `bson:"address"`
	Version        string     `bson:"version"`
	Watchers       []string   `bson:"watchers"`
	KafkaReachable bool       `bson:"kafkaReachable"`
	LastAck        *time.Time `bson:"lastAck"` // nil is never
	StartedAt      time.Time  `bson:"startedAt"`
	SeenAt         time.Time  `bson:"seenAt"`
	AgeMS          int64      `bson:"ageMs"`
}

// Age is the time since the node's last sign of life.
func (n Node) Age() time.Duration { return time.Duration(n.AgeMS) * time.Millisecond }

// Alive reports whether the last sign of life is younger than stale.
func (n Node) Alive(stale time.Duration) bool { return n.Age() < stale }

// Nodes is `nodes` of the state database: the heartbeats by which nodes know of each other (N6).
type Nodes struct{ coll *mongo.Collection }

// NewNodes keeps the heartbeats in coll. Majority is not asked of them: one that is lost comes again.
func NewNodes(coll *mongo.Collection) *Nodes { return &Nodes{coll} }

// Heartbeat writes a sign of life; one small write.
func (n *Nodes) Heartbeat(ctx context.Context, s Sign) error {
	var ack any = lit(nil)
	if s.SinceAck >= 0 {
		ack = bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", s.SinceAck.Milliseconds()}}}
	}
	if s.Watchers == nil {
		s.Watchers = []string{}
	}
	_, err := n.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: s.Node}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "address", Value: lit(s.Address)},
		{Key: "version", Value: lit(s.Version)},
		{Key: "watchers", Value: lit(s.Watchers)},
		{Key: "kafkaReachable", Value: s.KafkaReachable},
		{Key: "lastAck", Value: ack},
		{Key: "seenAt", Value: "$$NOW"},
		{Key: "startedAt", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$startedAt", "$$NOW"}}}},
	}}}}, options.UpdateOne().SetUpsert(true))
	if err != nil {
		return privilege(err, "heartbeat of node "+s.Node, "find, insert and update", Namespace(n.coll), "")
	}
	return nil
}

// List returns every node, the most recently seen first.
func (n *Nodes) List(ctx context.Context) ([]Node, error) { return n.find(ctx, bson.D{}) }

func (n *Nodes) find(ctx context.Context, filter bson.D) ([]Node, error) {
	cur, err := n.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$addFields", Value: bson.D{{Key: "ageMs", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", "$seenAt"}}}}}}},
		{{Key: "$sort", Value: bson.D{{Key: "seenAt", Value: -1}}}},
	})
	if err != nil {
		return nil, privilege(err, "listing nodes", "find", Namespace(n.coll), "")
	}
	out := []Node{}
	if err := cur.All(ctx, &out); err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	return out, nil
}

// Alive reports whether node gave a sign of life within stale; a node that is not known is not alive.
func (n *Nodes) Alive(ctx context.Context, node string, stale time.Duration) (bool, error) {
	found, err := n.find(ctx, bson.D{{Key: "_id", Value: node}})
	if err != nil || len(found) == 0 {
		return false, err
	}
	return found[0].Alive(stale), nil
}

// AnotherReachesKafka reports whether a live node other than self reaches Kafka: then an owner that makes no progress
// had better step down (N6).
func (n *Nodes) AnotherReachesKafka(ctx context.Context, self string, stale time.Duration) (bool, error) {
	found, err := n.find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: self}}}, {Key: "kafkaReachable", Value: true}})
	if err != nil || len(found) == 0 {
		return false, err
	}
	return found[0].Alive(stale), nil // sorted: the youngest
}

// Leave removes a node that stops, so that nobody waits for it to grow stale.
func (n *Nodes) Leave(ctx context.Context, node string) error {
	if _, err := n.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: node}}); err != nil {
		return privilege(err, "removing node "+node, "remove", Namespace(n.coll), "")
	}
	return nil
}

// Forget removes the nodes that gave no sign of life for longer than age, and tells how many.
func (n *Nodes) Forget(ctx context.Context, age time.Duration) (int64, error) {
	res, err := n.coll.DeleteMany(ctx, bson.D{{Key: "$expr", Value: bson.D{{Key: "$lt", Value: bson.A{
		"$seenAt", bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", age.Milliseconds()}}},
	}}}}})
	if err != nil {
		return 0, privilege(err, "removing stale nodes", "remove", Namespace(n.coll), "")
	}
	return res.DeletedCount, nil
}
