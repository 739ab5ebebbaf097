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

// ErrNoWatcher says that a watcher has no document, so there is nothing to take its fence from.
var ErrNoWatcher = errors.New("watcher has no document")

// foreignRetry is between two attempts at a transaction that met the owner's.
var foreignRetry = retry.Policy{Base: 20 * time.Millisecond, Cap: time.Second}

// foreignCall bounds one commit or abort.
const foreignCall = 5 * time.Second

// Foreign runs fn in a transaction of somebody who is not the owner of the watcher: a command or the API. Its first
// statement takes the fence of all of the watcher's slots, so it and a fenced transaction of the owner cannot overlap:
// one of them is repeated. The same statement adds ns, the collections that get exceptions, to the watcher's `dirty`, so
// that a take-over asks them.
//
// fn must use the context it is given, with the client of state, and may run several times, also after an attempt whose
// commit had an unknown outcome: it must be idempotent. Until it ends the owner cannot renew its lease: read and prepare
// before, write at most 1,000 documents and 8 MiB in it, and call nothing but MongoDB. An owner whose renewal times out
// meanwhile ends the transaction, which then runs again.
//
// It returns once the transaction is majority committed, and else fn's error, ctx's end, or [ErrNoWatcher].
func Foreign(ctx context.Context, state *mongo.Database, watcher string, ns []string, fn func(ctx context.Context) error) error {
	session, err := state.Client().StartSession()
	if err != nil {
		return fmt.Errorf("starting session: %w", err)
	}
	defer session.EndSession(context.WithoutCancel(ctx))
	back := foreignRetry.Start()
	for {
		registerForeign(ctx, session, state, watcher)
		err := foreignOnce(ctx, session, state, watcher, ns, fn)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil || !repeatable(err) || back.Wait(ctx) != nil {
			unregisterForeign(ctx, session, state, watcher)
			return err
		}
	}
}

func foreignOnce(ctx context.Context, session *mongo.Session, state *mongo.Database, watcher string, ns []string, fn func(ctx context.Context) error) error {
	if err := session.StartTransaction(options.Transaction().SetReadConcern(readconcern.Majority()).
		SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())); err != nil {
		return fmt.Errorf("starting transaction: %w", err)
	}
	tx := mongo.NewSessionContext(ctx, session)
	err := foreignFence(tx, state, watcher, ns)
	if err == nil {
		err = fn(tx)
	}
	if err == nil {
		err = foreignCommit(ctx, session)
	}
	if err != nil {
		abortForeign(ctx, session, state.Client())
	}
	return err
}

// registerForeign writes the session into the slots' documents, outside the transaction, where the owners can read it: they
// kill the session if the transaction keeps a renewal waiting, because a process that is stopped inside it would block them
// until the server ends the transaction, after a minute. A failure is left to the transaction to report, which writes to the
// same documents.
func registerForeign(ctx context.Context, session *mongo.Session, state *mongo.Database, watcher string) {
	call, cancel := context.WithTimeout(ctx, foreignCall)
	defer cancel()
	_, _ = state.Collection("watchers").UpdateMany(call, slotsOf(watcher), bson.D{{Key: "$addToSet", Value: bson.D{{Key: "foreign", Value: session.ID()}}}})
}

// unregisterForeign takes the session out again after a failure; a commit does so itself. The driver uses the session for
// other calls afterwards.
func unregisterForeign(ctx context.Context, session *mongo.Session, state *mongo.Database, watcher string) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), foreignCall)
	defer cancel()
	_, _ = state.Collection("watchers").UpdateMany(call, slotsOf(watcher), bson.D{{Key: "$pull", Value: bson.D{{Key: "foreign", Value: session.ID()}}}})
}

// slotsOf finds the documents of all slots of a watcher.
func slotsOf(watcher string) bson.D {
	return bson.D{{Key: "_id", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(watcher) + "/"}}}
}

// foreignFence is the first statement (N3). Every slot's document is written, because a slot of an envelope is decided by
// its key, and the key of what is edited may move it.
func foreignFence(tx context.Context, state *mongo.Database, watcher string, ns []string) error {
	update := bson.D{
		{Key: "$inc", Value: bson.D{{Key: "fence", Value: int64(1)}}},
		{Key: "$pull", Value: bson.D{{Key: "foreign", Value: mongo.SessionFromContext(tx).ID()}}},
	}
	if len(ns) > 0 {
		update = append(update, bson.E{Key: "$addToSet", Value: bson.D{{Key: "dirty", Value: bson.D{{Key: "$each", Value: ns}}}}})
	}
	coll := state.Collection("watchers")
	res, err := coll.UpdateMany(tx, slotsOf(watcher), update)
	if err != nil {
		return DescribeRefusal(err, "taking the fence of watcher "+watcher, "find and update", Namespace(coll), "")
	}
	if res.MatchedCount == 0 {
		return fmt.Errorf("%w: %s holds none named %q; check the watcher's name, or start outrelay run once, or if its document was lost run outrelay recover",
			ErrNoWatcher, Namespace(coll), watcher)
	}
	return nil
}

// foreignCommit repeats the commit while its outcome is unknown: one that is sent again does nothing twice.
func foreignCommit(ctx context.Context, session *mongo.Session) error {
	for {
		call, cancel := context.WithTimeout(context.WithoutCancel(ctx), foreignCall)
		err := session.CommitTransaction(call)
		cancel()
		var le mongo.LabeledError
		unknown := mongo.IsTimeout(err) || errors.As(err, &le) && le.HasErrorLabel("UnknownTransactionCommitResult")
		if err == nil || !unknown || retry.Sleep(ctx, 10*time.Millisecond) != nil {
			return err
		}
	}
}

// abortForeign ends what is left of the transaction. A server that did not hear of it would keep the owner from renewing
// until the transaction's life ends, so the session's work is ended by name too.
func abortForeign(ctx context.Context, session *mongo.Session, client *mongo.Client) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), foreignCall)
	defer cancel()
	if err := session.AbortTransaction(call); err != nil {
		_ = client.Database("admin").RunCommand(call, bson.D{{Key: "killSessions", Value: bson.A{session.ID()}}}).Err()
	}
}

// repeatable reports whether the whole transaction may be tried again. The server interrupts a statement under way when an
// owner kills the session.
func repeatable(err error) bool {
	const codeInterrupted = 11601
	var le mongo.LabeledError
	return mongo.IsNetworkError(err) || HasCode(err, codeInterrupted) || errors.As(err, &le) &&
		(le.HasErrorLabel("TransientTransactionError") || le.HasErrorLabel("UnknownTransactionCommitResult"))
}
