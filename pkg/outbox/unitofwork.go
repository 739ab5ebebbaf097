package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// ErrStandalone says that a transaction was asked of a server that has none: a mongod that is no member of a replica set.
// What runs without a transaction (WithoutTransaction) works there.
var ErrStandalone = errors.New("transactions need a replica set or a sharded cluster, and this server is a standalone: restart mongod with --replSet and run rs.initiate()")

// SessionFromContext is the session of the running transaction of ctx. ok is false where there is none, or it is over: a
// handler that works with and without a transaction asks here which of the two it is.
func SessionFromContext(ctx context.Context) (s *mongo.Session, ok bool) {
	s = mongo.SessionFromContext(ctx)
	if s == nil || !s.TransactionRunning() {
		return nil, false
	}
	if u := unitOf(ctx); u != nil && u.over() {
		return nil, false
	}
	return s, true
}

// CheckTransaction returns nil where a write with ctx is part of a transaction that may still commit. Otherwise it is
// ErrNoTransaction, ErrTransactionEnded, or ErrRollbackOnly with its cause. It does no I/O.
func CheckTransaction(ctx context.Context) error {
	u := unitOf(ctx)
	if err := u.err(); err != nil {
		return err
	}
	sess := mongo.SessionFromContext(ctx)
	switch running := sess != nil && sess.TransactionRunning(); {
	case running:
		return nil
	case u != nil:
		return ErrTransactionEnded // by the callback itself
	default:
		return ErrNoTransaction
	}
}

// SetRollbackOnly makes sure that the transaction of ctx does not commit, for a part of it that failed and may not be left
// out: Transaction returns ErrRollbackOnly and the cause, although the callback return nil. The first cause stays. It
// reports whether it could: a transaction that was started with the driver's methods is its owner's alone, and without a
// transaction there is nothing to roll back.
func SetRollbackOnly(ctx context.Context, cause error) bool {
	u := unitOf(ctx)
	if u == nil {
		return false
	}
	if cause == nil {
		cause = errors.New("asked for")
	}
	u.doom(cause)
	return true
}

// Handler makes of a function of one argument, for example a handler of messages, one that runs in a transaction of its
// own each time, or in that of its context: Transaction around it, with all that is said there. The transaction begins
// before fn, commits if it returns nil, and is rolled back on any error, which is then returned. There is one commit,
// whatever fn calls.
func Handler[M any](client *mongo.Client, fn func(ctx context.Context, m M) error, opts ...TransactionOption) func(ctx context.Context, m M) error {
	return func(ctx context.Context, m M) error {
		return Transaction(ctx, client, func(ctx context.Context) error { return fn(ctx, m) }, opts...)
	}
}

// Outside is ctx without its transaction, for a write that is meant to stay whatever becomes of the transaction, such as an
// audit entry. A StrayMonitor does not report it.
func Outside(ctx context.Context) context.Context {
	return context.WithValue(mongo.NewSessionContext(ctx, nil), outsideKey{}, true)
}

type outsideKey struct{}

// illegalOperation is the server's code for, among others, a transaction on a standalone.
const illegalOperation = 20

// explain adds ErrStandalone to the error of a transaction where that is the reason. The server has no code of its own for
// it, so it is asked what it is.
func explain(ctx context.Context, client *mongo.Client, err error) error {
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
	if client.Database("admin").RunCommand(ctx, bson.D{{Key: "hello", Value: 1}}).Decode(&is) != nil || is.SetName != "" || is.Msg == "isdbgrid" {
		return err
	}
	return fmt.Errorf("%w: %w", ErrStandalone, err)
}
