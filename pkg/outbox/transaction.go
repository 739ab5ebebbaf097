package outbox

import (
	"context"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
)

// Transaction runs fn as one unit of work. If fn returns nil, all writes that use the context of fn
// are committed together. If fn returns an error, none of them is stored, and Transaction returns
// that error.
//
// Retries: fn may run more than once. After a write conflict or a failover (an error with the
// driver's label TransientTransactionError), it runs again in a new transaction. A commit whose
// outcome is unknown is sent again. Both are retried with growing waits for at most 120 s, and until
// ctx ends: a commit that is in progress then may take another second. So fn must not have effects outside of the transaction that cannot be repeated. It must
// return the errors of its operations, wrapped or not: the server has aborted the transaction then.
// If fn discards an error, also that of a duplicate key, Transaction fails after ten attempts.
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
//   - ErrCommitUnknown if the transaction may have been committed although the commit failed.
//   - ErrRollbackOnly with the cause, as described above. It is also returned if a goroutine of fn
//     still runs a joined call when fn returns.
//   - ErrTransactionEnded if the transaction of ctx is over.
//   - ErrStandalone if the server is a standalone, which has no transactions.
//
// Transaction uses the session of ctx, or else a new session that ends with the call. The session
// must belong to the client of the box.
func (b *Box) Transaction(ctx context.Context, fn func(ctx context.Context) error, opts ...TransactionOption) error {
	var settings transactionSettings
	for _, o := range opts {
		o.applyTo(&settings)
	}
	return b.store.Transaction(ctx, settings.snapshot, fn)
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

// Outside returns ctx without its transaction, for a write that must stay even if the transaction
// rolls back, such as an audit entry. A guard.Monitor does not report such writes.
func Outside(ctx context.Context) context.Context {
	return transaction.Outside(ctx)
}
