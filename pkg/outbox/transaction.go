package outbox

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/internal/unit"
)

// Transaction runs fn as one unit of work. If fn returns nil, all writes that use the context of fn
// are committed together. If fn returns an error, none of them is stored, and Transaction returns
// that error.
//
// Retries: fn may run more than once. After a write conflict or a failover (an error with the
// driver's label TransientTransactionError), it runs again in a new transaction. A commit whose
// outcome is unknown is sent again. Both are retried for at most 120 s, or for the Timeout of the
// client. So fn must not have effects outside of the transaction that cannot be repeated. It must
// return the errors of its operations, wrapped or not.
//
// Concerns: reads go to the primary and see majority-committed data, and the commit waits for a
// majority, even if the client is configured otherwise. An event must not exist if its commit could
// be rolled back.
//
// Nesting: a call inside of fn joins the running transaction, and only the outermost call commits.
// If an inner call fails, the transaction can only roll back: Transaction then returns
// ErrRollbackOnly and the cause, even if the outer fn returns nil. A transaction that was started
// with the methods of the driver is joined too. Its concerns stay as they are, and its starter
// alone decides about the commit, so pass the inner error on.
//
// Errors:
//   - *CommitError if the commit failed. It reports whether the outcome is unknown. An error of fn
//     is never wrapped in it.
//   - ErrRollbackOnly with the cause, as described above. It is also returned if a goroutine of fn
//     still runs a joined call when fn returns.
//   - ErrTransactionEnded if the transaction of ctx is over.
//   - ErrStandalone if the server is a standalone, which has no transactions.
//
// Transaction uses the session of WithSession. Without it, it uses the session of ctx, or else a
// new session that ends with the call. The session must belong to client.
func Transaction(
	ctx context.Context, client *mongo.Client, fn func(ctx context.Context) error, opts ...TransactionOption,
) error {
	var s transactionSettings
	for _, o := range opts {
		o.applyTransaction(&s)
	}
	if client == nil {
		return errors.New("transaction: the client is nil")
	}

	if s.session != nil {
		ctx = mongo.NewSessionContext(ctx, s.session)
	}

	sess := mongo.SessionFromContext(ctx)
	u := unitFromContext(ctx)
	switch {
	case sess == nil:
		return inNewSession(ctx, client, fn, s)
	case sess.Client() != client:
		return fmt.Errorf("transaction: %w", mongo.ErrWrongClient)
	case u != nil:
		return u.runJoined(ctx, fn)
	case sess.TransactionRunning():
		// The starter of this transaction decides about the commit.
		return fn(ctx)
	default:
		return runTransaction(ctx, sess, fn, s)
	}
}

// inNewSession runs fn in a transaction of a new session, and ends the session.
func inNewSession(
	ctx context.Context, client *mongo.Client, fn func(context.Context) error, s transactionSettings,
) error {
	sess, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("transaction: starting a session: %w", err)
	}
	// This also aborts the transaction if fn panics.
	defer sess.EndSession(context.WithoutCancel(ctx))

	return runTransaction(ctx, sess, fn, s)
}

// runTransaction runs fn in a transaction of sess, which has none. It explains the error: a commit
// that failed, a server that has no transactions.
func runTransaction(
	ctx context.Context, sess *mongo.Session, fn func(context.Context) error, s transactionSettings,
) error {
	committing := false
	_, err := sess.WithTransaction(ctx, func(ctx context.Context) (any, error) {
		// The driver runs this again after a transient error, also one of the commit.
		committing = false
		// Between two attempts, the driver itself does not check ctx.
		if err := ctx.Err(); err != nil {
			return nil, err
		}

		u := &unitOfWork{sess: sess}
		defer u.work.End()
		defer trackCallback()()
		if err := fn(context.WithValue(ctx, unitKey{}, u)); err != nil {
			return nil, err
		}

		err := u.endForCommit()
		committing = err == nil
		return nil, err
	}, s.driverOptions())

	// If err is exactly ctx.Err(), the driver has not tried to commit.
	if err == nil || !committing || err == ctx.Err() { //nolint:errorlint // a wrapped error comes from the commit
		return explainStandalone(ctx, sess.Client(), err)
	}

	return &CommitError{Unknown: !certainlyAborted(err), Err: explainStandalone(ctx, sess.Client(), err)}
}

// certainlyAborted reports whether a commit that failed with err certainly did not take place. This
// is so if the server answered, and neither the server nor the driver leaves the outcome open.
func certainlyAborted(err error) bool {
	var answer mongo.CommandError
	if !errors.As(err, &answer) {
		return false
	}

	if answer.HasErrorLabel("TransientTransactionError") {
		return true
	}
	return !answer.HasErrorLabel("UnknownTransactionCommitResult") &&
		!mongo.IsNetworkError(answer) && !mongo.IsTimeout(answer)
}

// driverOptions returns options that do not depend on the configuration of the client.
func (s *transactionSettings) driverOptions() *options.TransactionOptionsBuilder {
	rc := readconcern.Majority()
	if s.snapshot {
		rc = readconcern.Snapshot()
	}

	return options.Transaction().
		SetReadConcern(rc).
		SetWriteConcern(writeconcern.Majority()).
		SetReadPreference(readpref.Primary())
}

type unitKey struct{}

// unitOfWork is one attempt of a transaction that Transaction has started. A nil unitOfWork stands for a
// transaction that was started elsewhere.
type unitOfWork struct {
	sess *mongo.Session
	work unit.Work
}

// state returns the work of u, or nil for a nil u.
func (u *unitOfWork) state() *unit.Work {
	if u == nil {
		return nil
	}
	return &u.work
}

// unitFromContext returns the unit of work that an operation with ctx would belong to. It returns
// nil if the session of ctx was not started by Transaction.
func unitFromContext(ctx context.Context) *unitOfWork {
	u, _ := ctx.Value(unitKey{}).(*unitOfWork)
	if u == nil || mongo.SessionFromContext(ctx) != u.sess {
		return nil
	}
	return u
}

// runJoined runs fn as a part of u. If fn fails or panics, u can only roll back.
func (u *unitOfWork) runJoined(ctx context.Context, fn func(context.Context) error) error {
	if err := CheckTransaction(ctx); err != nil {
		return err
	}
	return u.work.Join(func() error { return fn(ctx) })
}

// endForCommit ends u, and returns an error if u must not commit. It is called after the callback has
// returned nil.
func (u *unitOfWork) endForCommit() error {
	if err := u.work.EndForCommit(); err != nil {
		return err
	}

	// If the callback itself has ended the transaction, the driver would report success.
	if !u.sess.TransactionRunning() {
		return ErrTransactionEnded
	}
	return nil
}
