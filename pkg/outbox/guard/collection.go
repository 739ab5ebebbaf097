// Package guard prevents and finds writes that miss their transaction.
//
// Blocking and cost: a Collection sends no command in addition to those of its methods. A [Monitor] costs about one
// microsecond for each write and each transaction of the process.
package guard

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Collection wraps a collection of the service, so that it cannot be used outside of a transaction
// by mistake. It has the methods of mongo.Collection that a transaction allows, with the same
// arguments and results. For all other methods, use the collection of the driver.
//
// Each method checks its context before it sends anything. It returns:
//   - outbox.ErrNoTransaction if the context has no running transaction.
//   - outbox.ErrTransactionEnded if the transaction is over.
//   - outbox.ErrRollbackOnly if the transaction can only roll back.
//
// After an error of the server, a transaction of outbox.Box is rollback-only, because the server
// has aborted it. If the callback ignores the error, the transaction neither commits nor is
// retried.
//
// A Collection sends no additional commands. It is safe for concurrent use, but a transaction
// belongs to one goroutine.
type Collection struct {
	coll     *mongo.Collection
	optional bool // calls without a transaction are allowed
}

// Option configures a Collection.
type Option interface{ applyTo(c *Collection) }

type option func(c *Collection)

func (o option) applyTo(collection *Collection) { o(collection) }

// WithoutTransaction also allows contexts without a transaction, so that the same handler works without one,
// and on a standalone server.
func WithoutTransaction() Option {
	return option(func(collection *Collection) { collection.optional = true })
}

// NewCollection wraps coll, which must not be nil. It does no I/O. Outside of a transaction, the methods write
// with majority write concern and read majority-committed data from the primary. The settings of coll do not
// matter.
func NewCollection(coll *mongo.Collection, opts ...Option) *Collection {
	majority := options.Collection().
		SetWriteConcern(concern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary())
	collection := &Collection{coll: coll.Clone(majority)}
	for _, o := range opts {
		o.applyTo(collection)
	}
	return collection
}

// check returns an error if an operation with ctx must not run.
func (c *Collection) check(ctx context.Context) error {
	err := outbox.CheckTransaction(ctx)
	if err == nil || c.optional && errors.Is(err, outbox.ErrNoTransaction) {
		return nil
	}
	return fmt.Errorf("collection %s: %w", c.coll.Name(), err)
}

// runOperation calls op, which uses the transaction of ctx. If op fails so that the transaction cannot
// commit, it is marked as rollback-only.
func runOperation[R any](ctx context.Context, collection *Collection, op func() (R, error)) (R, error) {
	if err := collection.check(ctx); err != nil {
		var none R
		return none, err
	}

	result, err := op()
	transaction.RecordFailure(ctx, err)
	return result, err
}

// runSingleResult is runOperation for operations that return their error inside of the result.
func runSingleResult(ctx context.Context, collection *Collection, op func() *mongo.SingleResult) *mongo.SingleResult {
	result, err := runOperation(ctx, collection, func() (*mongo.SingleResult, error) {
		result := op()
		return result, result.Err()
	})
	if result == nil {
		return mongo.NewSingleResultFromDocument(bson.D{}, err, nil)
	}
	return result
}

// InsertOne calls mongo.Collection.InsertOne in the transaction. If the _id exists,
// mongo.IsDuplicateKeyError reports true for the error, and the transaction can only roll back. If
// that can happen, check for the document first, or use an upsert.
func (c *Collection) InsertOne(
	ctx context.Context, document any, opts ...options.Lister[options.InsertOneOptions],
) (*mongo.InsertOneResult, error) {
	return runOperation(ctx, c, func() (*mongo.InsertOneResult, error) { return c.coll.InsertOne(ctx, document, opts...) })
}

// InsertMany calls mongo.Collection.InsertMany in the transaction. documents must be a slice.
func (c *Collection) InsertMany(
	ctx context.Context, documents any, opts ...options.Lister[options.InsertManyOptions],
) (*mongo.InsertManyResult, error) {
	return runOperation(ctx, c, func() (*mongo.InsertManyResult, error) { return c.coll.InsertMany(ctx, documents, opts...) })
}

// ReplaceOne calls mongo.Collection.ReplaceOne in the transaction.
func (c *Collection) ReplaceOne(
	ctx context.Context, filter, replacement any, opts ...options.Lister[options.ReplaceOptions],
) (*mongo.UpdateResult, error) {
	return runOperation(ctx, c, func() (*mongo.UpdateResult, error) { return c.coll.ReplaceOne(ctx, filter, replacement, opts...) })
}

// UpdateOne calls mongo.Collection.UpdateOne in the transaction.
func (c *Collection) UpdateOne(
	ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateOneOptions],
) (*mongo.UpdateResult, error) {
	return runOperation(ctx, c, func() (*mongo.UpdateResult, error) { return c.coll.UpdateOne(ctx, filter, update, opts...) })
}

// UpdateMany calls mongo.Collection.UpdateMany in the transaction.
func (c *Collection) UpdateMany(
	ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateManyOptions],
) (*mongo.UpdateResult, error) {
	return runOperation(ctx, c, func() (*mongo.UpdateResult, error) { return c.coll.UpdateMany(ctx, filter, update, opts...) })
}

// DeleteOne calls mongo.Collection.DeleteOne in the transaction.
func (c *Collection) DeleteOne(
	ctx context.Context, filter any, opts ...options.Lister[options.DeleteOneOptions],
) (*mongo.DeleteResult, error) {
	return runOperation(ctx, c, func() (*mongo.DeleteResult, error) { return c.coll.DeleteOne(ctx, filter, opts...) })
}

// DeleteMany calls mongo.Collection.DeleteMany in the transaction.
func (c *Collection) DeleteMany(
	ctx context.Context, filter any, opts ...options.Lister[options.DeleteManyOptions],
) (*mongo.DeleteResult, error) {
	return runOperation(ctx, c, func() (*mongo.DeleteResult, error) { return c.coll.DeleteMany(ctx, filter, opts...) })
}

// BulkWrite calls mongo.Collection.BulkWrite in the transaction.
func (c *Collection) BulkWrite(
	ctx context.Context, models []mongo.WriteModel, opts ...options.Lister[options.BulkWriteOptions],
) (*mongo.BulkWriteResult, error) {
	return runOperation(ctx, c, func() (*mongo.BulkWriteResult, error) { return c.coll.BulkWrite(ctx, models, opts...) })
}

// FindOneAndUpdate calls mongo.Collection.FindOneAndUpdate in the transaction. If the context is
// rejected, the result carries the error.
func (c *Collection) FindOneAndUpdate(
	ctx context.Context, filter, update any, opts ...options.Lister[options.FindOneAndUpdateOptions],
) *mongo.SingleResult {
	return runSingleResult(ctx, c, func() *mongo.SingleResult { return c.coll.FindOneAndUpdate(ctx, filter, update, opts...) })
}

// FindOneAndReplace calls mongo.Collection.FindOneAndReplace in the transaction. If the context is
// rejected, the result carries the error.
func (c *Collection) FindOneAndReplace(
	ctx context.Context, filter, replacement any, opts ...options.Lister[options.FindOneAndReplaceOptions],
) *mongo.SingleResult {
	return runSingleResult(ctx, c, func() *mongo.SingleResult { return c.coll.FindOneAndReplace(ctx, filter, replacement, opts...) })
}

// FindOneAndDelete calls mongo.Collection.FindOneAndDelete in the transaction. If the context is
// rejected, the result carries the error.
func (c *Collection) FindOneAndDelete(
	ctx context.Context, filter any, opts ...options.Lister[options.FindOneAndDeleteOptions],
) *mongo.SingleResult {
	return runSingleResult(ctx, c, func() *mongo.SingleResult { return c.coll.FindOneAndDelete(ctx, filter, opts...) })
}

// Find calls mongo.Collection.Find in the transaction. The cursor reads in the transaction too, so
// read it completely before the callback returns.
func (c *Collection) Find(
	ctx context.Context, filter any, opts ...options.Lister[options.FindOptions],
) (*mongo.Cursor, error) {
	return runOperation(ctx, c, func() (*mongo.Cursor, error) { return c.coll.Find(ctx, filter, opts...) })
}

// FindOne calls mongo.Collection.FindOne in the transaction. If the context is rejected, the result
// carries the error.
func (c *Collection) FindOne(
	ctx context.Context, filter any, opts ...options.Lister[options.FindOneOptions],
) *mongo.SingleResult {
	return runSingleResult(ctx, c, func() *mongo.SingleResult { return c.coll.FindOne(ctx, filter, opts...) })
}

// CountDocuments calls mongo.Collection.CountDocuments in the transaction.
func (c *Collection) CountDocuments(
	ctx context.Context, filter any, opts ...options.Lister[options.CountOptions],
) (int64, error) {
	return runOperation(ctx, c, func() (int64, error) { return c.coll.CountDocuments(ctx, filter, opts...) })
}

// Aggregate calls mongo.Collection.Aggregate in the transaction. The server rejects stages that
// write ($out, $merge) in a transaction.
func (c *Collection) Aggregate(
	ctx context.Context, pipeline any, opts ...options.Lister[options.AggregateOptions],
) (*mongo.Cursor, error) {
	return runOperation(ctx, c, func() (*mongo.Cursor, error) { return c.coll.Aggregate(ctx, pipeline, opts...) })
}
