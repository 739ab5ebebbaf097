package outbox

import (
	"errors"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/appending"
)

// Errors returned by this package. Test for them with errors.Is.
var (
	// ErrNoTransaction means that the context has no running transaction. An event that is stored
	// outside of the business transaction can be lost, or can report a write that was rolled back.
	// WithoutTransaction allows it.
	ErrNoTransaction = transaction.ErrNone

	// ErrTooLarge means that an envelope exceeds the size of WithMaxSize. The text has both sizes. Store
	// the body elsewhere and append a reference, or raise the limit here and at the topic.
	ErrTooLarge = appending.ErrTooLarge

	// ErrNotScheduled means that Cancel or Reschedule found no envelope with this id that still
	// waits: it was never scheduled, it was canceled, or a watcher is sending it already.
	ErrNotScheduled = errors.New("not scheduled, or on its way already")

	// ErrEmptyQuery means that CancelScheduled got a query without a condition. Set ScheduledQuery.All
	// to cancel all events.
	ErrEmptyQuery = errors.New("the query has no condition and would match every scheduled event; set All to mean that")

	// ErrRollbackOnly means that the transaction cannot commit, because an operation in it failed
	// and the callback continued. The cause is wrapped as well.
	ErrRollbackOnly = transaction.ErrRollbackOnly

	// ErrTransactionEnded means that the transaction of this context is over: the callback has
	// returned, or it has committed or aborted the transaction of Transaction itself.
	ErrTransactionEnded = transaction.ErrEnded

	// ErrCommitUnknown means that the callback of a transaction succeeded and the commit failed, but the
	// transaction may have been committed nevertheless. Before you repeat it, check for its writes, or
	// make sure that repeating it is harmless. After all other errors of a transaction, nothing of it
	// was stored.
	ErrCommitUnknown = transaction.ErrCommitUnknown

	// ErrStandalone means that a transaction was started on a standalone server, which has no
	// transactions: a mongod that is not a member of a replica set. Calls with WithoutTransaction work
	// there, but no relay can read what they append: relays need the change streams of a replica set.
	ErrStandalone = transaction.ErrStandalone
)
