package inbox

import (
	"context"
	"errors"
)

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
	return errors.ErrUnsupported
}

// Remember is called first in a transaction's callback, with the context that it got, and returns the one to go on with:
// there Admit and Once know what they have answered before in this transaction, so that several parts of a handler may ask
// for the same entry. Once does it by itself. It has no effect where no transaction runs.
func Remember(ctx context.Context) context.Context { return ctx }

type guard struct{}
