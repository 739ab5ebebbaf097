package nodes

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// Sign is the content of one heartbeat.
type Sign struct {
	Listed                 bool // in the memory of the node
	Node, Address, Version string
	Watchers               []string // that the node owns or stands by for
	KafkaReachable         bool
	Slots                  int // number of slots of its watcher; 0 and 1 are not stored
	// SinceAck is the time since Kafka last acknowledged a record; below 0 means never. It is a duration, because the
	// clocks of nodes differ.
	SinceAck   time.Duration
	ClockAhead time.Duration // by which the clock of the node is ahead of the server's

	Facts
	// Up is the time since the process started.
	Up time.Duration
}

// Facts is the part of a heartbeat that hardly changes.
type Facts struct {
	// Instance is the UUID of the process. It distinguishes two processes that have the same node name by mistake.
	Instance     string   `bson:"instance"`
	Tasks        []string `bson:"tasks"`
	Capabilities []string `bson:"capabilities"`
	// Config is a fingerprint of the part of the configuration that must be the same on all nodes of a watcher.
	Config string `bson:"config"`
	// Holds are the slots that the node owns, as watcher/<i>of<N>.
	Holds []string `bson:"holds"`
}

// Node is a node as the others see it. Ages are by the server's clock at the time of the read.
type Node struct {
	Node           string     `bson:"_id"`
	Address        string     `bson:"address"`
	Version        string     `bson:"version"`
	Watchers       []string   `bson:"watchers"`
	KafkaReachable bool       `bson:"kafkaReachable"`
	Slots          int        `bson:"slots"`   // number of slots of its watcher; 0 if it has one
	LastAck        *time.Time `bson:"lastAck"` // nil means never
	ClockAheadMS   int64      `bson:"clockAheadMs"`
	StartedAt      time.Time  `bson:"startedAt"`
	SeenAt         time.Time  `bson:"seenAt"`
	AgeMS          int64      `bson:"ageMs"`
	Facts          `bson:",inline"`
	// StaleSince is when another node noticed that this node sent no more heartbeats. nil: no node has noticed it.
	StaleSince *time.Time `bson:"staleSince"`
	// Lapsed means that the node has let a lease expire and has sent no heartbeat since. It is stored only for nodes
	// of watchers with several slots.
	Lapsed bool `bson:"lapsed"`
}

// Age returns the time since the node's last heartbeat.
func (n Node) Age() time.Duration { return time.Duration(n.AgeMS) * time.Millisecond }

// Alive reports whether the last heartbeat is younger than stale.
func (n Node) Alive(stale time.Duration) bool { return n.Age() < stale }

// Nodes is the collection `nodes` of the state database. It has the last heartbeat of each node (N6).
type Nodes struct{ coll *mongo.Collection }

// NewNodes returns the Nodes in coll. Heartbeats need no majority concern, because a lost one is repeated.
func NewNodes(coll *mongo.Collection) *Nodes { return &Nodes{coll} }

// Was is the entry of a node before its heartbeat.
type Was struct {
	Listed   bool // false before the first heartbeat, or if the entry was removed
	Instance string
	Stale    bool // another node had noticed the missing heartbeats
	Age      time.Duration
}

// Heartbeat writes sign and returns the entry that it replaced. It costs one small write. If the node is not listed, it is
// listed again, with the same start time if it is the same process. If sign.Listed is set but the node is not listed, a
// second write lists it. So a write that the server executes late, after its caller has given up and the node has left,
// lists nothing.
func (n *Nodes) Heartbeat(ctx context.Context, sign Sign) (Was, error) {
	var ack any = mongodb.Literal(nil)
	if sign.SinceAck >= 0 {
		ack = timeBefore(sign.SinceAck)
	}
	set := bson.D{
		{Key: "address", Value: mongodb.Literal(sign.Address)},
		{Key: "version", Value: mongodb.Literal(sign.Version)},
		{Key: "watchers", Value: mongodb.Literal(append([]string{}, sign.Watchers...))},
		{Key: "kafkaReachable", Value: sign.KafkaReachable},
		{Key: "lastAck", Value: ack},
		{Key: "clockAheadMs", Value: sign.ClockAhead.Milliseconds()},
		{Key: "seenAt", Value: "$$NOW"},
		{Key: "startedAt", Value: sign.startTime()},
	}
	// Only a watcher with several slots needs these.
	if sign.Slots > 1 {
		set = append(set, bson.E{Key: "slots", Value: sign.Slots}, bson.E{Key: "lapsed", Value: "$$REMOVE"})
	}
	set = append(set, sign.storedFields()...)

	var before struct {
		Instance   string     `bson:"instance"`
		StaleSince *time.Time `bson:"staleSince"`
		AgeMS      int64      `bson:"ageMs"`
	}
	stored := append(mongodb.Fields("instance", "staleSince"), bson.E{Key: "ageMs", Value: age})
	upsert := !sign.Listed
	for try := 0; ; try++ {
		err := n.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: sign.Node}}, mongo.Pipeline{{{Key: "$set", Value: set}}},
			options.FindOneAndUpdate().SetUpsert(upsert).SetReturnDocument(options.Before).SetProjection(stored)).Decode(&before)
		switch {
		case err == nil:
			return Was{
				Listed: true, Instance: before.Instance, Stale: before.StaleSince != nil,
				Age: time.Duration(before.AgeMS) * time.Millisecond,
			}, nil

		case errors.Is(err, mongo.ErrNoDocuments) && !upsert:
			// The entry was removed while the node ran.
			upsert = true

		case errors.Is(err, mongo.ErrNoDocuments):
			// The upsert has inserted the entry, so there was none before.
			return Was{}, nil

		case mongo.IsDuplicateKeyError(err) && try < 2:
			// Another process with this name was listed at the same moment.

		default:
			return Was{}, mongodb.DescribeError(err, "heartbeat of node "+sign.Node, "find, insert and update", mongodb.Namespace(n.coll))
		}
	}
}

// age is the expression for the time since the last heartbeat, in milliseconds.
var age = bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", "$seenAt"}}}

// timeBefore returns the expression for the server's time duration ago.
func timeBefore(duration time.Duration) bson.D {
	return bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", duration.Milliseconds()}}}
}

// startTime returns the expression for the start time of the process. If the entry is of the same process, its start time
// stays. Otherwise the server's clock and s.Up determine it.
func (s *Sign) startTime() bson.D {
	started := timeBefore(s.Up)
	same := bson.D{{Key: "$eq", Value: bson.A{mongodb.IfNull("$instance", ""), mongodb.Literal(s.Instance)}}}
	return bson.D{{Key: "$cond", Value: bson.A{same, mongodb.IfNull("$startedAt", started), started}}}
}

// storedFields returns the fields of the facts. A heartbeat also ends a staleness.
func (f Facts) storedFields() bson.D {
	// A missing list is stored as an empty one.
	list := func(values []string) bson.D { return mongodb.Literal(append([]string{}, values...)) }
	return bson.D{
		{Key: "instance", Value: mongodb.Literal(f.Instance)},
		{Key: "tasks", Value: list(f.Tasks)},
		{Key: "capabilities", Value: list(f.Capabilities)},
		{Key: "config", Value: mongodb.Literal(f.Config)},
		{Key: "holds", Value: list(f.Holds)},
		{Key: "staleSince", Value: "$$REMOVE"},
	}
}

// List returns every node, the most recently seen first.
func (n *Nodes) List(ctx context.Context) ([]Node, error) { return n.findNodes(ctx, bson.D{}) }

// findNodes returns the nodes that filter matches, the most recently seen first.
func (n *Nodes) findNodes(ctx context.Context, filter bson.D) ([]Node, error) {
	return mongodb.AggregateAll[Node](ctx, n.coll, "listing nodes", mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$addFields", Value: bson.D{{Key: "ageMs", Value: age}}}},
		{{Key: "$sort", Value: bson.D{{Key: "seenAt", Value: -1}}}},
	})
}

// anyAlive reports whether a node that filter matches is alive.
func (n *Nodes) anyAlive(ctx context.Context, filter bson.D, stale time.Duration) (bool, error) {
	found, err := n.findNodes(ctx, filter)
	return len(found) > 0 && found[0].Alive(stale), err
}

// Alive reports whether node has sent a heartbeat within stale. An unknown node is not alive.
func (n *Nodes) Alive(ctx context.Context, node string, stale time.Duration) (bool, error) {
	return n.anyAlive(ctx, bson.D{{Key: "_id", Value: node}}, stale)
}

// AnotherReachesKafka reports whether a live relay other than self reaches Kafka. If so, an owner that makes no progress
// should step down (N6).
func (n *Nodes) AnotherReachesKafka(ctx context.Context, self string, stale time.Duration) (bool, error) {
	others := bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: self}}}, {Key: "kafkaReachable", Value: true}, {Key: "tasks", Value: Relay}}
	return n.anyAlive(ctx, others, stale)
}

// Lapsed records that a node has let a lease expire. The next heartbeat of the node removes the record.
func (n *Nodes) Lapsed(ctx context.Context, node string) error {
	_, err := n.coll.UpdateOne(ctx, bson.D{{Key: "_id", Value: node}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "lapsed", Value: true}}}})
	return mongodb.DescribeError(err, "recording that node "+node+" is silent", "update", mongodb.Namespace(n.coll))
}

// Leave removes a node that stops, so that it is not reported as stale.
func (n *Nodes) Leave(ctx context.Context, node string) error {
	_, err := n.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: node}})
	return mongodb.DescribeError(err, "removing node "+node, "remove", mongodb.Namespace(n.coll))
}

// Depart is Leave for the process itself. If another process with the same name is listed, its entry stays. It reports
// whether the process was listed.
func (n *Nodes) Depart(ctx context.Context, node, instance string) (bool, error) {
	res, err := n.coll.DeleteOne(ctx, bson.D{{Key: "_id", Value: node}, {Key: "instance", Value: instance}})
	if err != nil {
		return false, mongodb.DescribeError(err, "removing node "+node, "remove", mongodb.Namespace(n.coll))
	}
	return res.DeletedCount == 1, nil
}

// MarkStale marks the nodes that have sent no heartbeat within stale, and returns those that were not marked before. If
// several nodes call it at the same time, each stale node is returned to one of them.
func (n *Nodes) MarkStale(ctx context.Context, stale time.Duration) ([]Node, error) {
	silent := bson.D{
		{Key: "staleSince", Value: bson.D{{Key: "$exists", Value: false}}},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$seenAt", timeBefore(stale)}}}},
	}
	found, err := n.findNodes(ctx, silent)
	if err != nil {
		return nil, err
	}

	// The filter repeats the condition, so only one of several callers changes the entry.
	var marked []Node
	for _, x := range found {
		res, err := n.coll.UpdateOne(ctx, append(bson.D{{Key: "_id", Value: x.Node}}, silent...),
			mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "staleSince", Value: "$$NOW"}}}}})
		if err != nil {
			return marked, mongodb.DescribeError(err, "recording that node "+x.Node+" is stale", "update", mongodb.Namespace(n.coll))
		}
		if res.ModifiedCount == 1 {
			marked = append(marked, x)
		}
	}
	return marked, nil
}

// Forget removes the nodes that have sent no heartbeat for longer than silence, and returns their number.
func (n *Nodes) Forget(ctx context.Context, silence time.Duration) (int64, error) {
	res, err := n.coll.DeleteMany(ctx, bson.D{
		{Key: "$expr", Value: bson.D{{Key: "$lt", Value: bson.A{"$seenAt", timeBefore(silence)}}}},
	})
	if err != nil {
		return 0, mongodb.DescribeError(err, "removing stale nodes", "remove", mongodb.Namespace(n.coll))
	}
	return res.DeletedCount, nil
}
