package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// Transaction runs fn as one unit of work: what fn writes with the context that it gets is committed together when fn
// returns nil, and is not there at all when it returns an error, which Transaction then returns.
//
// fn may be run more than once. A write conflict or a failover (an error with the driver's label
// TransientTransactionError) starts it afresh in a new transaction, and a commit whose outcome is unknown is sent again,
// for at most 120 s or the client's Timeout. So fn must have no effect outside of the transaction that may not be
// repeated, and must return the errors of its operations, wrapped as it likes, rather than swallow them.
//
// Reads are of the primary and of majority-committed data, the commit waits for a majority, whatever the client's own
// settings say: an event of a commit that could be rolled back must not exist.
//
// A call inside of fn joins the transaction that is there; only the outermost commits. If the inner one fails, the whole can only roll back: when the
// outer fn returns nil nevertheless, Transaction returns ErrRollbackOnly together with the cause. A transaction that was
// started with the driver's own methods is joined too, but then its concerns are as it was started, and its owner decides
// about the commit alone: hand the inner error on.
//
// A commit that fails is a *CommitError, which says whether the outcome is unknown; an error of fn never is one.
//
// A call with the context of a transaction that is over is refused with ErrTransactionEnded, and one that a goroutine of fn
// is still in when fn returns makes the whole roll back. A standalone server has no transactions: ErrStandalone.
//
// The session is that of WithSession, else that of ctx, else a new one that ends with the call. It must belong to client.
func Transaction(ctx context.Context, client *mongo.Client, fn func(ctx context.Context) error, opts ...TransactionOption) error {
	var s transactionSettings
	for _, o := range opts {
		o.transaction(&s)
	}
	if client == nil {
		return errors.New("transaction: the client is nil")
	}
	if s.session != nil {
		ctx = mongo.NewSessionContext(ctx, s.session)
	}
	sess := mongo.SessionFromContext(ctx)
	switch u := unitOf(ctx); {
	case sess == nil:
		return inNewSession(ctx, client, fn, s)
	case sess.Client() != client:
		return fmt.Errorf("transaction: %w", mongo.ErrWrongClient)
	case u != nil:
		return u.join(ctx, fn)
	case sess.TransactionRunning():
		return fn(ctx)
	}
	return run(ctx, sess, fn, s)
}

func inNewSession(ctx context.Context, client *mongo.Client, fn func(context.Context) error, s transactionSettings) error {
	sess, err := client.StartSession()
	if err != nil {
		return fmt.Errorf("transaction: starting a session: %w", err)
	}
	defer sess.EndSession(context.WithoutCancel(ctx)) // also aborts when fn panics
	return run(ctx, sess, fn, s)
}

func run(ctx context.Context, sess *mongo.Session, fn func(context.Context) error, s transactionSettings) error {
	committing := false
	_, err := sess.WithTransaction(ctx, func(ctx context.Context) (any, error) {
		committing = false
		if err := ctx.Err(); err != nil {
			return nil, err // between two attempts; the driver itself does not look
		}
		u := &unit{sess: sess}
		defer u.end()
		defer watchStrays()()
		if err := fn(context.WithValue(ctx, unitKey{}, u)); err != nil {
			return nil, err
		}
		err := u.settle()
		committing = err == nil
		return nil, err
	}, s.options())
	if err == nil || !committing || err == ctx.Err() { //nolint:errorlint // exactly this one says that no commit was tried
		return explain(ctx, sess.Client(), err)
	}
	return &CommitError{Unknown: !aborted(err), Err: explain(ctx, sess.Client(), err)}
}

// aborted reports whether a commit that failed with err certainly did not take place: the server answered, and neither it nor
// the driver leaves the outcome open.
func aborted(err error) bool {
	var answer mongo.CommandError
	if !errors.As(err, &answer) {
		return false
	}
	if answer.HasErrorLabel("TransientTransactionError") {
		return true
	}
	return !answer.HasErrorLabel("UnknownTransactionCommitResult") && !mongo.IsNetworkError(answer) && !mongo.IsTimeout(answer)
}

func (s *transactionSettings) options() *options.TransactionOptionsBuilder {
	rc := readconcern.Majority()
	if s.snapshot {
		rc = readconcern.Snapshot()
	}
	return options.Transaction().SetReadConcern(rc).SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary())
}

type unitKey struct{}

// unit is one attempt of a transaction that Transaction owns. A nil unit is that of somebody else.
type unit struct {
	sess *mongo.Session

	mu    sync.Mutex
	cause error // why it can only roll back
	open  int   // joined transactions whose callbacks have not returned
	ended bool
}

// unitOf is the unit of the session that an operation with ctx would use; nil if that session is not ours.
func unitOf(ctx context.Context) *unit {
	u, _ := ctx.Value(unitKey{}).(*unit)
	if u == nil || mongo.SessionFromContext(ctx) != u.sess {
		return nil
	}
	return u
}

// join runs fn inside of the unit that is there.
func (u *unit) join(ctx context.Context, fn func(context.Context) error) error {
	if err := CheckTransaction(ctx); err != nil {
		return err
	}
	u.count(1)
	err := errors.New("a joined transaction panicked")
	defer func() { u.doom(err); u.count(-1) }()
	err = fn(ctx)
	return err
}

func (u *unit) count(n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.open += n
}

// settle is the last word before the commit: why there may be none, or nil.
func (u *unit) settle() error {
	u.mu.Lock()
	if u.open > 0 && u.cause == nil {
		u.cause = fmt.Errorf("%d joined transactions are still running: a transaction belongs to one goroutine", u.open)
	}
	u.mu.Unlock()
	if err := u.err(); err != nil {
		return err
	}
	if !u.sess.TransactionRunning() {
		return ErrTransactionEnded // by the callback itself; the driver would report success
	}
	return nil
}

// doom makes the unit rollback-only; the first cause stays.
func (u *unit) doom(cause error) {
	if u == nil || cause == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.cause == nil {
		u.cause = cause
	}
}

func (u *unit) over() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.ended
}

func (u *unit) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended = true
}

// err says why nothing more can be done in the unit, or nil. The cause is wrapped with its labels, so that the driver
// retries where it would have, had the callback returned it.
func (u *unit) err() error {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return ErrTransactionEnded
	case u.cause != nil:
		return fmt.Errorf("%w: %w", ErrRollbackOnly, u.cause)
	}
	return nil
}
