package migrate

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// errLockLost ends the work of a holder whose lock lapsed and was taken by another. Nothing is harmed by what it did:
// steps may run twice.
var errLockLost = errors.New("the migration lock was taken by another process")

const (
	lockID         = "lock" // beside the ledger's entries
	defaultTTL     = 30 * time.Second
	releaseTimeout = 5 * time.Second // what a slow server may take for it: else everybody waits for its end
)

// lockDoc is the lock. Its times are the server's.
type lockDoc struct {
	Owner     string    `bson:"owner"`
	Node      string    `bson:"node"`
	Version   string    `bson:"version"`
	Since     time.Time `bson:"since"`
	ExpiresAt time.Time `bson:"expiresAt"`
}

// lock is held by one process at a time, while it renews it.
type lock struct {
	coll                 *mongo.Collection
	owner, node, version string
	ttl                  time.Duration
}

func newLock(coll *mongo.Collection, node, version string, ttl time.Duration) *lock {
	return &lock{coll: coll, owner: node + "/" + uuid.NewString(), node: node, version: version, ttl: ttl}
}

// tryAcquire tries once. The server judges by its own clock, in one statement, whether the lock is free.
func (l *lock) tryAcquire(ctx context.Context) (bool, error) {
	lit := func(v any) bson.D { return bson.D{{Key: "$literal", Value: v}} }
	expires := bson.D{{Key: "$ifNull", Value: bson.A{"$expiresAt", time.UnixMilli(0)}}}
	taken := bson.D{
		{Key: "_id", Value: lockID},
		{Key: "owner", Value: lit(l.owner)},
		{Key: "node", Value: lit(l.node)},
		{Key: "version", Value: lit(l.version)},
		{Key: "since", Value: "$$NOW"},
		{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", l.ttl.Milliseconds()}}}},
	}
	var after lockDoc
	err := l.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: lockID}}, mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$cond", Value: bson.A{
		bson.D{{Key: "$lte", Value: bson.A{expires, "$$NOW"}}}, taken, "$$ROOT",
	}}}}}}, options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&after)
	if mongo.IsDuplicateKeyError(err) {
		return false, nil // another made the document at the same moment
	}
	if err != nil {
		return false, wrapPrivilegeError(err, "taking the migration lock", "find, insert and update", store.Namespace(l.coll))
	}
	return after.Owner == l.owner, nil
}

// runHolding runs f while it renews the lock, and gives it back. The context of f ends with errLockLost if the lock is lost, or
// could not be renewed for its whole life.
func (l *lock) runHolding(ctx context.Context, f func(ctx context.Context) error) error {
	work, cancel := context.WithCancelCause(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.renewUntilDone(work, cancel)
	}()
	err := f(work)
	if err != nil && errors.Is(context.Cause(work), errLockLost) {
		err = errLockLost
	}
	cancel(nil)
	<-ended
	// Given back by its name alone, so a lock that is another's by now is left as it is.
	call, done := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer done()
	_, _ = l.coll.DeleteOne(call, bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: l.owner}}) // else it lapses
	return err
}

func (l *lock) renewUntilDone(ctx context.Context, lost context.CancelCauseFunc) {
	tick := time.NewTicker(l.ttl / 3)
	defer tick.Stop()
	good := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		sent := time.Now()
		call, cancel := context.WithTimeout(ctx, l.ttl/3)
		res, err := l.coll.UpdateOne(call, bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: l.owner}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
			{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", l.ttl.Milliseconds()}}}},
		}}}})
		cancel()
		switch {
		case err == nil && res.MatchedCount == 1:
			good = sent
		case err == nil, time.Since(good) > l.ttl:
			lost(errLockLost)
			return
		}
	}
}
