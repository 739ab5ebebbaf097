package lease

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// pinLapse is how many ttl after its expiry a lease that is pinned to another node may be acquired (N6).
const pinLapse = 10

// claim holds the fields that a contender writes when it acquires.
type claim struct {
	owner, node, address, version string
	instance, replicaSet          string // instance is used only for a new document
	session                       bson.Raw
	ttl                           time.Duration
	paused                        bool // acquire although the watcher is paused or pinned
}

// acquirePipeline returns the update of an acquisition. The server evaluates it at one moment. If the
// lease may not be acquired, the document stays unchanged, which costs no oplog entry. Each value of the
// claim is a literal, because the name of a node may begin with a dollar sign.
func (c claim) acquirePipeline() mongo.Pipeline {
	fields := bson.D{
		{Key: "owner", Value: lit(c.owner)},
		{Key: "node", Value: lit(c.node)},
		{Key: "address", Value: lit(c.address)},
		{Key: "version", Value: lit(c.version)},
		{Key: "session", Value: lit(c.session)},
		// N1: each acquisition is a new epoch, also if the same node acquires again.
		{Key: "epoch", Value: op("$add", ifNull("$epoch", int64(0)), int64(1))},
		{Key: "seq", Value: ifNull("$seq", int64(0))},
		{Key: "fence", Value: ifNull("$fence", int64(0))},
		{Key: "instance", Value: ifNull("$instance", lit(c.instance))},
		{Key: "startedAt", Value: ifNull("$startedAt", "$$NOW")},
		// A live transaction on the document would block this write. So all sessions that are still
		// listed belong to dead processes.
		{Key: "foreign", Value: lit(bson.A{})},
		{Key: "acquiredAt", Value: "$$NOW"},
		{Key: "renewedAt", Value: "$$NOW"},
		{Key: "expiresAt", Value: op("$add", "$$NOW", c.ttl.Milliseconds())},
	}
	if c.replicaSet != "" {
		fields = append(fields, bson.E{Key: "replicaSetId", Value: ifNull("$replicaSetId", lit(c.replicaSet))})
	}

	acquired := op("$mergeObjects", "$$ROOT", fields)
	return mongo.Pipeline{{{Key: "$replaceWith", Value: op("$cond", c.freeCondition(), acquired, "$$ROOT")}}}
}

// freeCondition returns the condition under which this node may acquire the lease.
func (c claim) freeCondition() bson.D {
	never := time.UnixMilli(0)
	expires := ifNull("$expiresAt", never)
	expired := op("$lte", expires, "$$NOW")
	if c.paused {
		return op("$and", expired, op("$eq", ifNull("$control.paused", false), true))
	}

	all := bson.A{
		expired,
		op("$ne", ifNull("$control.paused", false), true),
		op("$or",
			op("$in", ifNull("$control.pin", ""), bson.A{"", lit(c.node)}),
			op("$lte", op("$add", expires, pinLapse*c.ttl.Milliseconds()), "$$NOW")),
		op("$or",
			op("$lte", ifNull("$control.stepDownUntil", never), "$$NOW"),
			op("$not", op("$in", ifNull("$control.stepDownNode", ""), bson.A{"", lit(c.node)}))),
	}
	if c.replicaSet != "" {
		// N5: state that was written on another replica set may not be acquired.
		all = append(all, op("$in", ifNull("$replicaSetId", ""), bson.A{"", lit(c.replicaSet)}))
	}
	return bson.D{{Key: "$and", Value: all}}
}

func lit(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }

func op(name string, args ...any) bson.D { return bson.D{{Key: name, Value: bson.A(args)}} }

func ifNull(field string, otherwise any) bson.D { return op("$ifNull", field, otherwise) }
