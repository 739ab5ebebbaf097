package inbox

import (
	"context"
	"errors"
	"time"
)

// releaseWait is the timeout for releasing a claim. The context of the caller may have ended by
// then.
const releaseWait = 5 * time.Second

// OnceConfig configures one call of Once.
type OnceConfig struct {
	Claim  bool          // claim the message before fn begins
	Lease  time.Duration // of the claim; 0 is the lease of the Inbox
	NoWait bool          // fail instead of waiting for a call with the same identity
}

// Once runs fn if the identity was not handled before. Otherwise it returns a *DuplicateError. The
// writes of fn with its context are committed together with the marker: in a new transaction, or in
// the one of ctx, whose starter then decides about the commit. If fn fails, its error is returned
// and no marker is stored. fn may run more than once, as with outbox.Box.Transaction.
//
// With Claim, the message is claimed before, and released if fn fails. If another holder has claimed
// it, the error is an *InProgressError.
//
// If this process is handling the same identity, Once waits until that call ends. With NoWait it
// returns an *InProgressError instead. In the context of fn, a call of Once for the same identity runs
// its own fn, because it is part of the same handling.
func (x *Inbox) Once(ctx context.Context, entry Entry, fn func(ctx context.Context) error, cfg OnceConfig) error {
	if err := entry.validateEntry(); err != nil {
		return err
	}

	// This transaction is handling the message already.
	if x.memoFromContext(ctx).isFresh(entry) {
		return x.store.Transaction(ctx, fn)
	}

	key := entry.Key
	ctx, leave, ok, err := x.singleFlight.Enter(ctx, key.Consumer+"\x00"+key.Namespace+"\x00"+key.ID, !cfg.NoWait)
	switch {
	case err != nil:
		return err
	case !ok:
		return &InProgressError{Key: key}
	}
	defer leave()

	if cfg.Claim {
		return x.claimOnce(ctx, entry, cfg.Lease, fn)
	}
	return x.handleOnce(ctx, entry, fn)
}

// handleOnce runs fn and marks the entry in the same transaction.
func (x *Inbox) handleOnce(ctx context.Context, entry Entry, fn func(context.Context) error) error {
	var duplicate bool
	err := x.store.Transaction(ctx, func(ctx context.Context) error {
		ctx = x.Remember(ctx)
		fresh, err := x.Admit(ctx, []Entry{entry})
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
		err = &DuplicateError{entry.Key}
	}

	return err
}

// claimOnce claims the entry, runs fn and marks the entry in one transaction, and releases the
// claim.
func (x *Inbox) claimOnce(ctx context.Context, entry Entry, lease time.Duration, fn func(context.Context) error) (err error) {
	claim, err := x.Claim(ctx, entry, lease)
	if err != nil {
		return err
	}

	// Deferred, because fn may panic.
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
		defer cancel()

		// After a commit the message is handled. A lease that could not be deleted expires.
		if releaseErr := claim.Release(ctx); err != nil {
			err = errors.Join(err, releaseErr)
		}
	}()

	return claim.Hold(ctx, func(ctx context.Context) error {
		return x.store.Transaction(ctx, func(ctx context.Context) error {
			ctx = x.Remember(ctx)
			x.memoFromContext(ctx).storeResults([]Entry{entry}, []bool{true})
			if err := fn(ctx); err != nil {
				return err
			}

			return claim.Handled(ctx)
		})
	})
}
