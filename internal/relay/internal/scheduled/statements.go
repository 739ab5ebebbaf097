package scheduled

import (
	"context"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// maxClaim is how many scheduled envelopes one fenced transaction claims at most (N3).
const maxClaim = mongodb.MaxDocuments

// scheduledUntil opens a cursor over the scheduled envelopes of coll that are due by latest, in the order of their due times. They
// have `_id` and `dueAt`. Its replies have up to batch documents.
func scheduledUntil(ctx context.Context, coll *mongo.Collection, latest time.Time, batch int32, slot slot.Range) (*mongo.Cursor, error) {
	filter := slot.AddFilter(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(latest)}}}})
	cur, err := mongodb.Majority(coll).Find(ctx, filter, // N21
		options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}, {Key: "dueAt", Value: 1}}).
			SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetBatchSize(batch).SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "looking for scheduled envelopes in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	return cur, nil
}

// errFull means that there are more envelopes than one transaction may hold.
var errFull = errors.New("the claim is full")

// takeDue reads the envelopes of coll among ids that are due by the server's clock within ahead, and takes them out of the outbox,
// in the transaction of tx (N19). If a service cancels or reschedules one of them at the same time, one of the two transactions is
// repeated. With mark, the envelopes stay, without a due time. It calls take for each envelope, with its due time by the clock of this
// process: no earlier than by that of the server, whatever this process takes that to be. It takes at most maxBytes, but at least one
// envelope if maxBytes is [mongodb.MaxBytes], and returns errFull if there are more.
func takeDue(
	tx context.Context, coll *mongo.Collection, ids []bson.RawValue, ahead time.Duration, mark bool, maxBytes int,
	take func(raw bson.Raw, sendAt time.Time),
) (size int, err error) {
	limit := bson.D{{Key: "$add", Value: bson.A{"$$NOW", ahead.Milliseconds()}}}
	isDue := bson.D{
		{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}},
		{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$dueAt", limit}}}},
	}
	withTime := bson.D{{Key: "_id", Value: 0}, {Key: "now", Value: "$$NOW"}, {Key: "envelope", Value: "$$ROOT"}}
	ns := mongodb.Namespace(coll)
	doing := "reading due envelopes of " + ns
	cur, err := coll.Aggregate(tx, mongo.Pipeline{{{Key: "$match", Value: isDue}}, {{Key: "$project", Value: withTime}}},
		options.Aggregate().SetHint(outboxes.PickedByID))
	if err != nil {
		return 0, mongodb.Refusal(err, doing, "find", ns)
	}
	// The server has read its clock before it replied.
	replied := time.Now()

	taken := bson.A{}
	err = mongodb.EachDocument(tx, cur, doing, func(doc bson.Raw) error {
		raw := bson.Raw(doc.Lookup("envelope").Value)
		if size+len(raw) > maxBytes && (size > 0 || maxBytes < mongodb.MaxBytes) {
			return errFull
		}
		size += len(raw)
		taken = append(taken, mongodb.CloneValue(raw.Lookup("_id")))
		now, _ := doc.Lookup("now").DateTimeOK()
		due, _ := raw.Lookup("dueAt").DateTimeOK()
		sendAt := replied
		// A difference of other times may overflow.
		if due > now {
			sendAt = replied.Add(time.Duration(due-now) * time.Millisecond)
		}
		take(append(bson.Raw(nil), raw...), sendAt)
		return nil
	})
	full := errors.Is(err, errFull)
	if err != nil && !full {
		return size, err
	}
	if len(taken) > 0 {
		if err := removeDue(tx, coll, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: taken}}}, isDue[1]}, mark, len(taken)); err != nil {
			return size, err
		}
	}
	if full {
		return size, errFull
	}
	return size, nil
}

// unmarkableError means that MongoDB rejects the change of an envelope that stays in its outbox, for example because of a validator.
type unmarkableError struct{ error }

func (e *unmarkableError) Unwrap() error { return e.error }

// removeDue takes n envelopes that filter matches out of the outbox, or marks them as due.
func removeDue(tx context.Context, coll *mongo.Collection, filter bson.D, mark bool, n int) error {
	ns := mongodb.Namespace(coll)
	if mark {
		_, err := coll.UpdateMany(tx, filter, mongo.Pipeline{
			{{Key: "$set", Value: bson.D{{Key: "scheduledFor", Value: "$dueAt"}}}},
			{{Key: "$unset", Value: bson.A{"dueAt"}}},
		}, options.UpdateMany().SetHint(outboxes.PickedByID))
		if mongodb.IsRejection(err) {
			return &unmarkableError{err}
		}
		return mongodb.Refusal(err, "claiming due envelopes of "+ns, "find and update", ns)
	}

	_, err := coll.DeleteMany(tx, filter, options.DeleteMany().SetHint(outboxes.PickedByID))
	return mongodb.Refusal(err, "claiming due envelopes of "+ns, "find and remove", ns)
}
