package entity

import (
	"context"
	"errors"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/pkg/outbox"
)

// Documents is where entities are kept, by _id. OnMongo is the one for services; pkg/memory has one for unit tests. All
// methods but Transaction and RollbackOnly take part in the transaction of ctx, and refuse a context without one as
// outbox.Collection does.
type Documents interface {
	// Name is for errors.
	Name() string
	// Find returns those of the documents that are there, in any order. If fields are named, they and _id will do.
	Find(ctx context.Context, ids []bson.RawValue, fields ...string) ([]bson.Raw, error)
	// Scan returns up to limit documents in the order of _id, behind after if that is not the zero value.
	Scan(ctx context.Context, after bson.RawValue, limit int) ([]bson.Raw, error)
	// Insert adds documents; the error of one that is there already is ErrExists.
	Insert(ctx context.Context, docs []bson.Raw) error
	// Put replaces each document by _id, or adds it.
	Put(ctx context.Context, docs []bson.Raw) error
	// Replace replaces one document, if it is there and, with a guard, has that version.
	Replace(ctx context.Context, doc bson.Raw, g *Guard) (bool, error)
	// Delete removes documents, with a guard those of that version, and says how many.
	Delete(ctx context.Context, ids []bson.RawValue, g *Guard) (int64, error)
	// Transaction runs fn in a transaction, or joins that of ctx, as outbox.Transaction does.
	Transaction(ctx context.Context, fn func(context.Context) error) error
	// RollbackOnly makes sure that the transaction of ctx does not commit.
	RollbackOnly(ctx context.Context, cause error)
}

// Guard is the version that a document must have. A document without the field has version 0.
type Guard struct {
	Field   string
	Version int64
}

type mongoDocuments struct {
	coll   *outbox.Collection
	client *mongo.Client
}

// OnMongo is the collection as Documents. With plain, a context without a transaction is allowed.
func OnMongo(coll *mongo.Collection, plain bool) (Documents, error) {
	var opts []outbox.Option
	if plain {
		opts = append(opts, outbox.WithoutTransaction())
	}
	c, err := outbox.NewCollection(coll, opts...)
	if err != nil {
		return nil, err
	}
	return &mongoDocuments{c, coll.Database().Client()}, nil
}

func (m *mongoDocuments) Name() string { return m.coll.Name() }

func (m *mongoDocuments) Find(ctx context.Context, ids []bson.RawValue, fields ...string) ([]bson.Raw, error) {
	opts := options.Find()
	if len(fields) > 0 {
		p := make(bson.D, len(fields))
		for i, f := range fields {
			p[i] = bson.E{Key: f, Value: 1}
		}
		opts.SetProjection(p)
	}
	return all(ctx, m.coll, byIDs(ids, nil), opts)
}

func (m *mongoDocuments) Scan(ctx context.Context, after bson.RawValue, limit int) ([]bson.Raw, error) {
	filter := bson.D{}
	if !after.IsZero() {
		filter = bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: after}}}}
	}
	return all(ctx, m.coll, filter, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}).SetLimit(int64(limit)))
}

func all(ctx context.Context, c *outbox.Collection, filter bson.D, opts *options.FindOptionsBuilder) ([]bson.Raw, error) {
	cur, err := c.Find(ctx, filter, opts)
	if err != nil {
		return nil, err
	}
	var docs []bson.Raw
	if err := cur.All(ctx, &docs); err != nil {
		outbox.SetRollbackOnly(ctx, err) // a cursor that broke off has ended the transaction
		return nil, err
	}
	return docs, nil
}

func (m *mongoDocuments) Insert(ctx context.Context, docs []bson.Raw) error {
	_, err := m.coll.InsertMany(ctx, docs)
	if mongo.IsDuplicateKeyError(err) && ofID(err) {
		return &ExistsError{Collection: m.Name(), Err: err}
	}
	return err
}

// ofID reports whether a duplicate key is one of _id, and not of another unique index, which says nothing of the entity.
func ofID(err error) bool {
	var bulk mongo.BulkWriteException
	if !errors.As(err, &bulk) {
		return false
	}
	for _, e := range bulk.WriteErrors {
		if _, err := e.Raw.LookupErr("keyPattern", "_id"); err == nil {
			return true
		}
	}
	return false
}

func (m *mongoDocuments) Put(ctx context.Context, docs []bson.Raw) error {
	models := make([]mongo.WriteModel, len(docs))
	for i, d := range docs {
		models[i] = mongo.NewReplaceOneModel().SetFilter(byID(d.Lookup("_id"), nil)).SetReplacement(d).SetUpsert(true)
	}
	_, err := m.coll.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	return err
}

func (m *mongoDocuments) Replace(ctx context.Context, doc bson.Raw, g *Guard) (bool, error) {
	res, err := m.coll.ReplaceOne(ctx, byID(doc.Lookup("_id"), g), doc)
	return err == nil && res.MatchedCount == 1, err
}

func (m *mongoDocuments) Delete(ctx context.Context, ids []bson.RawValue, g *Guard) (int64, error) {
	res, err := m.coll.DeleteMany(ctx, byIDs(ids, g))
	if err != nil {
		return 0, err
	}
	return res.DeletedCount, nil
}

func (m *mongoDocuments) Transaction(ctx context.Context, fn func(context.Context) error) error {
	return outbox.Transaction(ctx, m.client, fn)
}

func (m *mongoDocuments) RollbackOnly(ctx context.Context, cause error) {
	outbox.SetRollbackOnly(ctx, cause)
}

func byID(id bson.RawValue, g *Guard) bson.D { return guarded(bson.D{{Key: "_id", Value: id}}, g) }

func byIDs(ids []bson.RawValue, g *Guard) bson.D {
	if len(ids) == 1 {
		return byID(ids[0], g)
	}
	return guarded(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, g)
}

func guarded(filter bson.D, g *Guard) bson.D {
	switch {
	case g == nil:
		return filter
	case g.Version == 0: // also those from before there were versions
		return append(filter, bson.E{Key: g.Field, Value: bson.D{{Key: "$in", Value: bson.A{int64(0), nil}}}})
	}
	return append(filter, bson.E{Key: g.Field, Value: g.Version})
}

// inTransaction reports whether ctx has a transaction, as far as MongoDB is concerned.
func inTransaction(ctx context.Context) bool {
	return !errors.Is(outbox.CheckTransaction(ctx), outbox.ErrNoTransaction)
}
