package waiting

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/record"
)

// OutcomeKind is the fate of an envelope that was published outside of the stream's order.
type OutcomeKind uint8

// The fates that are written on a document. Package deadletter moves a dead envelope.
const (
	OutcomeSent     OutcomeKind = iota // each target has it
	OutcomeNarrowed                    // some targets have it; it waits for the others as before
	OutcomeFailed                      // a target refused it; it is tried again
	OutcomeHeld                        // a scheduled envelope that has to wait, and becomes an exception
	OutcomeDropped                     // it expired and is discarded
)

// SentTo is the position of a record in Kafka, as recording mark stores it.
type SentTo struct {
	Topic     string `bson:"topic"`
	Partition int32  `bson:"partition"`
	Offset    int64  `bson:"offset"`
}

// Outcome is the fate of one envelope, to be written on its document.
type Outcome struct {
	Fate     OutcomeKind
	NS       string
	ID       bson.RawValue
	Delivery int32  // as it was read: a later one is another's to finish
	Claim    string // token of a scheduled envelope's claim (N19); "" for an exception
	Attempts int32  // as it was read

	Delete  bool     // OutcomeSent: remove the document (recording delete)
	Sent    []SentTo // targets that have it now, for recording mark; else nil
	Pending []string // targets that are left; nil: all that it routes to

	Delay time.Duration // OutcomeFailed: until the next attempt
	Error *ExceptionError
	Node  string

	// Seal is the seal of the state database, see [outboxes.Registry.Seal]. A scheduled envelope that gets a
	// state needs it.
	Seal            []byte
	State, Pos, Key string // the state of a scheduled envelope with OutcomeHeld; with OutcomeFailed it is retry
}

// WriteOutcomes writes the fates of envelopes, inside a transaction that holds the fence (N3). It is idempotent.
// It does not change a document that was deleted or changed in the meantime: each statement requires the id, the
// delivery, and that the document is still an exception or has the claim. It returns the number of documents that
// matched. A repetition may match fewer, because the first attempt has already written some.
func WriteOutcomes(tx context.Context, list []Outcome) (matched int64, err error) {
	s := mongo.SessionFromContext(tx)
	if s == nil {
		return 0, mongodb.ErrNoTransaction
	}

	for _, b := range outcomeBatches(list) {
		coll := outboxes.CollectionOf(s.Client(), b.ns)
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

// same identifies outcomes that one statement can write.
type same struct {
	claim    string
	delivery int32
	delete   bool
}

// outcomeBatch holds the statements for one collection.
type outcomeBatch struct {
	ns     string
	many   map[same]bson.A
	order  []same
	single []mongo.WriteModel
}

// outcomeBatches groups outcomes by collection, in the order of their first outcomes.
func outcomeBatches(list []Outcome) []*outcomeBatch {
	var order []*outcomeBatch
	byNS := map[string]*outcomeBatch{}
	for i := range list {
		o := &list[i]

		b := byNS[o.NS]
		if b == nil {
			b = &outcomeBatch{ns: o.NS, many: map[same]bson.A{}}
			byNS[o.NS] = b
			order = append(order, b)
		}
		b.addOutcome(o)
	}

	return order
}

// addOutcome adds an outcome to the batch. Outcomes that need the same update share a statement.
func (b *outcomeBatch) addOutcome(o *Outcome) {
	if o.Fate != OutcomeDropped && (o.Fate != OutcomeSent || o.Sent != nil) {
		b.single = append(b.single, o.updateModel())
		return
	}

	k := same{o.Claim, o.Delivery, o.Delete || o.Fate == OutcomeDropped}
	if b.many[k] == nil {
		b.order = append(b.order, k)
	}
	b.many[k] = append(b.many[k], o.ID)
}

// writeModels returns the statements of the batch.
func (b *outcomeBatch) writeModels() []mongo.WriteModel {
	out := b.single
	for _, k := range b.order {
		filter := matchPublished(bson.D{{Key: "$in", Value: b.many[k]}}, k.claim, k.delivery)
		if k.delete {
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

// forgotten lists the fields of an exception or of a claim, which a finished envelope no longer has.
var forgotten = bson.A{
	"state", "pos", "pending", "attempts", "nextAt", "lastError", "history", "claim", "origin", "dueAt", "redelivered",
}

// sentUpdate returns the update that marks an envelope as sent. It sets the current time, so that retention counts
// from the delivery.
func sentUpdate(sent []SentTo) mongo.Pipeline {
	set := bson.D{{Key: "sentAt", Value: "$$NOW"}, {Key: "ts", Value: "$$CLUSTER_TIME"}, {Key: "firstTs", Value: outboxes.FirstStamp}, wasDue}
	if sent != nil {
		set = append(set, bson.E{Key: "sent", Value: addPositions(sent)})
	}
	return mongo.Pipeline{{{Key: "$set", Value: set}}, {{Key: "$unset", Value: forgotten}}}
}

// wasDue stores the due time of a scheduled envelope in a field that no index and no filter uses.
var wasDue = bson.E{Key: "scheduledFor", Value: bson.D{
	{Key: "$ifNull", Value: bson.A{"$dueAt", "$scheduledFor", "$$REMOVE"}},
}}

// addPositions returns an expression that adds positions to `sent`. It adds no duplicates, because the statement may be
// repeated.
func addPositions(sent []SentTo) bson.D {
	return bson.D{{Key: "$setUnion", Value: bson.A{arrayOf("$sent"), mongodb.Literal(sent)}}}
}

// arrayOf returns an expression for the array in a field, or an empty array if the field has none.
func arrayOf(field string) bson.D {
	return bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$isArray", Value: field}}, field, bson.A{}}}}
}

// updateModel returns the statement that writes the outcome on its own.
func (o *Outcome) updateModel() mongo.WriteModel {
	filter := matchPublished(o.ID, o.Claim, o.Delivery)
	switch o.Fate {
	case OutcomeSent:
		return mongo.NewUpdateOneModel().SetHint(outboxes.PickedByID).SetFilter(filter).SetUpdate(sentUpdate(o.Sent))
	case OutcomeFailed:
		// A repetition of the statement must not count a second attempt.
		filter = append(filter, sameNumber("attempts", o.Attempts))
	case OutcomeNarrowed, OutcomeHeld, OutcomeDropped:
	}

	set, unset := bson.D{}, bson.A{}
	if o.Pending != nil {
		set = append(set, bson.E{Key: "pending", Value: mongodb.Literal(o.Pending)})
	}
	if o.Sent != nil {
		set = append(set, bson.E{Key: "sent", Value: addPositions(o.Sent)})
	}
	if o.Fate == OutcomeFailed {
		set = append(set, o.failedFields()...)
	}

	// A scheduled envelope becomes an exception. The fields of a failure already contain its state.
	if o.Claim != "" {
		if o.Fate != OutcomeFailed {
			set = append(set, bson.E{Key: "state", Value: mongodb.Literal(o.State)})
		}
		set = append(set,
			bson.E{Key: "origin", Value: outboxes.OriginScheduled},
			bson.E{Key: "pos", Value: mongodb.Literal(o.Pos)},
			bson.E{Key: "seal", Value: o.Seal},
			wasDue)
		if o.Key != "" {
			set = append(set, bson.E{Key: "key", Value: mongodb.Literal(o.Key)})
		}
		unset = bson.A{"dueAt", "claim"}
	}

	// MongoDB rejects an empty stage.
	p := mongo.Pipeline{}
	if len(set) > 0 {
		p = append(p, bson.D{{Key: "$set", Value: set}})
	}
	if len(unset) > 0 {
		p = append(p, bson.D{{Key: "$unset", Value: unset}})
	}
	return mongo.NewUpdateOneModel().SetHint(outboxes.PickedByID).SetFilter(filter).SetUpdate(p)
}

// failedFields returns the fields that record a failed attempt.
func (o *Outcome) failedFields() bson.D {
	past := bson.D{{Key: "$concatArrays", Value: bson.A{arrayOf("$history"), bson.A{o.Error.attemptFields(o.Node)}}}}
	return bson.D{
		{Key: "state", Value: "retry"},
		{Key: "attempts", Value: o.Attempts + 1},
		{Key: "nextAt", Value: timeAfter(o.Delay)},
		{Key: "lastError", Value: o.Error.lastErrorFields()},
		{Key: "history", Value: bson.D{{Key: "$slice", Value: bson.A{past, -record.KeptAttempts}}}},
	}
}

// Check returns an error if an outcome is invalid. Call it before the outcome goes into a transaction.
func (o *Outcome) Check() error {
	switch {
	case o.ID.Type == 0:
		return fmt.Errorf("outcome of %s: it has no id", o.NS)
	case o.Fate == OutcomeFailed && o.Error == nil:
		return fmt.Errorf("outcome of %s: a failed attempt has no error", o.NS)
	case o.Fate == OutcomeHeld && (o.Claim == "" || o.State == ""):
		return fmt.Errorf("outcome of %s: OutcomeHeld needs a claim and a state", o.NS)
	case o.Claim != "" && o.Fate == OutcomeNarrowed:
		return fmt.Errorf("outcome of %s: a claimed envelope needs OutcomeHeld instead of OutcomeNarrowed", o.NS)
	}
	return nil
}
