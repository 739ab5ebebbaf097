package waiting

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// maxErrorReason bounds a reason in the history of an exception, in bytes.
const maxErrorReason = 2 << 10

// ExceptionError is why an envelope was not delivered, as it is stored.
type ExceptionError struct {
	Class  record.Class
	Reason string // for people: never payload
	Topic  string
}

// Exception is an envelope of the stream that waits. Its state is stored in its document, so the watermark can pass it.
type Exception struct {
	NS      string   // "db.collection"
	Raw     bson.Raw // the whole envelope, as the stream showed it
	State   string   // retry, blocked or parked
	Pos     string   // hexadecimal `_data` of its event (N15)
	Pending []string // targets that do not have it; nil: all that it routes to
	Key     string   // canonical text of its ordering key; stored unless the envelope has the key as text
	// Attempts is the number of attempts that failed. Delay is the time from now to the next one, for the state retry.
	Attempts int32
	Delay    time.Duration
	Error    *ExceptionError // nil if the envelope is not at fault
	Node     string          // the node of the failed attempt
	Seal     []byte          // of the state database, see [outboxes.Registry.Seal]
	// Redelivered marks the records of the envelope, because they may have been sent before.
	Redelivered bool
}

// WriteExceptions stores each exception, in as many fenced transactions as the bounds require. Each transaction is
// majority committed before the next begins, and enters its namespaces in `dirty` (N17). A transaction that does not
// end in time is made smaller, and so are those of later calls with the same size. If size is nil, the first is as large as possible.
// After an error, the caller may repeat the call with all exceptions.
//
// N16: a write is an upsert of the whole envelope, so an envelope that was inserted and deleted in one transaction
// becomes an exception too. A document that has a state keeps it, and waits for the new targets as well.
func WriteExceptions(ctx context.Context, f mongodb.Fencer, list []Exception, size *mongodb.PartSize) error {
	return mongodb.WriteInParts(ctx, f, list, mongodb.Parts[Exception]{
		Doing:    "writing exceptions",
		PartSize: size,
		Size:     func(x *Exception) int { return len(x.Raw) + 512 },
		Dirty:    distinctNamespaces,
		Write:    upsertExceptions,
	})
}

func distinctNamespaces(list []Exception) []string {
	all := make(map[string]struct{}, 1)
	for i := range list {
		all[list[i].NS] = struct{}{}
	}
	return slices.Collect(maps.Keys(all))
}

// upsertExceptions writes part, with one bulk write per collection.
func upsertExceptions(tx context.Context, client *mongo.Client, part []Exception) error {
	models := map[string][]mongo.WriteModel{}
	for i := range part {
		x := &part[i]
		m, err := x.upsertModel()
		if err != nil {
			return err
		}
		models[x.NS] = append(models[x.NS], m)
	}

	return outboxes.BulkWrite(tx, client, models, "find, insert and update")
}

// upsertModel returns the statement that writes the exception. If the document is already an exception, the statement
// only adds the targets, because it must not undo other changes.
func (x *Exception) upsertModel() (mongo.WriteModel, error) {
	id, err := x.Raw.LookupErr("_id")
	if err != nil {
		return nil, fmt.Errorf("exception of %s: its envelope has no _id: %w", x.NS, err)
	}

	// Without Literal, a pipeline would evaluate a text that begins with $.
	fields := bson.D{
		{Key: "ts", Value: "$$CLUSTER_TIME"},
		{Key: "state", Value: mongodb.Literal(x.State)},
		{Key: "pos", Value: mongodb.Literal(x.Pos)},
		{Key: "attempts", Value: x.Attempts},
		{Key: "origin", Value: outboxes.OriginStream},
		{Key: "seal", Value: x.Seal},
	}

	// The key is stored as text even if the envelope has another type: 5 and "5" are one key and need one order.
	// With a mapping, the key may come from another field.
	if key, _ := x.Raw.Lookup("key").StringValueOK(); key == "" || x.Key != "" && key != x.Key {
		fields = append(fields, bson.E{Key: "key", Value: mongodb.Literal(x.Key)})
	}
	// The envelope gets another ts, so firstTs keeps the original.
	if _, missing := x.Raw.LookupErr("firstTs"); missing != nil {
		if t, i, ok := x.Raw.Lookup("ts").TimestampOK(); ok && t > 0 {
			fields = append(fields, bson.E{Key: "firstTs", Value: bson.Timestamp{T: t, I: i}})
		}
	}
	if x.Pending != nil {
		fields = append(fields, bson.E{Key: "pending", Value: mongodb.Literal(x.Pending)})
	}
	if x.Redelivered {
		fields = append(fields, bson.E{Key: "redelivered", Value: true})
	}
	if x.State == "retry" {
		fields = append(fields, bson.E{Key: "nextAt", Value: timeAfter(x.Delay)})
	}
	if x.Error != nil {
		failure := x.Error.attemptFields(x.Node)
		fields = append(fields, bson.E{Key: "lastError", Value: failure}, bson.E{Key: "history", Value: bson.A{failure}})
	}

	// A term may give back several targets of an envelope one after the other, and each is added to
	// the list.
	union := bson.D{{Key: "$setUnion", Value: bson.A{"$pending", mongodb.Literal(x.Pending)}}}
	pending := bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isArray", Value: "$pending"}}, union, "$pending"}}}
	more := bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", bson.D{{Key: "pending", Value: pending}}}}}
	if x.Pending == nil {
		more = bson.D{{Key: "$unsetField", Value: bson.D{{Key: "field", Value: "pending"}, {Key: "input", Value: "$$ROOT"}}}}
	}

	written := bson.D{{Key: "$mergeObjects", Value: bson.A{mongodb.Literal(x.Raw), fields}}}
	return mongo.NewUpdateOneModel().SetUpsert(true).SetFilter(bson.D{{Key: "_id", Value: id}}).SetUpdate(mongo.Pipeline{
		{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{x.isException(), more, written}}}}},
	}), nil
}

// isException returns a condition that is true for a document that is already an exception. An envelope that was sent
// before is written again: the owner repeats the part of the stream before its checkpoint, relies on the exception, and
// finds the record in its read-back.
func (x *Exception) isException() bson.D {
	return bson.D{{Key: "$in", Value: bson.A{"$state", outboxes.Exceptional}}}
}

// attemptFields returns the failed attempt as it is stored, now.
func (e *ExceptionError) attemptFields(node string) bson.D {
	return bson.D{
		{Key: "class", Value: mongodb.Literal(string(e.Class))},
		{Key: "reason", Value: mongodb.Literal(record.Clip(e.Reason, maxErrorReason))},
		{Key: "topic", Value: mongodb.Literal(e.Topic)},
		{Key: "at", Value: "$$NOW"},
		{Key: "node", Value: mongodb.Literal(node)},
	}
}

// timeAfter returns an expression for the server's current time plus d.
func timeAfter(d time.Duration) bson.D {
	return bson.D{{Key: "$add", Value: bson.A{"$$NOW", d.Milliseconds()}}}
}
