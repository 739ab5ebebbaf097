package inbox

import (
	"context"
	"errors"
)

// Admit says for each entry whether it is fresh, and marks the fresh as handled, in the transaction of ctx: they are
// handled if it commits, and nothing has happened if it does not. Of entries with the same identity the first is fresh.
// The watermarks move past every entry, whether it is fresh or not; entries of one lane must be in the order of their
// offsets.
//
// Without a running transaction it returns outbox.ErrNoTransaction. If somebody holds an Eager claim on an entry it is a
// *ClaimedError. If another process has attached to a newer generation of a partition it is a *StaleError. After an error
// the transaction cannot commit: return the error, as the driver needs it to decide on a retry.
func (x *Inbox) Admit(ctx context.Context, list []Entry) (fresh []bool, err error) {
	return nil, errors.ErrUnsupported
}

// Pass moves the watermarks past the entries without marking them: for messages that somebody else will handle, or nobody.
// It joins a transaction that is in ctx and needs none.
func (x *Inbox) Pass(ctx context.Context, list []Entry) error { return errors.ErrUnsupported }

// Check is Admit without a trace: it says what would be fresh. It joins a transaction that is in ctx and needs none.
func (x *Inbox) Check(ctx context.Context, list []Entry) (fresh []bool, err error) {
	return nil, errors.ErrUnsupported
}

// Insert marks all entries or, if any of them was handled before, none: then the *DuplicateError has exactly those. An
// identity that is in the list twice is one. It makes a transaction, or joins that of ctx, which a duplicate then dooms.
func (x *Inbox) Insert(ctx context.Context, list []Entry) error { return errors.ErrUnsupported }
