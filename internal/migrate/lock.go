package migrate

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
)

// errLockLost is the error when the lock of a holder expired and another process acquired it. The work of
// the former holder does no harm, because steps may run twice.
var errLockLost = errors.New("another process acquired the migration lock")

const (
	lockID = "lock" // in the collection of the ledger

	// lockTTL is how long the lock of a dead holder blocks other processes.
	lockTTL = 30 * time.Second

	// releaseTimeout bounds the release. If the release fails, other processes wait until the lock expires.
	releaseTimeout = 5 * time.Second
)

// lockDoc is the document of the lock. Its times come from the server's clock.
type lockDoc struct {
	Owner     string    `bson:"owner"`
	Node      string    `bson:"node"`
	Version   string    `bson:"version"`
	Since     time.Time `bson:"since"`
	ExpiresAt time.Time `bson:"expiresAt"`
}

// lock is held by at most one process at a time, while that process renews it.
type lock struct {
	coll                 *mongo.Collection
	owner, node, version string
	ttl                  time.Duration
}

func newLock(coll *mongo.Collection, node, version string, ttl time.Duration) *lock {
	return &lock{coll: coll, owner: node + "/" + uuid.NewString(), node: node, version: version, ttl: ttl}
}

// tryAcquire makes one attempt and reports whether this process holds the lock now. In one statement the
// server decides, by its own clock, whether the lock is free.
func (l *lock) tryAcquire(ctx context.Context) (bool, error) {
	expires := mongodb.IfNull("$expiresAt", time.UnixMilli(0))
	expired := bson.D{{Key: "$lte", Value: bson.A{expires, "$$NOW"}}}
	acquired := bson.D{
		{Key: "_id", Value: lockID},
		{Key: "owner", Value: mongodb.Literal(l.owner)},
		{Key: "node", Value: mongodb.Literal(l.node)},
		{Key: "version", Value: mongodb.Literal(l.version)},
		{Key: "since", Value: "$$NOW"},
		{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", l.ttl.Milliseconds()}}}},
	}
	replace := bson.D{{Key: "$cond", Value: bson.A{expired, acquired, "$$ROOT"}}}

	var after lockDoc
	err := l.coll.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: lockID}},
		mongo.Pipeline{{{Key: "$replaceWith", Value: replace}}},
		options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)).Decode(&after)
	if mongo.IsDuplicateKeyError(err) {
		// Another process created the document at the same moment.
		return false, nil
	}
	if err != nil {
		return false, mongodb.Refusal(err, "acquiring the migration lock", "find, insert and update",
			mongodb.Namespace(l.coll))
	}
	return after.Owner == l.owner, nil
}

// runHolding runs f while it renews the lock, and then releases the lock. The context of f ends with
// errLockLost if the lock is lost, or could not be renewed within its ttl.
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

	// The filter names the owner, so a lock that another process holds by now stays. If the release
	// fails, the lock expires.
	call, done := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer done()
	_, _ = l.coll.DeleteOne(call, bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: l.owner}})
	return err
}

// renewUntilDone renews the lock until ctx ends. If the lock is lost, it calls lost and returns.
func (l *lock) renewUntilDone(ctx context.Context, lost context.CancelCauseFunc) {
	tick := time.NewTicker(l.ttl / 3)
	defer tick.Stop()

	renewedAt := time.Now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}

		// The time before the request counts, as the earliest time at which the server may have renewed.
		sent := time.Now()
		call, cancel := context.WithTimeout(ctx, l.ttl/3)
		expiresAt := bson.D{{Key: "$add", Value: bson.A{"$$NOW", l.ttl.Milliseconds()}}}
		res, err := l.coll.UpdateOne(call, bson.D{{Key: "_id", Value: lockID}, {Key: "owner", Value: l.owner}},
			mongo.Pipeline{{{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: expiresAt}}}}})
		cancel()

		if err == nil && res.MatchedCount == 1 {
			// The server counts the ttl from a later time, so the lock lasts at least this long.
			renewedAt = sent
			continue
		}
		// Another owner, or a lock that may have expired: the work must stop.
		if err == nil || time.Since(renewedAt) > l.ttl {
			lost(errLockLost)
			return
		}
	}
}
