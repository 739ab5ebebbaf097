package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/transaction"
)

// releaseWait is the timeout for releasing a claim. The context of the caller may have ended by
// then.
const releaseWait = 5 * time.Second

// Once runs fn if the identity was not handled before. Otherwise it returns a *DuplicateError. The
// writes of fn with its context are committed together with the marker: in a new transaction, or in
// the one of ctx, whose starter then decides about the commit. If fn fails, its error is returned
// and no marker is stored. fn may run more than once, as with outbox.Box.Transaction.
//
// With Using(None), fn always runs, with ctx. With Using(Eager), the message is claimed before, and
// released if fn fails. If another holder has claimed it, the error is a *ClaimedError.
//
// If this process is handling the same identity, Once waits until that call ends. With NoWait it
// returns a *BusyError instead. In the context of fn, a call of Once for the same identity runs its
// own fn, because it is part of the same handling.
func (x *Inbox) Once(
	ctx context.Context, consumer, id string, fn func(ctx context.Context) error, opts ...OnceOption,
) error {
	var c OnceConfig
	for _, o := range opts {
		o(&c)
	}

	e := Entry{Key{consumer, c.Namespace, id}, c.Place}
	if err := e.validateEntry(); err != nil {
		return err
	}

	switch {
	case c.Mode == None:
		return fn(ctx)
	case c.Mode != Optimistic && c.Mode != Eager:
		return fmt.Errorf("%w: unknown mode %s", ErrInvalid, c.Mode)
	case memoFromContext(ctx).isFresh(e):
		// This transaction is handling the message already.
		return transaction.Run(ctx, x.client, fn)
	}

	identity, err := x.markerID(e, 0)
	if err != nil {
		return err
	}

	ctx, leave, ok, err := x.singleFlight.Enter(ctx, string(identity), !c.NoWait)
	switch {
	case err != nil:
		return err
	case !ok:
		return &BusyError{Key: e.Key}
	}
	defer leave()

	if c.Mode == Eager {
		return x.runEager(ctx, e, c.Lease, fn)
	}

	return x.runOptimistic(ctx, e, fn)
}

// runOptimistic runs fn and marks the entry in the same transaction.
func (x *Inbox) runOptimistic(ctx context.Context, e Entry, fn func(context.Context) error) error {
	var duplicate bool
	err := transaction.Run(ctx, x.client, func(ctx context.Context) error {
		ctx = Remember(ctx)
		fresh, err := x.Admit(ctx, []Entry{e})
		if err != nil {
			return err
		}

		// A duplicate is not a reason to roll back: the watermark may have moved, and the
		// transaction may belong to the caller.
		duplicate = !fresh[0]
		if duplicate {
			return nil
		}

		return fn(ctx)
	})
	if err == nil && duplicate {
		err = &DuplicateError{Keys: []Key{e.Key}}
	}

	return err
}

// runEager claims the entry, runs fn and marks the entry in one transaction, and releases the
// claim.
func (x *Inbox) runEager(ctx context.Context, e Entry, lease time.Duration, fn func(context.Context) error) error {
	c, err := x.Claim(ctx, e, lease)
	if err != nil {
		return err
	}

	err = c.Hold(ctx, func(ctx context.Context) error {
		return transaction.Run(ctx, x.client, func(ctx context.Context) error {
			ctx = Remember(ctx)
			memoFromContext(ctx).storeAnswers([]Entry{e}, []bool{true})
			if err := fn(ctx); err != nil {
				return err
			}

			return c.Handled(ctx)
		})
	})

	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
	defer cancel()
	releaseErr := c.Release(ctx)
	if err != nil {
		return errors.Join(err, releaseErr)
	}

	// The message is handled and committed. A lease that could not be deleted expires.
	return nil
}
