package mongostore

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/service/inbox"
)

// ReadLeases returns the stored leases with these ids.
func (s *Store) ReadLeases(ctx context.Context, ids []inbox.ID) (map[inbox.ID]inbox.Lease, error) {
	cur, err := cursor.Aggregate(ctx, s.claims, bson.A{
		bson.D{{Key: "$match", Value: idsFilter(ids)}},
		// The server's clock decides whether a lease is live, as when the lease was taken.
		bson.D{{Key: "$set", Value: bson.D{{Key: "live", Value: bson.D{{Key: "$gt", Value: bson.A{"$until", "$$NOW"}}}}}}},
	})
	return readByID[inbox.Lease](ctx, "reading claims", cur, err)
}

// AcquireLease acquires the lease if it has expired by the server's clock. The epoch is the time in
// milliseconds, or one more than the last epoch. So it increases even if the document was deleted
// in between.
func (s *Store) AcquireLease(ctx context.Context, id inbox.ID, owner string, duration time.Duration) (lease inbox.Lease, err error) {
	until := bson.D{{Key: "$ifNull", Value: bson.A{"$until", bson.DateTime(0)}}}
	free := bson.D{{Key: "$lte", Value: bson.A{until, "$$NOW"}}}
	nextEpoch := bson.D{{Key: "$add", Value: bson.A{bson.D{{Key: "$ifNull", Value: bson.A{"$e", int64(0)}}}, int64(1)}}}
	taken := bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "o", Value: owner},
		{Key: "e", Value: bson.D{{Key: "$max", Value: bson.A{nextEpoch, bson.D{{Key: "$toLong", Value: "$$NOW"}}}}}},
		{Key: "until", Value: mongodb.AfterNow(duration)},
	}

	err = s.claims.FindOneAndUpdate(ctx, idFilter(id), replaceIf(free, taken), upsertOptions()).Decode(&lease)
	return lease, err
}

// ownLeaseFilter returns a filter for the lease while the owner holds it.
func ownLeaseFilter(id inbox.ID, owner string) bson.D {
	return append(idFilter(id), bson.E{Key: "o", Value: owner})
}

// updateLease updates the lease by a pipeline, if the owner still holds it.
func (s *Store) updateLease(ctx context.Context, id inbox.ID, owner string, update ...any) (ok bool, err error) {
	res, err := s.claims.UpdateOne(ctx, ownLeaseFilter(id, owner), bson.A(update))
	if err != nil {
		return false, err
	}
	return res.MatchedCount > 0, nil
}

// RaiseEpoch sets the epoch of the lease, if the owner still holds it.
func (s *Store) RaiseEpoch(ctx context.Context, id inbox.ID, holder inbox.Holder) (ok bool, err error) {
	return s.updateLease(ctx, id, holder.Owner, bson.D{{Key: "$set", Value: bson.D{{Key: "e", Value: holder.Epoch}}}})
}

// RenewLease extends the lease to duration from now, if the owner still holds it.
func (s *Store) RenewLease(ctx context.Context, id inbox.ID, owner string, duration time.Duration) (ok bool, err error) {
	return s.updateLease(ctx, id, owner, bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: mongodb.AfterNow(duration)}}}})
}

// ReleaseLease removes the owner from the lease, which ends after duration, if the owner still holds it.
func (s *Store) ReleaseLease(ctx context.Context, id inbox.ID, owner string, duration time.Duration) error {
	_, err := s.updateLease(ctx, id, owner,
		bson.D{{Key: "$set", Value: bson.D{{Key: "until", Value: mongodb.AfterNow(duration)}}}},
		bson.D{{Key: "$unset", Value: "o"}})
	return err
}

// DeleteLease deletes the lease if the owner still holds it.
func (s *Store) DeleteLease(ctx context.Context, id inbox.ID, owner string) error {
	_, err := s.claims.DeleteOne(ctx, ownLeaseFilter(id, owner))
	return err
}
