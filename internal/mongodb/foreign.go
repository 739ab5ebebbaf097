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
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/retry"
)

// ErrNoWatcher means that a watcher has no document, so that its fence cannot be taken.
var ErrNoWatcher = errors.New("watcher has no document")

// foreignRetry is the pause between two attempts at a transaction that conflicted with one of the owner.
var foreignRetry = retry.Policy{Base: 20 * time.Millisecond, Cap: time.Second}

// foreignCall bounds one commit or abort.
const foreignCall = 5 * time.Second

// InTransaction runs fn in a majority-committed transaction of a new session, without a fence. The driver repeats fn after a
// transient error.
func InTransaction(ctx context.Context, client *mongo.Client, fn func(tx context.Context) error) error {
	session, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	opts := options.Transaction().SetReadConcern(readconcern.Majority()).SetWriteConcern(writeconcern.Majority())
	_, err = session.WithTransaction(ctx, func(tx context.Context) (any, error) { return nil, fn(tx) }, opts)
	return err
}

// Foreign runs fn in a transaction of a caller that does not own the watcher: a command or the API. The first
// statement takes the fence of all slots of the watcher. The transaction therefore cannot overlap with a
// fenced transaction of the owner: one of the two is repeated. The same statement adds ns, the collections
// that get exceptions, to the watcher's `dirty`, so that a takeover reads them.
//
// fn must use the context that it gets, with the client of watchers. It may run several times, also after a
// commit with an unknown outcome, so it must be idempotent. Until fn ends, the owner cannot renew its lease.
// Read and prepare before the call, write at most 1,000 documents and 8 MiB in fn, and call only MongoDB. If
// the owner's renewal times out, the owner ends the transaction, which then runs again.
//
// Foreign blocks until the transaction is majority committed. If it fails, it returns the error of fn, the
// end of ctx, or [ErrNoWatcher].
func Foreign(
	ctx context.Context, watchers *mongo.Collection, watcher string, ns []string, fn func(ctx context.Context) error,
) error {
	session, err := watchers.Database().Client().StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))

	back := foreignRetry.Start()
	for {
		// Each attempt registers again: a commit with an unknown outcome may have removed the session.
		registerForeign(ctx, "$addToSet", session, watchers, watcher)
		err := runForeignOnce(ctx, session, watchers, watcher, ns, fn)
		if err == nil {
			return nil
		}

		// The registration must not stay: an owner would yield to a session that writes nothing.
		if ctx.Err() != nil || !isRepeatable(err) || back.Wait(ctx) != nil {
			registerForeign(context.WithoutCancel(ctx), "$pull", session, watchers, watcher)
			return err
		}
	}
}

// runForeignOnce makes one attempt at the transaction, and aborts it after an error.
func runForeignOnce(
	ctx context.Context, session *mongo.Session, watchers *mongo.Collection, watcher string, ns []string,
	fn func(ctx context.Context) error,
) error {
	if err := session.StartTransaction(options.Transaction().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}

	tx := mongo.NewSessionContext(ctx, session)
	err := takeForeignFence(tx, watchers, watcher, ns)
	if err == nil {
		err = fn(tx)
	}
	if err == nil {
		err = Commit(ctx, session, foreignCall)
	}

	// An open transaction would hold the fence of the owners.
	if err != nil {
		abortForeign(ctx, session, watchers.Database().Client())
	}
	return err
}

// registerForeign writes the session into the documents of the slots with $addToSet, outside the transaction,
// where the owners can read it. If the transaction delays a renewal, the owner kills the session. Otherwise a
// process that is stopped inside the transaction would block the owners until the server ends the transaction,
// after a minute. With $pull it removes the session after a failure, because the driver uses the session for
// other calls afterwards. A commit removes the session in the transaction.
//
// registerForeign ignores errors: the transaction writes to the same documents and returns them.
func registerForeign(ctx context.Context, operator string, session *mongo.Session, watchers *mongo.Collection, watcher string) {
	call, cancel := context.WithTimeout(ctx, foreignCall)
	defer cancel()

	update := bson.D{{Key: operator, Value: bson.D{{Key: "foreign", Value: session.ID()}}}}
	_, _ = watchers.UpdateMany(call, OfSlots(watcher), update)
}

// OfSlots returns the filter for the documents of all slots of a watcher.
func OfSlots(watcher string) bson.D {
	return bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(watcher) + "/"}}}
}

// takeForeignFence runs the first statement of the transaction (N3). It writes the document of every slot:
// the key of an envelope decides its slot, and an edit of the key may move the envelope to another slot.
func takeForeignFence(tx context.Context, watchers *mongo.Collection, watcher string, ns []string) error {
	update := bson.D{
		{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}},
		// The session has listed itself while it waited for the fence.
		{Key: "$pull", Value: bson.D{{Key: "foreign", Value: mongo.SessionFromContext(tx).ID()}}},
	}
	if len(ns) > 0 {
		dirty := bson.D{{Key: "dirty", Value: bson.D{{Key: "$each", Value: ns}}}}
		update = append(update, bson.E{Key: "$addToSet", Value: dirty})
	}

	coll := watchers
	res, err := coll.UpdateMany(tx, OfSlots(watcher), update)
	if err != nil {
		return Refusal(err, "taking the fence of watcher "+watcher, "find and update", Namespace(coll))
	}

	if res.MatchedCount == 0 {
		return fmt.Errorf("%w: %s holds none named %q; check the watcher's name, or start outrelay run once, "+
			"or if its document was lost run outrelay recover", ErrNoWatcher, Namespace(coll), watcher)
	}
	return nil
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

// abortForeign aborts the transaction. If the server does not get the abort, the transaction would prevent
// renewals of the owner until its life ends. abortForeign therefore also kills the session by its id.
func abortForeign(ctx context.Context, session *mongo.Session, client *mongo.Client) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), foreignCall)
	defer cancel()

	if err := session.AbortTransaction(call); err != nil {
		_ = KillSessions(call, client, []bson.Raw{session.ID()})
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

// isRepeatable reports whether the whole transaction may run again after err. If an owner kills the session,
// the server interrupts the statement in progress.
func isRepeatable(err error) bool {
	const codeInterrupted = 11601
	var le mongo.LabeledError
	return mongo.IsNetworkError(err) || HasCode(err, codeInterrupted) || errors.As(err, &le) &&
		(le.HasErrorLabel("TransientTransactionError") || le.HasErrorLabel("UnknownTransactionCommitResult"))
}
