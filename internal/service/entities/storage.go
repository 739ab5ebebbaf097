// Package entities has the types with which packages of this module store entities elsewhere than in MongoDB: see
// entity.WithStorage.
package entities

import (
	"context"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// Storage replaces the collection and the outbox of an entity.Collection, a Recorded or a Projector. A transaction must be able to
// include all parts.
type Storage struct {
	Documents Documents // of a Collection and a Recorded
	Deleted   Documents // versions of the deleted entities of a Recorded
	View      View      // of a Projector
	// Append replaces the outbox of a Recorded; nil replaces nothing.
	Append func(ctx context.Context, events ...event.Event) error
}

// Documents stores the documents of entities by _id. All methods except Transaction and RollbackOnly run in the
// transaction of ctx. Without one they fail as the methods of guard.Collection do.
type Documents interface {
	// Name returns the name for error messages.
	Name() string

	// Find returns the existing documents with these ids, in any order. If fields are given, only
	// they and _id are required.
	Find(ctx context.Context, ids []bson.RawValue, fields ...string) ([]bson.Raw, error)

	// Scan returns at most limit documents in the order of _id. If after is not the zero value, it
	// starts after that id.
	Scan(ctx context.Context, after bson.RawValue, limit int) ([]bson.Raw, error)

	// Insert adds documents. If one of them exists, the error is entity.ErrExists.
	Insert(ctx context.Context, docs []bson.Raw) error

	// Put adds each document, or replaces the document with the same _id.
	Put(ctx context.Context, docs []bson.Raw) error

	// Replace replaces the document with the same _id and reports whether it did. With a guard, the
	// document must have that version.
	Replace(ctx context.Context, doc bson.Raw, g *Guard) (bool, error)

	// Delete removes the documents with these ids and returns their number. With a guard, only
	// documents of that version are removed.
	Delete(ctx context.Context, ids []bson.RawValue, g *Guard) (int64, error)

	// Transaction runs fn in a transaction, or joins the one of ctx, in the same way as
	// outbox.Box.Transaction.
	Transaction(ctx context.Context, fn func(context.Context) error) error

	// RollbackOnly prevents the transaction of ctx from committing.
	RollbackOnly(ctx context.Context, cause error)
}

// Guard is the version that a document must have.
type Guard struct {
	// Field is the field of the version. A document without it has version 0.
	Field string

	// Version is the required version.
	Version int64
}

// View is the target of a projector.
type View interface {
	// Name returns the name for error messages.
	Name() string

	// Apply stores the states. It ignores a state if the entity, or its deletion, has this version
	// or a later one. A call contains each entity at most once.
	Apply(ctx context.Context, states []State) error
}

// State is the state of one entity in a View.
type State struct {
	// ID is the _id of the entity.
	ID bson.RawValue

	// Version is the version of the change.
	Version int64

	// Doc is the document with _id and version, or nil if the entity is deleted.
	Doc bson.Raw
}
