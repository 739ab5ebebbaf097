package outbox

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/transaction"
)

// SessionFromContext returns the session of the running transaction of ctx. ok is false if there is
// no transaction or if it is over. A handler that works with and without a transaction can use it
// to find out which is the case.
func SessionFromContext(ctx context.Context) (s *mongo.Session, ok bool) {
	err := transaction.Check(ctx)
	if errors.Is(err, ErrNoTransaction) || errors.Is(err, ErrTransactionEnded) {
		return nil, false
	}
	return mongo.SessionFromContext(ctx), true
}

// CheckTransaction returns nil if a write with ctx is part of a transaction that may still commit.
// Otherwise it returns ErrNoTransaction, ErrTransactionEnded, or ErrRollbackOnly with its cause. It
// does no I/O.
func CheckTransaction(ctx context.Context) error {
	return transaction.Check(ctx)
}

// SetRollbackOnly prevents the transaction of ctx from committing. Use it if a required part of the
// transaction failed: Transaction then returns ErrRollbackOnly and the cause, even if the callback
// returns nil. If the transaction is rollback-only already, the first cause stays.
//
// It reports whether it had an effect. It has none without a transaction, and in a transaction that
// was started with the methods of the driver: only its starter decides about the commit.
func SetRollbackOnly(ctx context.Context, cause error) bool {
	return transaction.SetRollbackOnly(ctx, cause)
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
// rolls back, such as an audit entry. A guard.Monitor does not report such writes.
func Outside(ctx context.Context) context.Context {
	return transaction.Outside(ctx)
}
