package lease

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// pinLapse is how many ttl after its expiry a lease that is pinned elsewhere may be taken all the same (N6).
const pinLapse = 10

// claim is what a contender writes when it acquires.
type claim struct {
	owner, node, address, version string
	instance, replicaSet          string // instance for a new document only
	session                       bson.Raw
	ttl                           time.Duration
	paused                        bool // take it although it is paused or pinned
}

// acquirePipeline is the whole acquisition, judged by the server at one moment: the document as it is unless it may be taken.
// An unchanged document is no write at all, so losing costs no oplog entry. Each value of ours is a literal: a node's
// name may begin with a dollar sign.
func (c claim) acquirePipeline() mongo.Pipeline {
	taken := bson.D{
		{Key: "owner", Value: lit(c.owner)},
		{Key: "node", Value: lit(c.node)},
		{Key: "address", Value: lit(c.address)},
		{Key: "version", Value: lit(c.version)},
		{Key: "session", Value: lit(c.session)},
		// N1: each acquisition is a new epoch, whoever had the last one.
		{Key: "epoch", Value: op("$add", ifNull("$epoch", int64(0)), int64(1))},
		{Key: "seq", Value: ifNull("$seq", int64(0))},
		{Key: "fence", Value: ifNull("$fence", int64(0))},
		{Key: "instance", Value: ifNull("$instance", lit(c.instance))},
		{Key: "startedAt", Value: ifNull("$startedAt", "$$NOW")},
		// What holds the document now would keep this write waiting, so all that is left here is of dead processes.
		{Key: "foreign", Value: lit(bson.A{})},
		{Key: "acquiredAt", Value: "$$NOW"},
		{Key: "renewedAt", Value: "$$NOW"},
		{Key: "expiresAt", Value: op("$add", "$$NOW", c.ttl.Milliseconds())},
	}
	if c.replicaSet != "" {
		taken = append(taken, bson.E{Key: "replicaSetId", Value: ifNull("$replicaSetId", lit(c.replicaSet))})
	}
	return mongo.Pipeline{{{Key: "$replaceWith", Value: op("$cond", c.freeCondition(), op("$mergeObjects", "$$ROOT", taken), "$$ROOT")}}}
}

// freeCondition is the condition under which the lease may be taken by this node.
func (c claim) freeCondition() bson.D {
	never := time.UnixMilli(0)
	expires := ifNull("$expiresAt", never)
	if c.paused {
		return bson.D{{Key: "$and", Value: bson.A{op("$lte", expires, "$$NOW"), op("$eq", ifNull("$control.paused", false), true)}}}
	}
	all := bson.A{
		op("$lte", expires, "$$NOW"),
		op("$ne", ifNull("$control.paused", false), true),
		op("$or",
			op("$in", ifNull("$control.pin", ""), bson.A{"", lit(c.node)}),
			op("$lte", op("$add", expires, pinLapse*c.ttl.Milliseconds()), "$$NOW")),
		op("$or",
			op("$lte", ifNull("$control.stepDownUntil", never), "$$NOW"),
			op("$not", op("$in", ifNull("$control.stepDownNode", ""), bson.A{"", lit(c.node)}))),
	}
	if c.replicaSet != "" {
		// N5: state that was written on another replica set is not ours to take.
		all = append(all, op("$in", ifNull("$replicaSetId", ""), bson.A{"", lit(c.replicaSet)}))
	}
	return bson.D{{Key: "$and", Value: all}}
}

func lit(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }

func op(name string, args ...any) bson.D { return bson.D{{Key: name, Value: bson.A(args)}} }

func ifNull(field string, otherwise any) bson.D { return op("$ifNull", field, otherwise) }
