package agenda

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/pkg/event"
)

// partSize is the number of events that one statement of an operator's action changes.
const partSize = 1000

// Report gets the progress of an action of an operator. A nil function is not called.
type Report struct {
	Did func(n int64) // after each part, with the number of the events so far
	// Missed is called for each event of a query with ids that was scheduled when the action found it, and was not any more when the action
	// wanted to change it: a watcher has claimed it.
	Missed func(id event.ID)
}

// CancelInParts is [CancelMatching] for an operator: it changes 1,000 events at a time, or each alone if the query names them, and reports
// each of these parts. After an error some of the events are gone. ctx must have no transaction.
func CancelInParts(ctx context.Context, coll *mongo.Collection, query Query, report Report) (n int64, err error) {
	return query.changeInParts(ctx, coll, bson.D{}, report, func(part bson.D) (int64, error) {
		res, err := coll.DeleteMany(ctx, part)
		if err != nil {
			return 0, err
		}
		return res.DeletedCount, nil
	})
}

// MoveInParts sets the due time of the events that query selects to dueAt, and returns the number of the events that had another one. It
// works like [CancelInParts].
func MoveInParts(ctx context.Context, coll *mongo.Collection, query Query, dueAt time.Time, report Report) (n int64, err error) {
	if err := CheckTime(dueAt); err != nil {
		return 0, err
	}

	// The cursor walks along the index of the due times. It must not find events again that were moved to a place before it.
	due := bson.NewDateTimeFromTime(dueAt)
	isElsewhere := bson.D{{Key: "dueAt", Value: bson.D{{Key: "$ne", Value: due}}}}
	set := bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: due}}}}
	return query.changeInParts(ctx, coll, isElsewhere, report, func(part bson.D) (int64, error) {
		res, err := coll.UpdateMany(ctx, part, set)
		if err != nil {
			return 0, err
		}
		return res.ModifiedCount, nil
	})
}

// changeInParts calls change with a filter for each part of the events that q selects and condition too, and returns the sum of its results.
// It ends at the first error. An event that a watcher claims in the meantime matches the filter of its part no more.
func (q Query) changeInParts(
	ctx context.Context, coll *mongo.Collection, condition bson.D, report Report, change func(part bson.D) (int64, error),
) (n int64, err error) {
	filter, err := q.buildFilter()
	if err != nil {
		return 0, err
	}
	filter = listing.All(filter, condition)

	size := partSize
	if q.IDs != nil && report.Missed != nil {
		// Only the result of a part with one event shows which event was missed.
		size = 1
	}
	// A part has its own ids, and there may be thousands of named ones.
	q.IDs = nil
	partFilter, err := q.buildFilter()
	if err != nil {
		return 0, err
	}
	partFilter = listing.All(partFilter, condition)

	cursor, err := cursor.Find(ctx, coll, filter, options.Find().SetProjection(bson.D{{Key: "_id", Value: 1}}).SetBatchSize(partSize))
	if err != nil {
		return 0, err
	}
	defer cursor.Close(context.WithoutCancel(ctx))

	var ids bson.A
	changePart := func() error {
		changed, err := change(listing.All(partFilter, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}))
		if err == nil && changed == 0 && size == 1 && report.Missed != nil {
			report.Missed(idOf(ids[0].(bson.RawValue)))
		}
		n, ids = n+changed, nil
		if err == nil && report.Did != nil {
			report.Did(n)
		}
		return err
	}
	for cursor.Next(ctx) {
		id := cursor.Current.Lookup("_id")
		ids = append(ids, bson.RawValue{Type: id.Type, Value: append([]byte{}, id.Value...)})
		if len(ids) < size {
			continue
		}
		if err := changePart(); err != nil {
			return n, err
		}
	}
	if err := cursor.Err(); err != nil || len(ids) == 0 {
		return n, err
	}
	return n, changePart()
}
