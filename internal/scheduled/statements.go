package scheduled

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/slot"
)

// maxClaim is how many scheduled envelopes one fenced transaction claims at most (N3).
const maxClaim = mongodb.MaxDocuments

// scheduledUntil opens a cursor over the scheduled envelopes of coll that are due by until, in the order of their due times. They
// have `_id` and `dueAt`. Its replies have up to batch documents.
func scheduledUntil(ctx context.Context, coll *mongo.Collection, until time.Time, batch int32, p slot.Range) (*mongo.Cursor, error) {
	filter := p.AddFilter(bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bson.NewDateTimeFromTime(until)}}}})
	cur, err := mongodb.Majority(coll).Find(ctx, filter, // N21
		options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}, {Key: "dueAt", Value: 1}}).
			SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetBatchSize(batch).SetAllowDiskUse(true))
	if err != nil {
		return nil, mongodb.Refusal(err, "looking for scheduled envelopes in "+mongodb.Namespace(coll), "find", mongodb.Namespace(coll))
	}
	return cur, nil
}

// takeDue reads the envelopes of coll among ids that are due by the server's clock within ahead, and takes them out of the outbox,
// in the transaction of tx (N19). If a service cancels or reschedules one of them at the same time, one of the two transactions is
// repeated. With mark, the envelopes stay, without a due time. It calls take for each envelope, and stops after about maxBytes.
func takeDue(
	tx context.Context, coll *mongo.Collection, ids []bson.RawValue, ahead time.Duration, mark bool, maxBytes int, take func(raw bson.Raw),
) (size int, err error) {
	limit := bson.D{{Key: "$add", Value: bson.A{"$$NOW", ahead.Milliseconds()}}}
	isDue := bson.D{
		{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}},
		{Key: "dueAt", Value: bson.D{{Key: "$type", Value: "date"}}},
		{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$dueAt", limit}}}},
	}
	ns := mongodb.Namespace(coll)
	cur, err := coll.Find(tx, isDue, options.Find().SetHint(outboxes.PickedByID))
	if err != nil {
		return 0, mongodb.Refusal(err, "reading due envelopes of "+ns, "find", ns)
	}

	taken := bson.A{}
	err = mongodb.EachDocument(tx, cur, "reading due envelopes of "+ns, func(raw bson.Raw) error {
		// The others are claimed next.
		if size > 0 && size+len(raw) > maxBytes {
			return nil
		}
		size += len(raw)
		taken = append(taken, mongodb.CloneValue(raw.Lookup("_id")))
		take(append(bson.Raw(nil), raw...))
		return nil
	})
	if err != nil || len(taken) == 0 {
		return size, err
	}

	filter := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: taken}}}, isDue[1]}
	if mark {
		_, err = coll.UpdateMany(tx, filter, mongo.Pipeline{
			{{Key: "$set", Value: bson.D{{Key: "scheduledFor", Value: "$dueAt"}}}},
			{{Key: "$unset", Value: bson.A{"dueAt"}}},
		}, options.UpdateMany().SetHint(outboxes.PickedByID))
		return size, mongodb.Refusal(err, "claiming due envelopes of "+ns, "find and update", ns)
	}
	_, err = coll.DeleteMany(tx, filter, options.DeleteMany().SetHint(outboxes.PickedByID))
	return size, mongodb.Refusal(err, "claiming due envelopes of "+ns, "find and remove", ns)
}
