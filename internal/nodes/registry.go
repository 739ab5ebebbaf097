package nodes

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Sign is what a node tells of itself.
type Sign struct {
	Listed                 bool // to its knowledge
	Node, Address, Version string
	Watchers               []string // that it owns or stands by for
	KafkaReachable         bool
	Slots                  int // into which it divides its watcher; 0 and 1 are not told
	// SinceAck is how long ago Kafka acknowledged a record last; below 0 is never. A duration, because the clocks of
	// nodes differ.
	SinceAck time.Duration

	Facts
	// Up is how long the process runs.
	Up time.Duration
}

// Facts are what a node tells of itself beside its signs of life; they hardly change.
type Facts struct {
	// Instance is the process, a UUID: two that have the same name by mistake are told apart by it.
	Instance string `bson:"instance"`
	// Schema is the number of the last migration that the node knows; 0 is a version before there were any.
	Schema       int      `bson:"schema"`
	Roles        []string `bson:"roles"`
	Capabilities []string `bson:"capabilities"`
	// Config is a fingerprint of the part of the configuration that must be the same on all nodes of a watcher.
	Config string `bson:"config"`
	// Holds are the slots that the node owns, as watcher/<i>of<N>.
	Holds []string `bson:"holds"`
}

// Node is a node as the others see it. Ages are by the server's clock at the reading.
type Node struct {
	Node           string     `bson:"_id"`
	Address        string     `bson:"address"`
	Version        string     `bson:"version"`
	Watchers       []string   `bson:"watchers"`
	KafkaReachable bool       `bson:"kafkaReachable"`
	Slots          int        `bson:"slots"`   // into which it divides its watcher; 0 where it does not
	LastAck        *time.Time `bson:"lastAck"` // nil is never
	StartedAt      time.Time  `bson:"startedAt"`
	SeenAt         time.Time  `bson:"seenAt"`
	AgeMS          int64      `bson:"ageMs"`
	Facts          `bson:",inline"`
	// StaleSince is when another node noticed that this one gave no sign of life any more; nil: nobody did.
	StaleSince *time.Time `bson:"staleSince"`
	// Lapsed says that the node has let a lease expire and has given no sign of life since. Only those of watchers with several
	// slots are noted.
	Lapsed bool `bson:"lapsed"`
}

// Age is the time since the node's last sign of life.
func (n Node) Age() time.Duration { return time.Duration(n.AgeMS) * time.Millisecond }

// Alive reports whether the last sign of life is younger than stale.
func (n Node) Alive(stale time.Duration) bool { return n.Age() < stale }

// Nodes is `nodes` of the state database: the heartbeats by which nodes know of each other (N6).
type Nodes struct{ coll *mongo.Collection }

// NewNodes keeps the heartbeats in coll. Majority is not asked of them: one that is lost comes again.
func NewNodes(coll *mongo.Collection) *Nodes { return &Nodes{coll} }

// Was is what the list said of a node before its heartbeat.
type Was struct {
	Listed   bool // false: its first one, or somebody removed it
	Instance string
	Stale    bool // others had noticed its silence
	Age      time.Duration
}

// Heartbeat writes a sign of life and tells what was there before; one small write. A node that is not listed is listed
// again, as what it was. One that is on the list to its knowledge is listed by a second write, if it is not: one that the server carries
// out late, when its caller has given up and the node has departed, lists nobody.
func (n *Nodes) Heartbeat(ctx context.Context, s Sign) (Was, error) {
	var ack any = mongodb.Literal(nil)
	if s.SinceAck >= 0 {
		ack = bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", s.SinceAck.Milliseconds()}}}
	}
	if s.Watchers == nil {
		s.Watchers = []string{}
	}
	set := bson.D{
		{Key: "address", Value: mongodb.Literal(s.Address)},
		{Key: "version", Value: mongodb.Literal(s.Version)},
		{Key: "watchers", Value: mongodb.Literal(s.Watchers)},
		{Key: "kafkaReachable", Value: s.KafkaReachable},
		{Key: "lastAck", Value: ack},
		{Key: "seenAt", Value: "$$NOW"},
		{Key: "startedAt", Value: s.started()},
	}
	if s.Slots > 1 {
		set = append(set, bson.E{Key: "slots", Value: s.Slots}, bson.E{Key: "lapsed", Value: "$$REMOVE"})
	}
	set = append(set, s.Facts.set()...)
	var before struct {
		Instance   string     `bson:"instance"`
		StaleSince *time.Time `bson:"staleSince"`
		AgeMS      int64      `bson:"ageMs"`
	}
	upsert := !s.Listed
	for try := 0; ; try++ {
		err := n.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: s.Node}}, mongo.Pipeline{{{Key: "$set", Value: set}}},
			options.FindOneAndUpdate().SetUpsert(upsert).SetReturnDocument(options.Before).SetProjection(bson.D{
				{Key: "instance", Value: 1},
				{Key: "staleSince", Value: 1},
				{Key: "ageMs", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", "$seenAt"}}}},
			})).Decode(&before)
		switch {
		case err == nil:
			return Was{Listed: true, Instance: before.Instance, Stale: before.StaleSince != nil, Age: time.Duration(before.AgeMS) * time.Millisecond}, nil
		case errors.Is(err, mongo.ErrNoDocuments) && !upsert:
			upsert = true
		case errors.Is(err, mongo.ErrNoDocuments):
			return Was{}, nil
		case mongo.IsDuplicateKeyError(err) && try < 2: // listed by another of the same name at the same moment
		default:
			return Was{}, mongodb.DescribeRefusal(err, "heartbeat of node "+s.Node, "find, insert and update", mongodb.Namespace(n.coll), "")
		}
	}
}

// started is when the process began: as the list has it, or else reckoned by the server's clock.
func (s *Sign) started() bson.D {
	began := bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", s.Up.Milliseconds()}}}
	same := bson.D{{Key: "$eq", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$instance", ""}}}, mongodb.Literal(s.Instance)}}}
	return bson.D{{Key: "$cond", Value: bson.A{same, bson.D{{Key: "$ifNull", Value: bson.A{"$startedAt", began}}}, began}}}
}

func (f Facts) set() bson.D {
	list := func(v []string) bson.D {
		if v == nil {
			v = []string{}
		}
		return mongodb.Literal(v)
	}
	return bson.D{
		{Key: "instance", Value: mongodb.Literal(f.Instance)},
		{Key: "schema", Value: f.Schema},
		{Key: "roles", Value: list(f.Roles)},
		{Key: "capabilities", Value: list(f.Capabilities)},
		{Key: "config", Value: mongodb.Literal(f.Config)},
		{Key: "holds", Value: list(f.Holds)},
		{Key: "staleSince", Value: "$$REMOVE"},
	}
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
		return nil, mongodb.DescribeRefusal(err, "listing nodes", "find", mongodb.Namespace(n.coll), "")
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

// relays are the nodes that could own a watcher; older versions did not tell.
var relays = bson.E{Key: "$or", Value: bson.A{
	bson.D{{Key: "roles", Value: "relay"}}, bson.D{{Key: "roles", Value: bson.D{{Key: "$in", Value: bson.A{nil, bson.A{}}}}}},
}}

// AnotherReachesKafka reports whether a live node other than self reaches Kafka: then an owner that makes no progress
// had better step down (N6).
func (n *Nodes) AnotherReachesKafka(ctx context.Context, self string, stale time.Duration) (bool, error) {
	found, err := n.find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: self}}}, {Key: "kafkaReachable", Value: true}, relays})
	if err != nil || len(found) == 0 {
		return false, err
	}
	return found[0].Alive(stale), nil // sorted: the youngest
}

// Lapsed notes that a node has let a lease expire. Its next heartbeat takes the note away.
func (n *Nodes) Lapsed(ctx context.Context, node string) error {
	if _, err := n.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: node}}, bson.D{{Key: "$set", Value: bson.D{{Key: "lapsed", Value: true}}}}); err != nil {
		return mongodb.DescribeRefusal(err, "noting the silence of node "+node, "update", mongodb.Namespace(n.coll), "")
	}
	return nil
}

// Leave removes a node that stops, so that nobody waits for it to grow stale.
func (n *Nodes) Leave(ctx context.Context, node string) error {
	if _, err := n.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: node}}); err != nil {
		return mongodb.DescribeRefusal(err, "removing node "+node, "remove", mongodb.Namespace(n.coll), "")
	}
	return nil
}

// Depart is Leave for the process itself: where another one of the same name is listed, that one stays. It reports whether
// the process was listed.
func (n *Nodes) Depart(ctx context.Context, node, instance string) (bool, error) {
	res, err := n.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: node}, {Key: "instance", Value: instance}})
	if err != nil {
		return false, mongodb.DescribeRefusal(err, "removing node "+node, "remove", mongodb.Namespace(n.coll), "")
	}
	return res.DeletedCount == 1, nil
}

// MarkStale notes the silence of nodes that gave no sign of life within stale, and returns those that nobody had noted
// before: of several that look at the same time, one gets each.
func (n *Nodes) MarkStale(ctx context.Context, stale time.Duration) ([]Node, error) {
	silent := bson.D{
		{Key: "staleSince", Value: bson.D{{Key: "$exists", Value: false}}},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$seenAt", bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", stale.Milliseconds()}}}}}}},
	}
	found, err := n.find(ctx, silent)
	if err != nil {
		return nil, err
	}
	var out []Node
	for _, x := range found {
		res, err := n.coll.UpdateOne(ctx, append(bson.D{{Key: "_id", Value: x.Node}}, silent...),
			mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "staleSince", Value: "$$NOW"}}}}})
		if err != nil {
			return out, mongodb.DescribeRefusal(err, "noting the silence of node "+x.Node, "update", mongodb.Namespace(n.coll), "")
		}
		if res.ModifiedCount == 1 {
			out = append(out, x)
		}
	}
	return out, nil
}

// Forget removes the nodes that gave no sign of life for longer than age, and tells how many.
func (n *Nodes) Forget(ctx context.Context, age time.Duration) (int64, error) {
	res, err := n.coll.DeleteMany(ctx, bson.D{{Key: "$expr", Value: bson.D{{Key: "$lt", Value: bson.A{
		"$seenAt", bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", age.Milliseconds()}}},
	}}}}})
	if err != nil {
		return 0, mongodb.DescribeRefusal(err, "removing stale nodes", "remove", mongodb.Namespace(n.coll), "")
	}
	return res.DeletedCount, nil
}
