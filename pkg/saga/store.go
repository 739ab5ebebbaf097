package saga

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// AnyVersion in place of a version leaves a completion unguarded.
const AnyVersion int64 = -1

// Record is a saga as a Store keeps it.
type Record struct {
	ID      any   // uuid.UUID, string, int32 or int64
	Version int64 // 1 after the start, +1 by each change
	// Body is what the saga itself has written: its fields are none of those of the Store, which are _id, version,
	// createdAt, updatedAt, completedAt and expiresAt.
	Body bson.Raw
	// Times are the server's, to the millisecond. CompletedAt is zero unless this is a tombstone, ExpiresAt is when it goes.
	CreatedAt, UpdatedAt, CompletedAt, ExpiresAt time.Time
}

// Completed reports whether the saga is finished and the record its tombstone.
func (r *Record) Completed() bool { return !r.CompletedAt.IsZero() }

// TypeInfo describes one saga.
type TypeInfo struct {
	Name  string `bson:"_id"`   // also its collection
	Owner string `bson:"owner"` // the Go type of its state unless WithOwner says otherwise
	ID    IDKind `bson:"id"`
	// Messages are the types of messages that it takes, sorted. What is read from the store does not know them.
	Messages []string `bson:"-"`
}

// Store keeps the records of sagas. All calls with a context of a transaction belong to that transaction. A Store is used
// by many goroutines at once. The package sagatest has the tests that every Store must pass.
type Store interface {
	// Transaction runs fn as one unit of work, as outbox.Transaction does.
	Transaction(ctx context.Context, fn func(ctx context.Context) error) error
	// InTransaction reports whether ctx carries a running transaction that the Store's calls would join.
	InTransaction(ctx context.Context) bool
	// Load is the record of that id, and whether there is one.
	Load(ctx context.Context, saga string, id any) (Record, bool, error)
	// Save writes ID and Body and returns the record as it is now: Version is one more, times are the server's. The
	// record must be there with the version of r, or must not be there if that is 0: else a *ConflictError, which also
	// wraps what makes a transaction start afresh, and nothing is changed.
	Save(ctx context.Context, saga string, r Record) (Record, error)
	// Complete ends the saga. It deletes the record, or if keep is positive turns it into a tombstone with r's Body that
	// goes after keep, by the server's clock, and not before. Guarded as Save; a version of AnyVersion guards nothing, and
	// then a record that is not there is no error. Completing a record of version 0 with no tombstone does nothing.
	Complete(ctx context.Context, saga string, r Record, keep time.Duration) error
	// Recent are the records that were changed last, latest first, tombstones included; at most limit.
	Recent(ctx context.Context, saga string, limit int) ([]Record, error)
	// Prepare makes what a saga needs before its first message, and writes down its type. A name that is written down
	// with another owner or kind of id is an *OwnerError. It may be called any number of times.
	Prepare(ctx context.Context, t TypeInfo) error
	// Types are the sagas that were written down, by name.
	Types(ctx context.Context) ([]TypeInfo, error)
}
