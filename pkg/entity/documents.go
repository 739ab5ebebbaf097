package entity

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/transaction"
	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

type mongoDocuments struct {
	name   string
	coll   *guard.Collection
	client *mongo.Client
	sagas  sagaCheck
}

// onMongo returns documents in the collection coll. It does no I/O.
func onMongo(coll *mongo.Collection, opts ...guard.Option) entities.Documents {
	return &mongoDocuments{
		name: coll.Name(), coll: guard.NewCollection(coll, opts...), client: coll.Database().Client(), sagas: sagaCheck{coll: coll},
	}
}

func (m *mongoDocuments) Name() string { return m.name }

// Find returns the existing documents with one query: see entities.Documents.
func (m *mongoDocuments) Find(ctx context.Context, ids []bson.RawValue, fields ...string) ([]bson.Raw, error) {
	if err := m.sagas.run(ctx); err != nil {
		return nil, err
	}
	opts := options.Find()
	if len(fields) > 0 {
		document := make(bson.D, len(fields))
		for i, f := range fields {
			document[i] = bson.E{Key: f, Value: 1}
		}
		opts.SetProjection(document)
	}

	return findAll(ctx, m.coll, idsFilter(ids, nil), opts)
}

// Scan returns the next documents with one query: see entities.Documents.
func (m *mongoDocuments) Scan(ctx context.Context, after bson.RawValue, limit int) ([]bson.Raw, error) {
	if err := m.sagas.run(ctx); err != nil {
		return nil, err
	}
	filter := bson.D{}
	if !after.IsZero() {
		filter = bson.D{{Key: "_id", Value: bson.D{{Key: "$gt", Value: after}}}}
	}
	opts := options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}).SetLimit(int64(limit))
	return findAll(ctx, m.coll, filter, opts)
}

// findAll returns all documents that match the filter.
func findAll(
	ctx context.Context, collection *guard.Collection, filter bson.D, opts *options.FindOptionsBuilder,
) ([]bson.Raw, error) {
	cur, err := collection.Find(ctx, filter, opts)
	if err != nil {
		return nil, err
	}

	var docs []bson.Raw
	if err := cur.All(ctx, &docs); err != nil {
		// An error of a cursor has ended the transaction.
		outbox.SetRollbackOnly(ctx, err)
		return nil, err
	}

	return docs, nil
}

// Insert adds documents with one command: see entities.Documents.
func (m *mongoDocuments) Insert(ctx context.Context, docs []bson.Raw) error {
	if err := m.sagas.run(ctx); err != nil {
		return err
	}
	_, err := m.coll.InsertMany(ctx, docs)

	// Another unique index is not about the existence of the entity.
	if mongo.IsDuplicateKeyError(err) && isDuplicateID(err) {
		return fmt.Errorf("%w: %w", ErrExists, err)
	}
	return err
}

// isDuplicateID reports whether a duplicate key error is about _id. The violation of another unique
// index does not mean that the entity exists.
func isDuplicateID(err error) bool {
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

// Put adds or replaces documents with one command: see entities.Documents.
func (m *mongoDocuments) Put(ctx context.Context, docs []bson.Raw) error {
	if err := m.sagas.run(ctx); err != nil {
		return err
	}
	models := make([]mongo.WriteModel, len(docs))
	for i, d := range docs {
		models[i] = mongo.NewReplaceOneModel().
			SetFilter(idFilter(d.Lookup("_id"), nil)).
			SetReplacement(d).
			SetUpsert(true)
	}

	_, err := m.coll.BulkWrite(ctx, models, options.BulkWrite().SetOrdered(false))
	return err
}

// Replace replaces a document with one command: see entities.Documents.
func (m *mongoDocuments) Replace(ctx context.Context, doc bson.Raw, guard *entities.Guard) (bool, error) {
	if err := m.sagas.run(ctx); err != nil {
		return false, err
	}
	res, err := m.coll.ReplaceOne(ctx, idFilter(doc.Lookup("_id"), guard), doc)
	return err == nil && res.MatchedCount == 1, err
}

// Delete removes documents with one command: see entities.Documents.
func (m *mongoDocuments) Delete(ctx context.Context, ids []bson.RawValue, guard *entities.Guard) (int64, error) {
	if err := m.sagas.run(ctx); err != nil {
		return 0, err
	}
	res, err := m.coll.DeleteMany(ctx, idsFilter(ids, guard))
	if err != nil {
		return 0, err
	}
	return res.DeletedCount, nil
}

func (m *mongoDocuments) Transaction(ctx context.Context, fn func(context.Context) error) error {
	return transaction.Run(ctx, m.client, fn)
}

func (m *mongoDocuments) RollbackOnly(ctx context.Context, cause error) {
	outbox.SetRollbackOnly(ctx, cause)
}

// idFilter returns a filter for the document with this id that has the version of guard.
func idFilter(id bson.RawValue, guard *entities.Guard) bson.D {
	return addGuard(bson.D{{Key: "_id", Value: id}}, guard)
}

// idsFilter returns a filter for documents with these ids that have the version of guard.
func idsFilter(ids []bson.RawValue, guard *entities.Guard) bson.D {
	if len(ids) == 1 {
		return idFilter(ids[0], guard)
	}
	return addGuard(bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, guard)
}

// addGuard adds the version of guard to the filter. guard may be nil.
func addGuard(filter bson.D, guard *entities.Guard) bson.D {
	switch {
	case guard == nil:
		return filter
	case guard.Version == 0:
		// This includes documents that were stored without versions.
		return append(filter, bson.E{Key: guard.Field, Value: bson.D{{Key: "$in", Value: bson.A{int64(0), nil}}}})
	default:
		return append(filter, bson.E{Key: guard.Field, Value: guard.Version})
	}
}

// inTransaction reports whether ctx has a transaction of MongoDB.
func inTransaction(ctx context.Context) bool {
	return !errors.Is(outbox.CheckTransaction(ctx), outbox.ErrNoTransaction)
}
