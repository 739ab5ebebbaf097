package inbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/pkg/outbox"
)

// releaseWait bounds the release of a claim after its handler failed, when the context may have ended.
const releaseWait = 5 * time.Second

// Once runs fn for an identity that was not handled yet, and else returns a *DuplicateError. What fn writes with the
// context that it gets is committed together with the marker, in a transaction of its own or in the one that ctx has,
// which then decides. An error of fn is returned as it is and leaves no marker. fn may be run more than once, as
// outbox.Transaction says.
//
// With Using(None), fn is run with ctx, always. With Using(Eager), the message is claimed before, and released if fn fails;
// a *ClaimedError says that somebody else has it.
//
// A call that finds the same identity being handled in this process waits for that, or with NoWait is told. Within the
// context of fn, Once of the same identity runs its own fn: it is the same handling.
func (x *Inbox) Once(ctx context.Context, consumer, id string, fn func(ctx context.Context) error, opts ...OnceOption) error {
	var c OnceConfig
	for _, o := range opts {
		o(&c)
	}
	e := Entry{Key{consumer, c.Namespace, id}, c.Place}
	if err := e.validate(); err != nil {
		return err
	}
	switch {
	case c.Mode == None:
		return fn(ctx)
	case c.Mode != Optimistic && c.Mode != Eager:
		return fmt.Errorf("%w: unknown mode %s", ErrInvalid, c.Mode)
	case memoOf(ctx).fresh(e):
		return outbox.Transaction(ctx, x.client, fn)
	}
	identity, err := x.identity(e, 0)
	if err != nil {
		return err
	}
	ctx, leave, ok, err := x.guard.Enter(ctx, string(identity), !c.NoWait)
	switch {
	case err != nil:
		return err
	case !ok:
		return &BusyError{Key: e.Key}
	}
	defer leave()
	if c.Mode == Eager {
		return x.eager(ctx, e, c.Lease, fn)
	}
	return x.optimistic(ctx, e, fn)
}

func (x *Inbox) optimistic(ctx context.Context, e Entry, fn func(context.Context) error) error {
	var duplicate bool
	err := outbox.Transaction(ctx, x.client, func(ctx context.Context) error {
		ctx = Remember(ctx)
		fresh, err := x.Admit(ctx, []Entry{e})
		if err != nil {
			return err
		}
		// A duplicate is no reason to roll back: the watermark may have moved, and the transaction may be the caller's.
		if duplicate = !fresh[0]; duplicate {
			return nil
		}
		return fn(ctx)
	})
	if err == nil && duplicate {
		err = &DuplicateError{Keys: []Key{e.Key}}
	}
	return err
}

func (x *Inbox) eager(ctx context.Context, e Entry, lease time.Duration, fn func(context.Context) error) error {
	c, err := x.Claim(ctx, e, lease)
	if err != nil {
		return err
	}
	err = c.Hold(ctx, func(ctx context.Context) error {
		return outbox.Transaction(ctx, x.client, func(ctx context.Context) error {
			ctx = Remember(ctx)
			memoOf(ctx).keep([]Entry{e}, []bool{true})
			if err := fn(ctx); err != nil {
				return err
			}
			return c.Handled(ctx)
		})
	})
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseWait)
	defer cancel()
	if rerr := c.Release(ctx); err != nil {
		return errors.Join(err, rerr)
	}
	return nil // handled and committed; a lease that could not be removed runs out
}
