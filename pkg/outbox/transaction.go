package outbox

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/transaction"
)

// Transaction is Transaction with the client of the box's database.
func (b *Box) Transaction(ctx context.Context, fn func(ctx context.Context) error, opts ...TransactionOption) error {
	return Transaction(ctx, b.coll.Database().Client(), fn, opts...)
}

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
//   - ErrCommitUnknown if the transaction may have been committed although the commit failed.
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
	if s.snapshot {
		return transaction.RunSnapshot(ctx, client, fn)
	}
	return transaction.Run(ctx, client, fn)
}
