package outbox

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// Collection is a collection of the service that cannot be used outside of a transaction by mistake: each method refuses,
// before anything is sent, a context without a running transaction (ErrNoTransaction), one whose transaction is over
// (ErrTransactionEnded), and one whose transaction can only roll back (ErrRollbackOnly). It has the methods of
// mongo.Collection that a transaction allows, with their arguments and results; the rest is at the driver's collection.
//
// An error of the server makes the transaction of Transaction rollback-only, as it has aborted it already: a callback
// that swallows the error does not get a commit, nor is it run again and again for want of one.
//
// A Collection costs no command of its own. It is safe for concurrent use; a transaction belongs to one goroutine.
type Collection struct {
	coll    *mongo.Collection
	plain   bool
	session *mongo.Session
}

// NewCollection wraps coll. WithoutTransaction lets its methods also run where the context has no transaction: the same
// handler then works without one, and on a standalone server. What no transaction covers is written by majority, and read
// majority-committed from the primary, whatever coll's own settings say. No other option applies.
func NewCollection(coll *mongo.Collection, opts ...Option) (*Collection, error) {
	if coll == nil {
		return nil, errors.New("outbox: the collection is nil")
	}
	var s settings
	for _, o := range opts {
		o(&s)
	}
	if s.collection != "" || s.maxSize != 0 || s.log != nil || s.propagator != nil {
		return nil, fmt.Errorf("outbox: collection %s: of the options only WithoutTransaction applies to a collection", coll.Name())
	}
	return &Collection{plain: s.plain, coll: coll.Clone(options.Collection().
		SetWriteConcern(writeconcern.Majority()).
		SetReadConcern(readconcern.Majority()).
		SetReadPreference(readpref.Primary()))}, nil
}

// WithSession is the same collection in that session, whatever session a context carries. nil is the context's again.
func (c *Collection) WithSession(s *mongo.Session) *Collection {
	return &Collection{coll: c.coll, plain: c.plain, session: s}
}

// Name is the collection's name.
func (c *Collection) Name() string { return c.coll.Name() }

// Database is the collection's database. What is reached by it is not bound to a transaction.
func (c *Collection) Database() *mongo.Database { return c.coll.Database() }

// enter is the context for one operation, or why there is none.
func (c *Collection) enter(ctx context.Context) (context.Context, error) {
	if c.session != nil {
		ctx = mongo.NewSessionContext(ctx, c.session)
	}
	err := CheckTransaction(ctx)
	if err == nil || c.plain && errors.Is(err, ErrNoTransaction) {
		return ctx, nil
	}
	return ctx, fmt.Errorf("collection %s: %w", c.coll.Name(), err)
}

// in runs op, and notes what its error means for the transaction.
func in[R any](ctx context.Context, c *Collection, op func(context.Context) (R, error)) (R, error) {
	ctx, err := c.enter(ctx)
	if err != nil {
		var none R
		return none, err
	}
	r, err := op(ctx)
	if ends(err) {
		unitOf(ctx).doom(err)
	}
	return r, err
}

// single is in for the methods whose error is inside of the result.
func single(ctx context.Context, c *Collection, op func(context.Context) *mongo.SingleResult) *mongo.SingleResult {
	r, err := in(ctx, c, func(ctx context.Context) (*mongo.SingleResult, error) {
		r := op(ctx)
		return r, r.Err()
	})
	if r == nil {
		return mongo.NewSingleResultFromDocument(bson.D{}, err, nil)
	}
	return r
}

// ends reports whether the transaction of an operation that failed so cannot commit: the server has refused the command,
// which aborts the transaction, or it is not known whether it got it. What the driver refused by itself was never sent.
func ends(err error) bool {
	if err == nil || errors.Is(err, mongo.ErrNoDocuments) {
		return false
	}
	return errors.As(err, new(mongo.ServerError)) || mongo.IsNetworkError(err) || mongo.IsTimeout(err) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// InsertOne is that of mongo.Collection. An _id that is there already is an error for which mongo.IsDuplicateKeyError is
// true, and ends the transaction: look first, or store by an upsert, where that may happen.
func (c *Collection) InsertOne(ctx context.Context, document any, opts ...options.Lister[options.InsertOneOptions]) (*mongo.InsertOneResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.InsertOneResult, error) {
		return c.coll.InsertOne(ctx, document, opts...)
	})
}

// InsertMany is that of mongo.Collection; documents is a slice.
func (c *Collection) InsertMany(ctx context.Context, documents any, opts ...options.Lister[options.InsertManyOptions]) (*mongo.InsertManyResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.InsertManyResult, error) {
		return c.coll.InsertMany(ctx, documents, opts...)
	})
}

// ReplaceOne is that of mongo.Collection.
func (c *Collection) ReplaceOne(ctx context.Context, filter, replacement any, opts ...options.Lister[options.ReplaceOptions]) (*mongo.UpdateResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.ReplaceOne(ctx, filter, replacement, opts...)
	})
}

// UpdateOne is that of mongo.Collection.
func (c *Collection) UpdateOne(ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateOneOptions]) (*mongo.UpdateResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.UpdateOne(ctx, filter, update, opts...)
	})
}

// UpdateMany is that of mongo.Collection.
func (c *Collection) UpdateMany(ctx context.Context, filter, update any, opts ...options.Lister[options.UpdateManyOptions]) (*mongo.UpdateResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.UpdateResult, error) {
		return c.coll.UpdateMany(ctx, filter, update, opts...)
	})
}

// DeleteOne is that of mongo.Collection.
func (c *Collection) DeleteOne(ctx context.Context, filter any, opts ...options.Lister[options.DeleteOneOptions]) (*mongo.DeleteResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.DeleteResult, error) {
		return c.coll.DeleteOne(ctx, filter, opts...)
	})
}

// DeleteMany is that of mongo.Collection.
func (c *Collection) DeleteMany(ctx context.Context, filter any, opts ...options.Lister[options.DeleteManyOptions]) (*mongo.DeleteResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.DeleteResult, error) {
		return c.coll.DeleteMany(ctx, filter, opts...)
	})
}

// BulkWrite is that of mongo.Collection.
func (c *Collection) BulkWrite(ctx context.Context, models []mongo.WriteModel, opts ...options.Lister[options.BulkWriteOptions]) (*mongo.BulkWriteResult, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.BulkWriteResult, error) {
		return c.coll.BulkWrite(ctx, models, opts...)
	})
}

// FindOneAndUpdate is that of mongo.Collection. A refused context is the error of the result.
func (c *Collection) FindOneAndUpdate(ctx context.Context, filter, update any, opts ...options.Lister[options.FindOneAndUpdateOptions]) *mongo.SingleResult {
	return single(ctx, c, func(ctx context.Context) *mongo.SingleResult {
		return c.coll.FindOneAndUpdate(ctx, filter, update, opts...)
	})
}

// FindOneAndReplace is that of mongo.Collection. A refused context is the error of the result.
func (c *Collection) FindOneAndReplace(ctx context.Context, filter, replacement any, opts ...options.Lister[options.FindOneAndReplaceOptions]) *mongo.SingleResult {
	return single(ctx, c, func(ctx context.Context) *mongo.SingleResult {
		return c.coll.FindOneAndReplace(ctx, filter, replacement, opts...)
	})
}

// FindOneAndDelete is that of mongo.Collection. A refused context is the error of the result.
func (c *Collection) FindOneAndDelete(ctx context.Context, filter any, opts ...options.Lister[options.FindOneAndDeleteOptions]) *mongo.SingleResult {
	return single(ctx, c, func(ctx context.Context) *mongo.SingleResult {
		return c.coll.FindOneAndDelete(ctx, filter, opts...)
	})
}

// Find is that of mongo.Collection. The cursor reads in the transaction, so it must be done with before the callback
// returns.
func (c *Collection) Find(ctx context.Context, filter any, opts ...options.Lister[options.FindOptions]) (*mongo.Cursor, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.Cursor, error) {
		return c.coll.Find(ctx, filter, opts...)
	})
}

// FindOne is that of mongo.Collection. A refused context is the error of the result.
func (c *Collection) FindOne(ctx context.Context, filter any, opts ...options.Lister[options.FindOneOptions]) *mongo.SingleResult {
	return single(ctx, c, func(ctx context.Context) *mongo.SingleResult {
		return c.coll.FindOne(ctx, filter, opts...)
	})
}

// CountDocuments is that of mongo.Collection.
func (c *Collection) CountDocuments(ctx context.Context, filter any, opts ...options.Lister[options.CountOptions]) (int64, error) {
	return in(ctx, c, func(ctx context.Context) (int64, error) {
		return c.coll.CountDocuments(ctx, filter, opts...)
	})
}

// Aggregate is that of mongo.Collection. The server refuses stages that write ($out, $merge) in a transaction.
func (c *Collection) Aggregate(ctx context.Context, pipeline any, opts ...options.Lister[options.AggregateOptions]) (*mongo.Cursor, error) {
	return in(ctx, c, func(ctx context.Context) (*mongo.Cursor, error) {
		return c.coll.Aggregate(ctx, pipeline, opts...)
	})
}
