package waiting

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// writeFates writes what is to be changed about the envelopes of list, inside a transaction that holds the fence (N3).
// It is idempotent. It does not change a document that was deleted or changed in the meantime: each statement requires
// the id, the delivery, and that the document is still an exception or has the claim. It returns the number of documents
// that matched. A repetition may match fewer, because the first attempt has already written some.
func (f *Finisher) writeFates(tx context.Context, list []*decision) (matched int64, err error) {
	for _, b := range f.groupFates(list) {
		coll := outboxes.CollectionOf(mongo.SessionFromContext(tx).Client(), b.ns)
		res, err := coll.BulkWrite(tx, b.writeModels())
		if err != nil {
			return 0, mongodb.Refusal(err, "writing the fate of exceptions to "+b.ns, "find, update and remove", b.ns)
		}

		matched += res.MatchedCount + res.DeletedCount
		crash.At("mid-exception-write")
	}
	return matched, nil
}

// isRejected reports whether the server rejects the contents of a write, for example because of a validator of the
// collection. Such a write fails again if it is repeated. The other documents of the same statement are not at fault.
func isRejected(err error) bool {
	var be mongo.BulkWriteException
	if !errors.As(err, &be) || len(be.WriteErrors) == 0 || be.HasErrorLabel("TransientTransactionError") {
		return false
	}

	switch be.WriteErrors[0].Code {
	case 2, 9, 52, 56, 57, 66, 121, 10334, 17419, 17420:
		return true
	}
	return false
}

// WriteHalves writes a list at once. If the server has [Rejected] the list, WriteHalves writes its halves, down to
// single elements. It calls refused for each element that the server rejects alone, so that this element does not
// delay the others.
func WriteHalves[T any](list []T, write func(part []T) error, refused func(one T, why error) error) error {
	err := write(list)
	switch {
	case err == nil || !isRejected(err):
		return err
	case len(list) == 1:
		return refused(list[0], err)
	}

	half := len(list) / 2
	if err := WriteHalves(list[:half], write, refused); err != nil {
		return err
	}
	return WriteHalves(list[half:], write, refused)
}

// same identifies envelopes that one statement can write.
type same struct {
	claim    string
	delivery int32
	remove   bool
}

// fateBatch holds the statements for one collection.
type fateBatch struct {
	ns     string
	many   map[same]bson.A
	order  []same
	single []mongo.WriteModel
}

// groupFates groups decisions by collection, in their order. Envelopes that need the same update share a statement.
func (f *Finisher) groupFates(list []*decision) []*fateBatch {
	var order []*fateBatch
	byNS := map[string]*fateBatch{}
	for _, a := range list {
		b := byNS[a.NS]
		if b == nil {
			b = &fateBatch{ns: a.NS, many: map[same]bson.A{}}
			byNS[a.NS] = b
			order = append(order, b)
		}

		k := same{a.Claim, a.Number, a.removed}
		if !a.removed && (a.fate.End != Finished || f.config.Recording == "mark") {
			b.single = append(b.single, f.updateModel(a))
			continue
		}
		if b.many[k] == nil {
			b.order = append(b.order, k)
		}
		b.many[k] = append(b.many[k], a.ID)
	}
	return order
}

// writeModels returns the statements of the batch.
func (b *fateBatch) writeModels() []mongo.WriteModel {
	out := b.single
	for _, k := range b.order {
		filter := matchPublished(bson.D{{Key: "$in", Value: b.many[k]}}, k.claim, k.delivery)
		if k.remove {
			out = append(out, mongo.NewDeleteManyModel().SetHint(outboxes.PickedByID).SetFilter(filter))
		} else {
			out = append(out, mongo.NewUpdateManyModel().SetHint(outboxes.PickedByID).SetFilter(filter).
				SetUpdate(sentUpdate(nil)))
		}
	}
	return out
}

// matchPublished returns a filter that matches a document only while it is still the envelope that was published.
func matchPublished(id any, claim string, delivery int32) bson.D {
	d := bson.D{{Key: "_id", Value: id}}
	if claim != "" {
		d = append(d, bson.E{Key: "claim.token", Value: claim}, bson.E{Key: "state", Value: nil})
	} else {
		d = append(d, bson.E{Key: "state", Value: bson.D{{Key: "$in", Value: outboxes.Exceptional}}})
	}
	return append(d, sameNumber("delivery", delivery))
}

// sameNumber returns a condition on a counter. A missing counter counts as zero.
func sameNumber(field string, n int32) bson.E {
	if n == 0 {
		return bson.E{Key: field, Value: bson.D{{Key: "$not", Value: bson.D{{Key: "$gt", Value: 0}}}}}
	}
	return bson.E{Key: field, Value: n}
}

// sentUpdate returns the update that marks an envelope as sent. It sets the current time, so that retention counts
// from the delivery.
func sentUpdate(sent []outboxes.Place) mongo.Pipeline {
	set := bson.D{{Key: "sentAt", Value: "$$NOW"}, {Key: "ts", Value: "$$CLUSTER_TIME"}, {Key: "firstTs", Value: outboxes.FirstStamp}, wasDue}
	if sent != nil {
		set = append(set, bson.E{Key: "sent", Value: addPositions(sent)})
	}
	return mongo.Pipeline{{{Key: "$set", Value: set}}, {{Key: "$unset", Value: exceptionFields}}}
}

// wasDue stores the due time of a scheduled envelope in a field that no index and no filter uses.
var wasDue = bson.E{Key: "scheduledFor", Value: bson.D{
	{Key: "$ifNull", Value: bson.A{"$dueAt", "$scheduledFor", "$$REMOVE"}},
}}

// addPositions returns an expression that adds positions to `sent`. It adds no duplicates, because the statement may be
// repeated.
func addPositions(sent []outboxes.Place) bson.D {
	return bson.D{{Key: "$setUnion", Value: bson.A{arrayOf("$sent"), mongodb.Literal(sent)}}}
}

// arrayOf returns an expression for the array in a field, or an empty array if the field has none.
func arrayOf(field string) bson.D {
	return bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isArray", Value: field}}, field, bson.A{}}}}
}

// updateModel returns the statement that writes the fate of a on its own.
func (f *Finisher) updateModel(a *decision) mongo.WriteModel {
	var sent []outboxes.Place
	if f.config.Recording == "mark" {
		sent = a.acked
	}
	filter := matchPublished(a.ID, a.Claim, a.Number)
	update := mongo.NewUpdateOneModel().SetHint(outboxes.PickedByID)
	if a.fate.End == Finished {
		return update.SetFilter(filter).SetUpdate(sentUpdate(sent))
	}

	set, unset := bson.D{}, bson.A{}
	if a.left != nil {
		set = append(set, bson.E{Key: "pending", Value: mongodb.Literal(a.left)})
	}
	if sent != nil {
		set = append(set, bson.E{Key: "sent", Value: addPositions(sent)})
	}
	if a.fate.End == Retrying {
		// A repetition of the statement must not count a second attempt.
		filter = append(filter, sameNumber("attempts", a.Attempts))
		set = append(set, f.failedFields(a)...)
	}

	// A scheduled envelope becomes an exception. The fields of a failure already contain its state.
	if a.Claim != "" {
		if a.fate.End != Retrying {
			set = append(set, bson.E{Key: "state", Value: a.heldState})
		}
		set = append(set,
			bson.E{Key: "origin", Value: outboxes.OriginScheduled},
			bson.E{Key: "pos", Value: mongodb.Literal(a.Pos)},
			bson.E{Key: "seal", Value: f.config.Seal},
			wasDue)
		if a.Key != "" {
			set = append(set, bson.E{Key: "key", Value: mongodb.Literal(a.Key)})
		}
		unset = bson.A{"dueAt", "claim"}
	}

	p := mongo.Pipeline{{{Key: "$set", Value: set}}}
	// MongoDB rejects an empty stage.
	if len(unset) > 0 {
		p = append(p, bson.D{{Key: "$unset", Value: unset}})
	}
	return update.SetFilter(filter).SetUpdate(p)
}

// failedFields returns the fields that record a failed attempt.
func (f *Finisher) failedFields(a *decision) bson.D {
	failure := a.failure.attemptFields(f.config.Source.Node)
	past := bson.D{{Key: "$concatArrays", Value: bson.A{arrayOf("$history"), bson.A{failure}}}}
	return bson.D{
		{Key: "state", Value: "retry"},
		{Key: "attempts", Value: a.Attempts + 1},
		{Key: "nextAt", Value: timeAfter(f.config.Retry.Delay(int(a.Attempts)))},
		{Key: "lastError", Value: failure},
		{Key: "history", Value: bson.D{{Key: "$slice", Value: bson.A{past, -record.KeptAttempts}}}},
	}
}
