package memory

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/mongodb/unit"
)

// Transaction runs fn as one unit of work, in the same way as outbox.Box.Transaction. If fn returns
// nil, all writes with the context of fn are committed together. If fn returns an error, none of
// them is stored, and Transaction returns that error.
//
// fn may run more than once. After a write conflict, or any error with the driver's label
// TransientTransactionError, it runs again when the conflicting transaction is over.
//
// A call inside of fn joins the running transaction. If the inner call fails, the transaction can
// only roll back: Transaction then returns outbox.ErrRollbackOnly and the cause, even if the outer
// fn returns nil.
func (db *DB) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	// A nested call joins, and only the outermost one commits.
	if work := db.unitFromContext(ctx); work != nil {
		return work.work.Join(func() error { return fn(ctx) })
	}

	began := time.Now()
	for {
		if err := ctx.Err(); err != nil {
			return err
		}

		work := &unitOfWork{tx: db.beginTx()}
		err := work.runCallback(ctx, fn)
		if err == nil || !isTransient(err) || time.Since(began) >= transactionLimit {
			return err
		}

		// To run again at once would only conflict again.
		if err := work.tx.waitForBlocker(ctx); err != nil {
			return err
		}
	}
}

// transactionLimit is how long a transaction is repeated, as by the driver.
const transactionLimit = 2 * time.Minute

// InTransaction reports whether ctx has a running transaction of this database.
func (db *DB) InTransaction(ctx context.Context) bool {
	work := db.unitFromContext(ctx)
	return work != nil && work.state().Check() == nil
}

// unitKey is the key of the unit of work in a context.
type unitKey struct{ db *DB }

// unitOfWork is one attempt of a transaction, in the context of its callback. A nil unitOfWork stands for no
// transaction. The context also has the work for internal/mongodb/transaction, so that the functions of package outbox apply.
type unitOfWork struct {
	tx   *tx
	work unit.Work
}

// state returns the work of u, or nil for a nil u.
func (u *unitOfWork) state() *unit.Work {
	if u == nil {
		return nil
	}
	return &u.work
}

// unitFromContext returns the unit of work of this database in ctx, or nil. A context of transaction.Outside has none.
func (db *DB) unitFromContext(ctx context.Context) *unitOfWork {
	work, _ := ctx.Value(unitKey{db}).(*unitOfWork)
	if work == nil || transaction.WorkFromContext(ctx) != &work.work {
		return nil
	}
	return work
}

// runCallback runs fn and commits, or aborts if that is not possible.
func (u *unitOfWork) runCallback(ctx context.Context, fn func(context.Context) error) error {
	// This also covers a panic of fn. After the commit it does nothing.
	defer u.tx.abort()
	defer u.work.End()

	ctx = transaction.WithWork(ctx, &u.work)
	if err := fn(context.WithValue(ctx, unitKey{u.tx.db}, u)); err != nil {
		return err
	}
	if err := u.work.EndForCommit(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	// The injected error stands for a commit whose failure is certain.
	if err := u.tx.db.injectedError(Op{Kind: "commit"}); err != nil {
		return fmt.Errorf("committing: %w", err)
	}

	u.tx.commit()
	return nil
}

// runOperation runs one operation in the transaction of ctx. An error of the store makes the
// transaction rollback-only, but a rejection does not. Without a transaction it runs callback in a separate
// one: see runAlone.
func (db *DB) runOperation(ctx context.Context, callback func(tx *tx) error) error {
	work := db.unitFromContext(ctx)
	if work == nil {
		return db.runAlone(ctx, callback)
	}
	if err := work.state().Check(); err != nil {
		return err
	}
	// MongoDB aborts the transaction of an interrupted operation.
	if err := ctx.Err(); err != nil {
		work.state().SetRollbackOnly(err)
		return err
	}

	err := callback(work.tx)
	var rejection *rejection
	if errors.As(err, &rejection) {
		return rejection.error
	}

	work.state().SetRollbackOnly(err)
	return err
}

// runResult is runOperation for a callback with a result. After a conflict callback runs again, and its last result counts.
func runResult[T any](ctx context.Context, db *DB, callback func(tx *tx) (T, error)) (result T, err error) {
	err = db.runOperation(ctx, func(tx *tx) (err error) {
		result, err = callback(tx)
		return err
	})
	return result, err
}

// readSnapshot is runResult for an read that only reads, and cannot fail.
func readSnapshot[T any](ctx context.Context, db *DB, read func(tx *tx) T) (T, error) {
	return runResult(ctx, db, func(tx *tx) (T, error) { return read(tx), nil })
}

// runAlone runs callback in a separate transaction. After a conflict, it waits for the other transaction
// and runs callback again.
func (db *DB) runAlone(ctx context.Context, callback func(tx *tx) error) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}

		tx := db.beginTx()
		err := callback(tx)
		if err == nil {
			tx.commit()
			return nil
		}

		// The writes of the failed run must not block the other transaction.
		tx.abort()

		var rejection *rejection
		if errors.As(err, &rejection) {
			return rejection.error
		}
		if !isTransient(err) {
			return err
		}
		if err := tx.waitForBlocker(ctx); err != nil {
			return err
		}
	}
}

// rejection is an error after which the transaction may continue, because nothing was written.
type rejection struct{ error }

// newRejection wraps err in a rejection.
func newRejection(err error) error { return &rejection{err} }
