package inbox

import (
	"context"
	"errors"
)

// Exists says whether there is a marker that the message was handled. It joins a transaction that is in ctx.
func (x *Inbox) Exists(ctx context.Context, k Key) (bool, error) { return false, errors.ErrUnsupported }

// Counts are the sizes of the inbox.
type Counts struct {
	Markers int64 // handled and claimed, from the collection's metadata: near enough after a crash, and free
	Claimed int64 // messages that somebody holds
	Expired int64 // of those, the ones whose lease is over
}

// Counts counts. It costs as much as there are claims.
func (x *Inbox) Counts(ctx context.Context) (Counts, error) { return Counts{}, errors.ErrUnsupported }

// Limits bound one Sweep. A zero is the default.
type Limits struct {
	PerStatement int // default 5,000
	Statements   int // default 20
}

// Sweep removes markers whose retention is over by the server's clock, the oldest first, and says how many, and whether
// there are more. It is what the TTL index does, on demand and within limits.
func (x *Inbox) Sweep(ctx context.Context, l Limits) (removed int64, more bool, err error) {
	return 0, false, errors.ErrUnsupported
}

// Release gives up what this Inbox holds as claims of a partition: for when the partition goes to another process.
func (x *Inbox) Release(ctx context.Context, topic string, part int32) error {
	return errors.ErrUnsupported
}

// EnsureIndexes creates the collections and their indexes where they are missing. A refusal by the server is a
// *PrivilegeError.
func (x *Inbox) EnsureIndexes(ctx context.Context) error { return errors.ErrUnsupported }
