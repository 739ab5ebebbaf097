package mongodb

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/mongodb/concern"
)

// InTransaction runs fn in a majority-committed transaction of a new session, without a fence. The driver repeats fn after a
// transient error.
func InTransaction(ctx context.Context, client *mongo.Client, fn func(tx context.Context) error) error {
	session, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	opts := options.Transaction().SetReadConcern(readconcern.Majority()).SetWriteConcern(concern.Majority())
	_, err = session.WithTransaction(ctx, func(tx context.Context) (any, error) { return nil, fn(tx) }, opts)
	return err
}

// OfSlots returns the filter for the documents of all slots of a watcher.
func OfSlots(watcher string) bson.D {
	return bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(watcher) + "/"}}}
}

// Commit commits the transaction of session, and repeats the commit while its outcome is unknown, until ctx
// ends. A repeated commit has no second effect. timeout bounds each attempt.
func Commit(ctx context.Context, session *mongo.Session, timeout time.Duration) error {
	for {
		// A commit that is interrupted may still happen, so the end of ctx does not interrupt it.
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		err := session.CommitTransaction(call)
		cancel()

		var le mongo.LabeledError
		unknown := mongo.IsTimeout(err) || errors.As(err, &le) && le.HasErrorLabel("UnknownTransactionCommitResult")
		if err == nil || !unknown || retry.Sleep(ctx, 10*time.Millisecond) != nil {
			return err
		}
	}
}

// KillSessions aborts the transactions of the listed sessions, which must belong to the user of client.
// Sessions without an open transaction are not affected.
func KillSessions(ctx context.Context, client *mongo.Client, list []bson.Raw) error {
	// For the server an empty list means all sessions of the user.
	if len(list) == 0 {
		return nil
	}
	return client.Database("admin").RunCommand(ctx, bson.D{{Key: "killSessions", Value: list}}).Err()
}
