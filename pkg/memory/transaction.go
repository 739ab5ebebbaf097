package memory

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/pkg/outbox"
)

// Transaction runs fn as one unit of work, as outbox.Transaction does on a server: what fn writes with the context that
// it gets is there when fn returns nil and is not at all when it returns an error, which Transaction then returns.
//
// fn may be run more than once: a write conflict, or any error with the driver's label TransientTransactionError, starts
// it afresh once the transaction that was in the way is over. A call inside of fn joins. If the inner one fails, the
// whole can only roll back: Transaction then returns outbox.ErrRollbackOnly with the cause, also where the outer fn
// returns nil.
func (db *DB) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	if u := db.unitOf(ctx); u != nil {
		return u.join(ctx, fn)
	}
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		u := &unit{tx: db.begin()}
		err := u.run(ctx, fn)
		if err == nil || !isTransient(err) {
			return err
		}
		if err := u.tx.wait(ctx); err != nil {
			return err
		}
	}
}

// InTransaction reports whether ctx carries a running transaction of this database.
func (db *DB) InTransaction(ctx context.Context) bool {
	u := db.unitOf(ctx)
	return u != nil && u.err() == nil
}

type unitKey struct{ db *DB }

// unit is one attempt of a transaction, as the context of its callback carries it.
type unit struct {
	tx *tx

	mu    sync.Mutex
	cause error // why it can only roll back
	ended bool
	memo  map[memoKey]bool // what inboxes have answered
}

func (db *DB) unitOf(ctx context.Context) *unit {
	u, _ := ctx.Value(unitKey{db}).(*unit)
	return u
}

func (u *unit) run(ctx context.Context, fn func(context.Context) error) error {
	defer u.tx.abort() // also when fn panics; after the commit it does nothing
	defer u.end()
	if err := fn(context.WithValue(ctx, unitKey{u.tx.db}, u)); err != nil {
		return err
	}
	if err := u.err(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	u.tx.commit()
	return nil
}

func (u *unit) join(ctx context.Context, fn func(context.Context) error) error {
	if err := u.err(); err != nil {
		return err
	}
	err := errors.New("a joined transaction panicked")
	defer func() { u.doom(err) }()
	err = fn(ctx)
	return err
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

func (u *unit) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.ended = true
}

// err says why nothing more can be done in the unit, or nil.
func (u *unit) err() error {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	switch {
	case u.ended:
		return outbox.ErrTransactionEnded
	case u.cause != nil:
		return fmt.Errorf("%w: %w", outbox.ErrRollbackOnly, u.cause)
	}
	return nil
}

// do runs one operation: in the transaction of ctx if there is one, which an error of the store then dooms; else in one of
// its own, which waits for whoever is in the way. Errors that are the caller's own mistake are returned by f as refusal.
func (db *DB) do(ctx context.Context, f func(t *tx) error) error {
	u := db.unitOf(ctx)
	if u == nil {
		return db.alone(ctx, f)
	}
	if err := u.err(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		u.doom(err)
		return err
	}
	err := f(u.tx)
	var no *refusal
	if errors.As(err, &no) {
		return no.error
	}
	u.doom(err)
	return err
}

func (db *DB) alone(ctx context.Context, f func(t *tx) error) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		t := db.begin()
		err := f(t)
		if err == nil {
			t.commit()
			return nil
		}
		t.abort()
		var no *refusal
		if errors.As(err, &no) {
			return no.error
		}
		if !isTransient(err) {
			return err
		}
		if err := t.wait(ctx); err != nil {
			return err
		}
	}
}

// refusal is an error after which a transaction may go on, because nothing was written.
type refusal struct{ error }

func refuse(err error) error { return &refusal{err} }
