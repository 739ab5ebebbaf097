package scheduled

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// dueFilter returns the condition for the scheduled envelopes of a slot with due times within bounds, without those whose ids are in except. A
// claim reads and removes by the same condition in one snapshot, so it removes exactly the envelopes that it has read.
func dueFilter(slot slot.Range, bounds bson.D, except []bson.RawValue) bson.D {
	filter := bson.D{envelope.Scheduled(bounds...)}
	if len(except) > 0 {
		filter = append(filter, bson.E{Key: "_id", Value: bson.D{{Key: "$nin", Value: except}}})
	}
	return slot.AddFilter(filter)
}

// firstDue is the scheduled envelope of a collection that is due first.
type firstDue struct {
	at    int64         // due time in Unix milliseconds
	until time.Duration // from the response to the due time, by the clock of the server
}

// findFirstDue returns the scheduled envelope of coll that is due first, or nil if there is none. It reads one entry of the index.
func findFirstDue(ctx context.Context, coll *mongo.Collection, slot slot.Range, except []bson.RawValue) (*firstDue, error) {
	rows, err := mongodb.AggregateAll[struct {
		DueAt bson.DateTime `bson:"dueAt"`
		Now   bson.DateTime `bson:"now"`
	}](ctx, mongodb.Majority(coll), "looking for scheduled envelopes", mongo.Pipeline{ // N21
		{{Key: "$match", Value: dueFilter(slot, nil, except)}},
		{{Key: "$sort", Value: bson.D{{Key: "dueAt", Value: 1}}}},
		{{Key: "$limit", Value: 1}},
		{{Key: "$project", Value: bson.D{{Key: "_id", Value: 0}, {Key: "dueAt", Value: 1}, {Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	first := &firstDue{at: int64(rows[0].DueAt)}

	// A difference of other times may overflow.
	if rows[0].DueAt > rows[0].Now {
		first.until = millisecondsBetween(rows[0].Now, rows[0].DueAt)
	}
	return first, nil
}

// farAhead replaces longer times to a due time, which a duration cannot hold.
const farAhead = 24 * time.Hour

// millisecondsBetween returns the time from now to a later due time, at most [farAhead].
func millisecondsBetween(now, due bson.DateTime) time.Duration {
	if due-now > bson.DateTime(farAhead.Milliseconds()) || due-now < 0 {
		return farAhead
	}
	return time.Duration(due-now) * time.Millisecond
}

// dueBetween returns the bounds of due times, which include both. If from is zero, there is no lower bound.
//
// MongoDB keeps the entries of removed envelopes in the index for minutes (minSnapshotHistoryWindowInSeconds), and a read without a
// lower bound passes all of them.
func dueBetween(from, until bson.DateTime) bson.D {
	bounds := bson.D{{Key: "$lte", Value: until}}
	if from != 0 {
		bounds = append(bounds, bson.E{Key: "$gte", Value: from})
	}
	return bounds
}

// serverClock is the clock of the server as one statement of a transaction has read it.
type serverClock struct {
	now       bson.DateTime
	responded time.Time // the server had read its clock by then
}

// readClock reads the clock of the server, in the transaction of tx. Only a read of a document returns it. The watcher document always exists
// there, and unlike the first document of an outbox, it is found without passing removed ones.
func readClock(tx context.Context, watchers *mongo.Collection, id string) (serverClock, error) {
	rows, err := mongodb.AggregateAll[struct {
		Now bson.DateTime `bson:"now"`
	}](tx, watchers, "reading the clock of the server", mongo.Pipeline{
		{{Key: "$match", Value: bson.D{{Key: "_id", Value: id}}}},
		{{Key: "$project", Value: bson.D{{Key: "_id", Value: 0}, {Key: "now", Value: "$$NOW"}}}},
	})
	if err != nil {
		return serverClock{}, err
	}
	if len(rows) == 0 {
		return serverClock{}, fmt.Errorf("reading the clock of the server: the watcher document %q is gone", id)
	}
	return serverClock{now: rows[0].Now, responded: time.Now()}, nil
}

// localTime returns a due time by the clock of this process: no earlier than by that of the server, whatever this process takes that to be.
func (c serverClock) localTime(due bson.DateTime) time.Time {
	if due <= c.now {
		return c.responded
	}
	return c.responded.Add(millisecondsBetween(c.now, due))
}

// query selects the envelopes that a claim takes from a collection.
type query struct {
	slot   slot.Range
	ids    []bson.RawValue // only these; nil: all that are due
	except []bson.RawValue // not these
	from   bson.DateTime   // none that is due earlier; 0: no bound
	limit  int             // envelopes
	bytes  int             // of envelopes, but one may be larger if bytes is maxClaimBytes
	mark   bool            // they stay in the outbox, without a due time
}

// taken is an envelope that a claim takes.
type taken struct {
	raw bson.Raw
	due bson.DateTime
}

func (t *taken) id() bson.RawValue { return t.raw.Lookup("_id") }

// readDue reads the envelopes of coll that query selects and that are due by latest, in the order of their due times, in the transaction of tx.
// full reports that query has limited the envelopes, so that more may be due. After an error, list has the envelopes that were read.
func readDue(tx context.Context, coll *mongo.Collection, query *query, latest bson.DateTime) (list []taken, full bool, err error) {
	filter := dueFilter(query.slot, dueBetween(query.from, latest), query.except)
	find := options.Find().SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetLimit(int64(query.limit)).SetBatchSize(int32(query.limit))
	if query.ids != nil {
		filter = append(filter, bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: query.ids}}})
		find.SetHint(outboxes.PickedByID)
	}

	size := 0
	err = mongodb.FindEach(tx, coll, "reading due envelopes", filter, func(raw bson.Raw) error {
		if size+len(raw) > query.bytes && (size > 0 || query.bytes < maxClaimBytes) {
			full = true
			return errFull
		}
		size += len(raw)
		due, _ := raw.Lookup("dueAt").DateTimeOK()
		// The bytes of a response are never used again, and mostly all of its envelopes have the same due time.
		list = append(list, taken{raw, bson.DateTime(due)})
		return nil
	}, find)
	if err != nil && !errors.Is(err, errFull) {
		return list, false, err
	}
	return list, full || len(list) == query.limit, nil
}

// errFull ends the read of a claim that has no room for more envelopes.
var errFull = errors.New("the claim is full")

// removeTaken takes the envelopes that readDue has returned out of the outbox, in the same transaction (N19). If a service cancels or
// reschedules one of them at the same time, one of the two transactions is repeated. A range of due times costs the server much less than a
// list of ids, so only the last due time is removed by ids if other envelopes that are due at that time stay.
func removeTaken(tx context.Context, coll *mongo.Collection, query *query, list []taken, full bool) error {
	if len(list) == 0 {
		return nil
	}
	from, last, first := list[0].due, list[len(list)-1].due, 0
	if query.ids == nil && !full {
		return removeDue(tx, coll, dueFilter(query.slot, dueBetween(from, last), query.except), nil, query.mark, len(list))
	}

	if query.ids == nil {
		for first = len(list); first > 0 && list[first-1].due == last; {
			first--
		}
		if first > 0 {
			if err := removeDue(tx, coll, dueFilter(query.slot, dueBetween(from, list[first-1].due), query.except), nil, query.mark, first); err != nil {
				return err
			}
		}
	}
	ids := make([]bson.RawValue, 0, len(list)-first)
	for i := range list[first:] {
		ids = append(ids, list[first+i].id())
	}
	byID := append(dueFilter(query.slot, dueBetween(0, last), nil), bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}})
	return removeDue(tx, coll, byID, outboxes.PickedByID, query.mark, len(ids))
}

// unmarkableError means that MongoDB rejects the change of an envelope that stays in its outbox, for example because of a validator.
type unmarkableError struct{ error }

func (e *unmarkableError) Unwrap() error { return e.error }

// removeDue takes the n envelopes that filter matches out of the outbox, or marks them as due. hint is the index, or nil.
func removeDue(tx context.Context, coll *mongo.Collection, filter, hint bson.D, mark bool, n int) error {
	ns := mongodb.Namespace(coll)
	var removed int64
	if mark {
		update := options.UpdateMany()
		if hint != nil {
			update.SetHint(hint)
		}
		result, err := coll.UpdateMany(tx, filter, mongo.Pipeline{
			{{Key: "$set", Value: bson.D{{Key: "scheduledFor", Value: "$dueAt"}}}},
			{{Key: "$unset", Value: bson.A{"dueAt"}}},
		}, update)
		if mongodb.IsRejection(err) {
			return &unmarkableError{err}
		}
		if err != nil {
			return mongodb.DescribeError(err, "claiming due envelopes of "+ns, "find and update", ns)
		}
		removed = result.MatchedCount
	} else {
		remove := options.DeleteMany()
		if hint != nil {
			remove.SetHint(hint)
		}
		result, err := coll.DeleteMany(tx, filter, remove)
		if err != nil {
			return mongodb.DescribeError(err, "claiming due envelopes of "+ns, "find and remove", ns)
		}
		removed = result.DeletedCount
	}

	// Without this check, a difference between the two statements would lose envelopes.
	if removed != int64(n) {
		return fmt.Errorf("claiming due envelopes of %s: the server has removed %d of the %d that it has read", ns, removed, n)
	}
	return nil
}
