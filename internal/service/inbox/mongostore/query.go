package mongostore

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// Counts returns the sizes of the inbox. The number of markers comes from the metadata of the
// collection, so it costs nothing.
func (s *Store) Counts(ctx context.Context) (inbox.Counts, error) {
	var counts inbox.Counts
	var errs [3]error
	counts.Markers, errs[0] = s.markers.EstimatedDocumentCount(ctx)
	counts.Claimed, errs[1] = s.claims.CountDocuments(ctx, bson.D{})
	counts.Expired, errs[2] = s.claims.CountDocuments(ctx, expiredFilter("until"))
	if err := errors.Join(errs[:]...); err != nil {
		return inbox.Counts{}, fmt.Errorf("counting: %w", err)
	}
	return counts, nil
}

// expiredFilter returns a filter for documents whose date in the field is in the past, by the
// server's clock.
func expiredFilter(field string) bson.D {
	return bson.D{{Key: "$expr", Value: bson.D{{Key: "$lte", Value: bson.A{"$" + field, "$$NOW"}}}}}
}

// sweepBatch is the number of markers that one statement deletes.
const sweepBatch = 5_000

// Sweep deletes at most limit expired markers, the oldest first, and returns their number.
func (s *Store) Sweep(ctx context.Context, limit int) (removed int64, err error) {
	for left := limit; left > 0; left -= sweepBatch {
		n, full, err := s.sweepOnce(ctx, min(left, sweepBatch))
		removed += n
		if err != nil || !full {
			return removed, err
		}
	}
	return removed, nil
}

// sweepOnce deletes at most limit markers. full reports whether it found that many.
func (s *Store) sweepOnce(ctx context.Context, limit int) (removed int64, full bool, err error) {
	find := options.Find().
		// The markers that expired first go first, so that none stays behind forever.
		SetSort(bson.D{{Key: "k", Value: 1}}).
		SetLimit(int64(limit)).
		SetProjection(bson.D{{Key: "_id", Value: 1}})

	// A deletion has no limit, so the ids are read first.
	cur, err := cursor.Find(ctx, s.markers, expiredFilter("k"), find)
	type marker struct {
		ID bson.Raw `bson:"_id"`
	}
	docs, err := cursor.All[marker](ctx, "reading expired markers", cur, err)
	if err != nil || len(docs) == 0 {
		return 0, false, err
	}

	ids := make(bson.A, len(docs))
	for i, d := range docs {
		ids[i] = d.ID
	}

	// The condition is checked again, because a message that was claimed in the meantime has a new
	// date.
	filter := append(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, expiredFilter("k")...)
	res, err := s.markers.DeleteMany(ctx, filter)
	if err != nil {
		return 0, false, err
	}

	return res.DeletedCount, len(docs) == limit, nil
}
