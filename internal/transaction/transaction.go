// Package transaction runs functions in transactions of MongoDB. A function that starts a transaction inside of
// another one joins it. pkg/outbox exports the package to services, with the contracts of its functions.
//
// Order: the writes of a function commit together, and a joined function commits with the outermost one. Blocking:
// Run blocks until the commit has an outcome. The driver repeats the function after transient errors for up to two
// minutes, so the function may run more than once. Cost: one session, and one command for the commit.
package transaction

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/unit"
)

// Run runs fn in a transaction that reads majority-committed data. See outbox.Box.Transaction.
func Run(ctx context.Context, client *mongo.Client, fn func(context.Context) error) error {
	return run(ctx, client, readconcern.Majority(), fn)
}

// RunSnapshot is Run, but all reads see the same point in time.
func RunSnapshot(ctx context.Context, client *mongo.Client, fn func(context.Context) error) error {
	return run(ctx, client, readconcern.Snapshot(), fn)
}

// run joins the transaction of ctx, or starts one in the session of ctx or in a new session.
func run(ctx context.Context, client *mongo.Client, rc *readconcern.ReadConcern, fn func(context.Context) error) error {
	sess := mongo.SessionFromContext(ctx)
	u := unitFromContext(ctx)

	switch {
	case sess == nil:
		return inNewSession(ctx, client, rc, fn)
	case sess.Client() != client:
		return fmt.Errorf("transaction: %w", mongo.ErrWrongClient)
	case u != nil:
		return u.runJoined(ctx, fn)
	case sess.TransactionRunning():
		// The starter of this transaction decides about the commit.
		return fn(ctx)
	default:
		return inSession(ctx, sess, rc, fn)
	}
}

// inNewSession runs fn in a transaction of a new session, and ends the session.
func inNewSession(
	ctx context.Context, client *mongo.Client, rc *readconcern.ReadConcern, fn func(context.Context) error,
) error {
	sess, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("transaction: starting a session: %w", err)
	}
	// This also aborts the transaction if fn panics.
	defer sess.EndSession(context.WithoutCancel(ctx))

	return inSession(ctx, sess, rc, fn)
}

// inSession runs fn in a transaction of sess, which has none. It explains the error: a commit that failed, a
// server that has no transactions.
func inSession(
	ctx context.Context, sess *mongo.Session, rc *readconcern.ReadConcern, fn func(context.Context) error,
) error {
	committing := false
	_, err := sess.WithTransaction(ctx, func(ctx context.Context) (any, error) {
		// The driver runs this again after a transient error, also one of the commit.
		committing = false
		// Between two attempts, the driver itself does not check ctx.
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		u := &unitOfWork{sess: sess, work: new(unit.Work)}
		defer u.work.End()
		defer trackCallback()()
		if err := fn(context.WithValue(ctx, unitKey{}, u)); err != nil {
			return nil, err
		}

		err := u.endForCommit()
		committing = err == nil
		return nil, err
	}, pinnedOptions(rc))

	// If err is exactly ctx.Err(), the driver has not tried to commit.
	committing = committing && err != ctx.Err() //nolint:errorlint // a wrapped error comes from the commit
	if committing {
		err = repeatCommit(ctx, sess, err)
	}

	explained := explainStandalone(ctx, sess.Client(), err)
	if err == nil || !committing {
		return explained
	}
	if certainlyAborted(err) {
		return fmt.Errorf("committing: nothing of the transaction was stored: %w", explained)
	}
	return fmt.Errorf("committing: %w: %w", ErrCommitUnknown, explained)
}

// The bounds of repeatCommit. A new connection takes milliseconds if the server is available.
const (
	maxCommitRepeats  = 10
	commitRepeatLimit = 10 * time.Second
)

// repeatCommit repeats a commit that failed with an error that the driver does not repeat, although it leaves the outcome open:
// if a connection breaks, the commits that wait for one fail too. A transaction that stays open on the server locks its writes
// for a minute. So the commit is repeated even if ctx has ended.
func repeatCommit(ctx context.Context, sess *mongo.Session, err error) error {
	// The driver repeats the labeled ones itself, for up to two minutes.
	if labeled := mongo.LabeledError(nil); err == nil || certainlyAborted(err) ||
		errors.As(err, &labeled) && labeled.HasErrorLabel("UnknownTransactionCommitResult") {
		return err
	}

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitRepeatLimit)
	defer cancel()
	for range maxCommitRepeats {
		if err = sess.CommitTransaction(ctx); err == nil || certainlyAborted(err) || ctx.Err() != nil {
			break
		}
	}
	return err
}

// pinnedOptions returns options that do not depend on the configuration of the client.
func pinnedOptions(rc *readconcern.ReadConcern) *options.TransactionOptionsBuilder {
	return options.Transaction().
		SetReadConcern(rc).
		SetWriteConcern(writeconcern.Majority()).
		SetReadPreference(readpref.Primary())
}

// certainlyAborted reports whether a commit that failed with err certainly did not take place. This is so if
// the server answered, and neither the server nor the driver leaves the outcome open.
func certainlyAborted(err error) bool {
	var answer mongo.CommandError
	if !errors.As(err, &answer) {
		return false
	}

	if answer.HasErrorLabel("TransientTransactionError") {
		return true
	}
	// If the driver finds no connection for its second attempt, it returns the error of the first one with this label only.
	return !answer.HasErrorLabel("UnknownTransactionCommitResult") && !answer.HasErrorLabel("RetryableWriteError") &&
		!mongo.IsNetworkError(answer) && !mongo.IsTimeout(answer)
}

type unitKey struct{}

// unitOfWork is one attempt of a transaction that Run or WithWork has started. A nil unitOfWork stands for a
// transaction that was started elsewhere.
type unitOfWork struct {
	sess *mongo.Session // nil by WithWork
	work *unit.Work
}

// state returns the work of u, or nil for a nil u.
func (u *unitOfWork) state() *unit.Work {
	if u == nil {
		return nil
	}
	return u.work
}

// unitFromContext returns the unit of work that an operation with ctx would belong to. It returns nil if Run
// did not start the transaction of the session of ctx.
func unitFromContext(ctx context.Context) *unitOfWork {
	u, _ := ctx.Value(unitKey{}).(*unitOfWork)
	if u == nil || mongo.SessionFromContext(ctx) != u.sess {
		return nil
	}
	return u
}

// runJoined runs fn as a part of u. If fn fails or panics, u can only roll back.
func (u *unitOfWork) runJoined(ctx context.Context, fn func(context.Context) error) error {
	if err := Check(ctx); err != nil {
		return err
	}
	return u.work.Join(func() error { return fn(ctx) })
}

// endForCommit ends u, and returns an error if u must not commit. It is called after the callback has returned
// nil.
func (u *unitOfWork) endForCommit() error {
	if err := u.work.EndForCommit(); err != nil {
		return err
	}

	// If the callback itself has ended the transaction, the driver would report success.
	if !u.sess.TransactionRunning() {
		return ErrEnded
	}
	return nil
}
