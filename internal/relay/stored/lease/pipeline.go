package lease

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// pinLapse is how many ttl after its expiry a lease that is pinned to another node may be acquired (N6).
const pinLapse = 10

// acquirePipeline returns the update of an acquisition. The server evaluates it at one moment. If the
// lease may not be acquired, the document stays unchanged, which costs no oplog entry. Each value of this
// process is a literal, because the name of a node may begin with a dollar sign.
func (c *contender) acquirePipeline(owner string) mongo.Pipeline {
	cfg, replicaSet := &c.lease.cfg, c.lease.replicaSet
	fields := bson.D{
		{Key: "owner", Value: mongodb.Literal(owner)},
		{Key: "node", Value: mongodb.Literal(cfg.Node)},
		{Key: "address", Value: mongodb.Literal(cfg.Address)},
		{Key: "version", Value: mongodb.Literal(cfg.Version)},
		{Key: "session", Value: mongodb.Literal(c.session.ID())},
		// N1: each acquisition is a new epoch, also if the same node acquires again.
		{Key: "epoch", Value: op("$add", mongodb.IfNull("$epoch", int64(0)), int64(1))},
		{Key: "seq", Value: mongodb.IfNull("$seq", int64(0))},
		{Key: "fence", Value: mongodb.IfNull("$fence", int64(0))},
		{Key: "instance", Value: mongodb.IfNull("$instance", mongodb.Literal(c.instance))},
		{Key: "startedAt", Value: mongodb.IfNull("$startedAt", "$$NOW")},
		// A live transaction on the document would block this write. So all sessions that are still
		// listed belong to dead processes.
		{Key: "acquiredAt", Value: "$$NOW"},
		{Key: "renewedAt", Value: "$$NOW"},
		{Key: "expiresAt", Value: op("$add", "$$NOW", cfg.TTL.Milliseconds())},
		{Key: "ttlMs", Value: cfg.TTL.Milliseconds()},
	}
	if replicaSet != "" {
		fields = append(fields, bson.E{Key: "replicaSetId", Value: mongodb.IfNull("$replicaSetId", mongodb.Literal(replicaSet))})
	}

	acquired := op("$mergeObjects", "$$ROOT", fields)
	return mongo.Pipeline{{{Key: "$replaceWith", Value: op("$cond", c.freeCondition(), acquired, "$$ROOT")}}}
}

// freeCondition returns the condition under which this node may acquire the lease.
func (c *contender) freeCondition() bson.D {
	lease := c.lease
	never := time.UnixMilli(0)
	expires := mongodb.IfNull("$expiresAt", never)
	expired, lapsed := op("$lte", expires, "$$NOW"), op("$lte", op("$add", expires, pinLapse*lease.cfg.TTL.Milliseconds()), "$$NOW")
	// A renewal since the last read ends the silence of the owner.
	silent := op("$and", op("$eq", "$epoch", c.silence.epoch), op("$eq", "$seq", c.silence.seq))
	if c.silence.isSilent(silentTTLs) {
		expired = op("$or", expired, silent)
	}
	if c.silence.isSilent(pinLapse) {
		lapsed = op("$or", lapsed, silent)
	}
	if lease.cfg.AcquirePaused {
		return op("$and", expired, op("$eq", mongodb.IfNull("$control.paused", false), true))
	}

	all := bson.A{
		expired,
		op("$ne", mongodb.IfNull("$control.paused", false), true),
		op("$or",
			op("$in", mongodb.IfNull("$control.pin", ""), bson.A{"", mongodb.Literal(lease.cfg.Node)}),
			lapsed),
		op("$or",
			op("$lte", mongodb.IfNull("$control.stepDownUntil", never), "$$NOW"),
			op("$not", op("$in", mongodb.IfNull("$control.stepDownNode", ""), bson.A{"", mongodb.Literal(lease.cfg.Node)}))),
	}
	if lease.replicaSet != "" {
		// N5: state that was written on another replica set may not be acquired.
		all = append(all, op("$in", mongodb.IfNull("$replicaSetId", ""), bson.A{"", mongodb.Literal(lease.replicaSet)}))
	}
	return bson.D{{Key: "$and", Value: all}}
}

func op(name string, args ...any) bson.D { return bson.D{{Key: name, Value: bson.A(args)}} }
