package outboxes

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// MaxCounted is how many outboxes are counted in one round. With more, each round counts others, so the load does not grow with their
// number.
const MaxCounted = 32

// NextToCount returns the sorted outboxes that a round counts: up to [MaxCounted], after the last one of the round before, which
// may be gone by now.
func NextToCount(names []string, last string) []string {
	if len(names) <= MaxCounted {
		return names
	}

	from, found := slices.BinarySearch(names, last)
	if found {
		from++
	}
	next := make([]string, MaxCounted)
	for i := range next {
		next[i] = names[(from+i)%len(names)]
	}
	return next
}

// CountAfter counts the envelopes of coll with a stamp later than position, up to limit. It also returns the
// oldest of these stamps, or zero if there is none. It reads at most limit entries of the index on ts. The
// envelopes of a long transaction may have a stamp before position, and are not counted. It returns [ErrNotIndexed] instead of reading
// a large collection.
func CountAfter(
	ctx context.Context, coll *mongo.Collection, position bson.Timestamp, limit int64,
) (n int64, oldest bson.Timestamp, err error) {
	// The count reads the index only, so it includes lists that contain a later stamp.
	within := bson.E{Key: "$gt", Value: position}
	counted, stamped := bson.D{{Key: "ts", Value: bson.D{within}}}, bson.D{envelope.Stamped(within)}
	n, first, err := countAndFirst(ctx, coll, "envelopes", counted, stamped, Indexes{Purge: true}, "ts", limit)
	if oldest.T, oldest.I, _ = first.TimestampOK(); oldest.IsZero() {
		n = 0
	}
	return n, oldest, err
}

// ErrNotIndexed is returned by a count of a collection that is large, and lacks the index for it.
var ErrNotIndexed = errors.New("the collection is large and has no index for the count")

const (
	// countUnindexed is the number of documents up to which a collection is read for a count.
	countUnindexed = 10_000
	codeBadValue   = 2 // returned for a hint to an index that does not exist
)

// countAndFirst counts the envelopes that filter matches, up to limit, and returns the lowest value of field among the envelopes that
// firstFilter matches. The value is missing if there is none. what names the envelopes in errors.
func countAndFirst(
	ctx context.Context, coll *mongo.Collection, what string, filter, firstFilter bson.D, indexes Indexes, field string, limit int64,
) (n int64, first bson.RawValue, err error) {
	ns := mongodb.Namespace(coll)
	n, err = coll.CountDocuments(ctx, filter, options.Count().SetLimit(limit).SetHint(indexes.List()[0].Keys))
	if mongodb.HasCode(err, codeBadValue) {
		size, sizeErr := coll.EstimatedDocumentCount(ctx)
		switch {
		case sizeErr != nil:
			return 0, first, mongodb.DescribeError(sizeErr, "counting "+what+" of "+ns, "find", ns)
		case size > countUnindexed:
			return 0, first, fmt.Errorf("counting %s of %s: %w", what, ns, ErrNotIndexed)
		}
		err = mongodb.ReadUnindexed(func(hint any) (err error) {
			n, err = coll.CountDocuments(ctx, filter, options.Count().SetLimit(limit).SetHint(hint))
			return err
		})
	}
	if err != nil {
		return 0, first, mongodb.DescribeError(err, "counting "+what+" of "+ns, "find", ns)
	}
	if n == 0 {
		return 0, first, nil
	}

	opts := options.FindOne().SetSort(bson.D{{Key: field, Value: 1}}).
		SetProjection(bson.D{{Key: field, Value: 1}, {Key: "_id", Value: 0}})
	var raw bson.Raw
	err = mongodb.ReadUnindexed(func(hint any) (err error) {
		raw, err = coll.FindOne(ctx, firstFilter, opts.SetHint(hint)).Raw()
		return err
	})

	// The envelope may have been deleted or sent after the count.
	if err != nil && !errors.Is(err, mongo.ErrNoDocuments) {
		return n, first, fmt.Errorf("reading the first of the %s of %s: %w", what, ns, err)
	}
	return n, raw.Lookup(field), nil
}

// CountDue counts the scheduled envelopes of coll in the slot, up to limit. It also returns the time at which the first is
// due, or zero if there is none. It reads at most limit entries of the index on dueAt, and no envelope, or returns [ErrNotIndexed] as
// [CountAfter] does.
func CountDue(
	ctx context.Context, coll *mongo.Collection, slot slot.Range, limit int64,
) (n int64, first time.Time, err error) {
	counted, scheduled := slot.AddFilter(bson.D{envelope.ScheduledEntry()}), slot.AddFilter(bson.D{envelope.Scheduled()})
	n, value, err := countAndFirst(ctx, coll, "scheduled envelopes", counted, scheduled, Indexes{Scheduled: true}, "dueAt", limit)
	ms, found := value.DateTimeOK()
	if !found {
		return 0, first, err
	}
	return n, time.UnixMilli(ms).UTC(), err
}

// OldestTS returns the oldest server stamp in coll, and false if no document has one. Unstamped documents
// (0,0, missing, or not a Timestamp) do not count.
func OldestTS(ctx context.Context, coll *mongo.Collection) (bson.Timestamp, bool, error) {
	var doc struct {
		TS bson.Timestamp `bson:"ts"`
	}
	stamped := bson.D{envelope.Stamped(bson.E{Key: "$gt", Value: bson.Timestamp{}})}
	opts := options.FindOne().SetSort(bson.D{{Key: "ts", Value: 1}}).
		SetProjection(bson.D{{Key: "_id", Value: 0}, {Key: "ts", Value: 1}})
	err := mongodb.ReadUnindexed(func(hint any) error {
		return mongodb.Majority(coll).FindOne(ctx, stamped, opts.SetHint(hint)).Decode(&doc)
	})
	if errors.Is(err, mongo.ErrNoDocuments) {
		return bson.Timestamp{}, false, nil
	}
	if err != nil {
		ns := mongodb.Namespace(coll)
		return bson.Timestamp{}, false, mongodb.DescribeError(err, "reading the oldest envelope of "+ns, "find", ns)
	}

	return doc.TS, true, nil
}
