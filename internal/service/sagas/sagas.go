// Package sagas stores the instances of sagas. Package saga defines their steps.
//
// Order: a write succeeds only on the version that it has read, so the steps of one saga follow each other. Blocking:
// each method is one call to MongoDB, in the transaction of its context if there is one. Cost: one read and one write
// for a step. Recent sorts the whole collection, because an index by time would cost each step a write.
package sagas

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
)

// TypesCollection is the name of the collection in which Prepare stores the types of the sagas of a database.
const TypesCollection = "saga_types"

// ErrConflict means that another step of the saga was committed first. It wraps the error of the server, if there is one:
// in a transaction its label makes the transaction start again.
var ErrConflict = errors.New("saga was changed by another step")

// NewConflict returns an ErrConflict. cause is the error of the server, or nil if the server did not report the conflict.
func NewConflict(saga string, record Record, cause error) error {
	text := fmt.Sprintf("%s %s at version %d", saga, FormatID(record.ID), record.Version)
	if record.Version == 0 {
		text = fmt.Sprintf("%s %s was started before", saga, FormatID(record.ID))
	}
	if cause != nil {
		return fmt.Errorf("%w: %s: %w", ErrConflict, text, cause)
	}
	return fmt.Errorf("%w: %s", ErrConflict, text)
}

// ErrOccupied means that the collection of a new saga contains documents of another use.
var ErrOccupied = errors.New("the collection contains documents that are no sagas")

// NewOccupied returns an ErrOccupied for a collection.
func NewOccupied(collection string) error {
	return fmt.Errorf("%w: give the saga another name, or remove the documents of collection %s", ErrOccupied, collection)
}

// RejectEntities returns the error for a collection that contains the sagas of an owner, and is used for entities.
func RejectEntities(collection, owner string) error {
	return fmt.Errorf("collection %s contains the sagas of %s, so it cannot contain entities: use another collection", collection, owner)
}

// Record is one stored saga.
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

// Type describes one type of saga.
type Type struct {
	// Name is the name of the saga, which is also its collection.
	Name string `bson:"_id"`

	// Owner is the Go type of the state, unless saga.WithOwner sets another text.
	Owner string `bson:"owner"`

	// ID is the kind of the ids.
	ID Kind `bson:"id"`
}

// Store stores the records of sagas. A call with the context of a transaction belongs to that
// transaction. A Store must be safe for concurrent use.
type Store interface {
	// Load returns the record with this id, and whether it exists.
	Load(ctx context.Context, saga string, id any) (Record, bool, error)

	// Save stores ID and Body of r and returns the new record. Its Version is one more than before,
	// and its times are set by the server.
	//
	// If Version is 0, the record must not exist. Otherwise it must have that version. If this does
	// not hold, nothing is changed and the error is ErrConflict.
	Save(ctx context.Context, saga string, r Record) (Record, error)

	// Complete ends the saga. If keep is positive, the record becomes a tombstone with the Body of
	// r. The tombstone is deleted after the time keep by the server's clock, and not before.
	// Otherwise the record is deleted.
	//
	// The version is checked as in Save. With version 0 and no tombstone, Complete does nothing.
	Complete(ctx context.Context, saga string, r Record, keep time.Duration) error

	// Recent iterates over at most limit records, the last changed first. They include tombstones. It ends after the first error, and
	// does not need memory for all of them.
	Recent(ctx context.Context, saga string, limit int) iter.Seq2[Record, error]

	// Prepare creates everything that a saga needs before its first message, and stores its type
	// unless the name is stored already. It returns the stored type, which may have another owner or
	// another kind of id. If the name is new and the collection contains documents, for example entities, the error is ErrOccupied.
	// Prepare may be called repeatedly.
	Prepare(ctx context.Context, t Type) (Type, error)

	// Types returns the stored types of sagas, sorted by name.
	Types(ctx context.Context) ([]Type, error)
}
