package saga

import (
	"context"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// AnyVersion as the version of a record lets Store.Complete end a saga of any version.
const AnyVersion int64 = -1

// Record is a saga in a Store.
type Record struct {
	// ID is a uuid.UUID, string, int32 or int64.
	ID any

	// Version is 1 after the start, and grows by 1 with each change.
	Version int64

	// Body contains the fields that the saga has written. It must not contain the fields of the
	// Store: _id, version, createdAt, updatedAt, completedAt and expiresAt.
	Body bson.Raw

	// The times refer to the server's clock, with millisecond precision. CompletedAt and ExpiresAt
	// are zero unless the record is a tombstone. The record is deleted after ExpiresAt.
	CreatedAt, UpdatedAt, CompletedAt, ExpiresAt time.Time
}

// Completed reports whether the saga is complete and the record is its tombstone.
func (r *Record) Completed() bool { return !r.CompletedAt.IsZero() }

// TypeInfo describes one type of saga.
type TypeInfo struct {
	// Name is the name of the saga, which is also its collection.
	Name string `bson:"_id"`

	// Owner is the Go type of the state, unless WithOwner sets another text.
	Owner string `bson:"owner"`

	// ID is the kind of the ids.
	ID IDKind `bson:"id"`

	// Messages contains the types of messages that the saga handles, sorted. It is empty if the
	// TypeInfo was read from a Store.
	Messages []string `bson:"-"`
}

// Store stores the records of sagas. A call with the context of a transaction belongs to that
// transaction. A Store must be safe for concurrent use.
type Store interface {
	// Transaction runs fn as one unit of work, in the same way as outbox.Box.Transaction.
	Transaction(ctx context.Context, fn func(ctx context.Context) error) error

	// InTransaction reports whether ctx has a running transaction that the calls of the Store would
	// join.
	InTransaction(ctx context.Context) bool

	// Load returns the record with this id, and whether it exists.
	Load(ctx context.Context, saga string, id any) (Record, bool, error)

	// Save stores ID and Body of r and returns the new record. Its Version is one more than before,
	// and its times are set by the server.
	//
	// If Version is 0, the record must not exist. Otherwise it must have that version. If this does
	// not hold, nothing is changed and the error is a *ConflictError, which also wraps the server's
	// error that makes a transaction start again.
	Save(ctx context.Context, saga string, r Record) (Record, error)

	// Complete ends the saga. If keep is positive, the record becomes a tombstone with the Body of
	// r. The tombstone is deleted after the time keep by the server's clock, and not before.
	// Otherwise the record is deleted.
	//
	// The version is checked as in Save, unless it is AnyVersion. With AnyVersion, a missing record
	// is not an error. With version 0 and no tombstone, Complete does nothing.
	Complete(ctx context.Context, saga string, r Record, keep time.Duration) error

	// Recent returns at most limit records, the last changed first. They include tombstones.
	Recent(ctx context.Context, saga string, limit int) ([]Record, error)

	// Prepare creates everything that a saga needs before its first message, and stores its type.
	// If the name is stored with another owner or another kind of id, the error is an *OwnerError.
	// Prepare may be called repeatedly.
	Prepare(ctx context.Context, t TypeInfo) error

	// Types returns the stored types of sagas, sorted by name.
	Types(ctx context.Context) ([]TypeInfo, error)
}
