package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// ErrStandalone means that a transaction was started on a standalone server, which has no
// transactions: a mongod that is not a member of a replica set. Calls with WithoutTransaction work
// there.
var ErrStandalone = errors.New("transactions need a replica set or a sharded cluster, and this server is a standalone: " +
	"restart mongod with --replSet and run rs.initiate()")

// SessionFromContext returns the session of the running transaction of ctx. ok is false if there is
// no transaction or if it is over. A handler that works with and without a transaction can use it
// to find out which is the case.
func SessionFromContext(ctx context.Context) (s *mongo.Session, ok bool) {
	s = mongo.SessionFromContext(ctx)
	if s == nil || !s.TransactionRunning() {
		return nil, false
	}
	if u := unitFromContext(ctx); u != nil && u.work.Ended() {
		return nil, false
	}
	return s, true
}

// CheckTransaction returns nil if a write with ctx is part of a transaction that may still commit.
// Otherwise it returns ErrNoTransaction, ErrTransactionEnded, or ErrRollbackOnly with its cause. It
// does no I/O.
func CheckTransaction(ctx context.Context) error {
	u := unitFromContext(ctx)
	if err := u.state().Check(); err != nil {
		return err
	}

	sess := mongo.SessionFromContext(ctx)
	switch {
	case sess != nil && sess.TransactionRunning():
		return nil
	case u != nil:
		// The callback itself has committed or aborted the transaction.
		return ErrTransactionEnded
	default:
		return ErrNoTransaction
	}
}

// SetRollbackOnly prevents the transaction of ctx from committing. Use it if a required part of the
// transaction failed: Transaction then returns ErrRollbackOnly and the cause, even if the callback
// returns nil. If the transaction is rollback-only already, the first cause stays.
//
// It reports whether it had an effect. It has none without a transaction, and in a transaction that
// was started with the methods of the driver: only its starter decides about the commit.
func SetRollbackOnly(ctx context.Context, cause error) bool {
	u := unitFromContext(ctx)
	if u == nil {
		return false
	}

	if cause == nil {
		cause = errors.New("SetRollbackOnly was called without a cause")
	}
	u.work.SetRollbackOnly(cause)
	return true
}

// Handler wraps fn, for example a message handler, so that each call runs in a transaction. It
// returns the same results as Transaction: the transaction begins before fn, commits if fn returns
// nil, and rolls back if fn returns an error. If the context has a transaction, the call joins it.
// There is one commit, however many calls of Transaction fn contains.
func Handler[M any](
	client *mongo.Client, fn func(ctx context.Context, m M) error, opts ...TransactionOption,
) func(ctx context.Context, m M) error {
	return func(ctx context.Context, m M) error {
		return Transaction(ctx, client, func(ctx context.Context) error { return fn(ctx, m) }, opts...)
	}
}

// Outside returns ctx without its transaction, for a write that must stay even if the transaction
// rolls back, such as an audit entry. A StrayMonitor does not report such writes.
func Outside(ctx context.Context) context.Context {
	return context.WithValue(mongo.NewSessionContext(ctx, nil), outsideKey{}, true)
}

type outsideKey struct{}

// illegalOperation is the error code of the server for a transaction on a standalone. The server
// uses it for other errors as well.
const illegalOperation = 20

// explainStandalone adds ErrStandalone to err if the server is a standalone. Because the error code
// is ambiguous, it asks the server for its kind with one command of at most 5 s.
func explainStandalone(ctx context.Context, client *mongo.Client, err error) error {
	var server mongo.ServerError
	if !errors.As(err, &server) || !server.HasErrorCode(illegalOperation) {
		return err
	}

	ctx, cancel := context.WithTimeout(Outside(context.WithoutCancel(ctx)), 5*time.Second)
	defer cancel()

	var is struct {
		SetName string `bson:"setName"`
		Msg     string `bson:"msg"`
	}

	// A member of a replica set has a set name, and a mongos answers with isdbgrid.
	helloErr := client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&is)
	if helloErr != nil || is.SetName != "" || is.Msg == "isdbgrid" {
		return err
	}

	return fmt.Errorf("%w: %w", ErrStandalone, err)
}
