package transaction

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb/unit"
)

// Errors of transactions. See the errors of the same meaning in package outbox.
var (
	ErrNone          = errors.New("no running transaction in this context: use the context that the transaction's callback gets")
	ErrEnded         = unit.ErrEnded
	ErrRollbackOnly  = unit.ErrRollbackOnly
	ErrCommitUnknown = errors.New("the outcome is unknown, the transaction may have been committed")
	// ErrDiscarded means that the server aborted many attempts of a transaction before its function returned.
	ErrDiscarded = errors.New("the server aborts this transaction each time: an operation in it fails, and its error is discarded; " +
		"return the error, also that of a duplicate key")
)

// Check returns nil if a write with ctx is part of a transaction that may still commit. See
// outbox.CheckTransaction.
func Check(ctx context.Context) error {
	work := unitFromContext(ctx)
	if err := work.state().Check(); err != nil {
		return err
	}

	sess := mongo.SessionFromContext(ctx)
	switch {
	case sess != nil && sess.TransactionRunning(), work != nil && work.sess == nil:
		return nil
	case work != nil:
		// The callback itself has committed or aborted the transaction.
		return ErrEnded
	default:
		return ErrNone
	}
}

// CheckOptional is Check for operations that also run without a transaction: it never returns ErrNone.
func CheckOptional(ctx context.Context) error {
	if err := Check(ctx); !errors.Is(err, ErrNone) {
		return err
	}
	return nil
}

// IsPinned reports whether Run has started the transaction of ctx, so that it commits with majority.
func IsPinned(ctx context.Context) bool { return unitFromContext(ctx) != nil }

// SetRollbackOnly prevents the transaction of ctx from committing, if Run has started it, and reports whether
// this is so. The first cause stays.
func SetRollbackOnly(ctx context.Context, cause error) bool {
	work := unitFromContext(ctx)
	if work == nil {
		return false
	}

	if cause == nil {
		cause = errors.New("SetRollbackOnly was called without a cause")
	}
	work.work.SetRollbackOnly(cause)
	return true
}

// RecordFailure makes the transaction of ctx rollback-only if an operation in it that failed with err has aborted
// it on the server.
func RecordFailure(ctx context.Context, err error) {
	if abortsTransaction(err) {
		SetRollbackOnly(ctx, err)
	}
}

// abortsTransaction reports whether a transaction cannot commit after an operation failed with err.
// This is so if the server rejected the command, which aborts the transaction, and if it is unknown
// whether the server received it. A command that the driver rejected was never sent.
func abortsTransaction(err error) bool {
	if err == nil || errors.Is(err, mongo.ErrNoDocuments) {
		return false
	}

	return errors.As(err, new(mongo.ServerError)) || mongo.IsNetworkError(err) || mongo.IsTimeout(err) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// Outside returns ctx without its transaction.
func Outside(ctx context.Context) context.Context {
	ctx = context.WithValue(ctx, unitKey{}, (*unitOfWork)(nil))
	return context.WithValue(mongo.NewSessionContext(ctx, nil), outsideKey{}, true)
}

// WithWork returns ctx with a transaction of a store that has no sessions of the driver.
func WithWork(ctx context.Context, work *unit.Work) context.Context {
	return context.WithValue(mongo.NewSessionContext(ctx, nil), unitKey{}, &unitOfWork{work: work})
}

// WorkFromContext returns the work of a transaction that Run or WithWork has started, or nil.
func WorkFromContext(ctx context.Context) *unit.Work { return unitFromContext(ctx).state() }

type outsideKey struct{}
