package inbox

import (
	"context"
	"errors"
	"time"
)

// Claim is the right to handle one message, held by one at a time. Its methods are safe for concurrent use.
type Claim interface {
	// Entry is the message.
	Entry() Entry
	// Attempt is 1 for the first claim of this identity, 2 for the one after it was released or ran out, and so on.
	Attempt() int
	// Run renews the lease until ctx ends, which is no error, or until the claim is lost: then it returns a
	// *ClaimLostError, at the latest when the lease would be over by this process's own clock, counted from before the
	// last renewal was sent.
	Run(ctx context.Context) error
	// Hold runs fn while it renews the lease. If the claim is lost, the context of fn ends with the *ClaimLostError as its
	// cause, which Hold then returns beside the error of fn.
	Hold(ctx context.Context, fn func(ctx context.Context) error) error
	// Handled turns the claim into the marker of a handled message and moves the watermark, in the transaction of ctx. If
	// somebody else has taken the claim meanwhile it is a *ClaimLostError, and the transaction cannot commit. Without a
	// transaction it takes effect at once; a crash before it means that the message is handled again.
	Handled(ctx context.Context) error
	// Release gives the claim up, so that it can be had again at once. After Handled was committed it only tidies up; it
	// may be called always and more than once.
	Release(ctx context.Context) error
	// Defer gives the claim up; nobody can have it for that time.
	Defer(ctx context.Context, d time.Duration) error
}

type claim struct{}

// Claim takes the message before its handler begins, for that lease or, if 0, that of the Inbox. It is committed when it
// returns. A message that was handled is a *DuplicateError, one that somebody else holds a *ClaimedError, a context with a
// running transaction ErrInTransaction.
func (x *Inbox) Claim(ctx context.Context, e Entry, lease time.Duration) (Claim, error) {
	return nil, errors.ErrUnsupported
}
