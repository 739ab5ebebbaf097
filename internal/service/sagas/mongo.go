package sagas

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"

	"github.com/outrelay/outrelay/internal/mongodb/concern"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
	"github.com/outrelay/outrelay/internal/mongodb/schema"
)

// Error codes of MongoDB that report a conflict.
const (
	codeWriteConflict = 112
	codeDuplicateKey  = 11000
)

// Mongo is a Store in a MongoDB database. Each saga has a collection, and each instance one
// document.
type Mongo struct {
	db    *mongo.Database
	types *mongo.Collection
}

// NewMongo returns a store in the database db. It does no I/O. Outside of transactions, the store reads majority-committed
// data from the primary and writes with majority write concern, even if the client is configured otherwise.
func NewMongo(db *mongo.Database) *Mongo {
	store := &Mongo{db: db}
	store.types = store.sagaCollection(TypesCollection)
	return store
}

// sagaCollection returns the collection of a saga.
func (s *Mongo) sagaCollection(name string) *mongo.Collection {
	return s.db.Collection(name, options.Collection().
		SetReadConcern(readconcern.Majority()).
		SetWriteConcern(concern.Majority()).
		SetReadPreference(readpref.Primary()))
}

// storeFields contains the fields of the Store, except for _id.
type storeFields struct {
	Version     int64     `bson:"version"`
	CreatedAt   time.Time `bson:"createdAt"`
	UpdatedAt   time.Time `bson:"updatedAt"`
	CompletedAt time.Time `bson:"completedAt"`
	ExpiresAt   time.Time `bson:"expiresAt"`
}

// Load returns the record with this id, and whether it exists. It is one query.
func (s *Mongo) Load(ctx context.Context, saga string, id any) (Record, bool, error) {
	raw, err := s.sagaCollection(saga).FindOne(ctx, bson.D{{Key: "_id", Value: storedID(id)}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, fmt.Errorf("loading saga %s %s: %w", saga, FormatID(id), err)
	}

	record, err := decodeRecord(raw)
	if err != nil {
		return Record{}, false, fmt.Errorf("loading saga %s %s: %w", saga, FormatID(id), err)
	}

	return record, true, nil
}

// Save stores the record: see Store.Save. It is one findAndModify command. A start is an upsert of
// a version that no document has, so a second start violates the unique index of _id.
func (s *Mongo) Save(ctx context.Context, saga string, record Record) (Record, error) {
	raw, err := s.replaceDocument(ctx, saga, record, bson.D{})
	if err != nil {
		return Record{}, s.wrapError("saving", saga, record, err)
	}

	return decodeRecord(raw)
}

// Complete deletes the record or makes it a tombstone: see Store.Complete. It is one command.
func (s *Mongo) Complete(ctx context.Context, saga string, record Record, keep time.Duration) error {
	var err error
	switch {
	case keep > 0:
		_, err = s.replaceDocument(ctx, saga, record, bson.D{
			{Key: "completedAt", Value: "$$NOW"},
			{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", keep.Milliseconds()}}}},
		})
	// A saga that was never stored has no document to delete.
	case record.Version != 0:
		var res *mongo.DeleteResult
		// The filter has the version, so another step has been faster.
		res, err = s.sagaCollection(saga).DeleteOne(ctx, versionFilter(record))
		if err == nil && res.DeletedCount == 0 {
			err = mongo.ErrNoDocuments
		}
	}

	if err != nil {
		return s.wrapError("completing", saga, record, err)
	}

	return nil
}

// replaceDocument replaces the document with the id and the version of record by the body of record and the
// fields of the Store. The server computes the times, so the update is a pipeline that contains the
// body as a literal.
func (s *Mongo) replaceDocument(ctx context.Context, saga string, record Record, more bson.D) (bson.Raw, error) {
	body := record.Body
	if body == nil {
		body = bson.Raw{5, 0, 0, 0, 0} // an empty document
	}

	fields := append(bson.D{
		{Key: "_id", Value: "$_id"},
		{Key: "version", Value: bson.D{{Key: "$add", Value: bson.A{"$version", int64(1)}}}},
		{Key: "createdAt", Value: bson.D{{Key: "$ifNull", Value: bson.A{"$createdAt", "$$NOW"}}}},
		{Key: "updatedAt", Value: "$$NOW"},
	}, more...)

	update := mongo.Pipeline{{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{
		bson.D{{Key: "$literal", Value: body}}, fields,
	}}}}}}
	opts := options.FindOneAndUpdate().SetReturnDocument(options.After).SetUpsert(record.Version == 0)
	return s.sagaCollection(saga).FindOneAndUpdate(ctx, versionFilter(record), update, opts).Raw()
}

// versionFilter returns a filter for the document with the id and the version of record.
func versionFilter(record Record) bson.D {
	document := bson.D{{Key: "_id", Value: storedID(record.ID)}, {Key: "version", Value: record.Version}}

	// A saga that was deleted and started again counts its versions from 1 again.
	if record.Version > 0 && !record.CreatedAt.IsZero() {
		document = append(document, bson.E{Key: "createdAt", Value: record.CreatedAt})
	}
	return document
}

// wrapError returns ErrConflict if err reports a conflict.
func (s *Mongo) wrapError(doing, saga string, record Record, err error) error {
	if errors.Is(err, mongo.ErrNoDocuments) {
		return NewConflict(saga, record, nil)
	}

	var server mongo.ServerError
	if errors.As(err, &server) && (server.HasErrorCode(codeDuplicateKey) || server.HasErrorCode(codeWriteConflict)) {
		return NewConflict(saga, record, err)
	}

	return fmt.Errorf("%s saga %s %s: %w", doing, saga, FormatID(record.ID), err)
}

// Recent iterates over the records that were changed last: see Store.Recent. It sorts the whole
// collection, because an index would add cost to each step.
func (s *Mongo) Recent(ctx context.Context, saga string, limit int) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		if limit <= 0 {
			return
		}

		doing := "listing sagas of " + saga
		cur, err := cursor.Find(ctx, s.sagaCollection(saga), bson.D{}, options.Find().
			SetSort(bson.D{{Key: "updatedAt", Value: -1}, {Key: "_id", Value: 1}}).
			SetLimit(int64(limit)).
			SetAllowDiskUse(true))
		for raw, err := range cursor.Each[bson.Raw](ctx, doing, cur, err) {
			var record Record
			if err == nil {
				if record, err = decodeRecord(raw); err != nil {
					err = fmt.Errorf("%s: %w", doing, err)
				}
			}
			if !yield(record, err) || err != nil {
				return
			}
		}
	}
}

// Prepare creates the collection and its TTL index for tombstones, and stores the type: see
// Store.Prepare. Because the collection exists, the first steps do not conflict when they create
// it.
func (s *Mongo) Prepare(ctx context.Context, sagaType Type) (Type, error) {
	if err := s.checkUnoccupied(ctx, sagaType.Name); err != nil {
		return Type{}, err
	}

	// An existing type stays.
	update := bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "owner", Value: sagaType.Owner}, {Key: "id", Value: sagaType.ID}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)

	var found Type
	err := s.types.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: sagaType.Name}}, update, opts).Decode(&found)
	if err != nil {
		return Type{}, fmt.Errorf("storing the type of saga %s: %w", sagaType.Name, err)
	}
	// The caller rejects a type that differs, so it needs no collection.
	if found != sagaType {
		return found, nil
	}

	coll := s.sagaCollection(sagaType.Name)
	tombstones := mongo.IndexModel{
		Keys: bson.D{{Key: "expiresAt", Value: 1}},
		Options: options.Index().SetExpireAfterSeconds(0).
			SetPartialFilterExpression(bson.D{{Key: "expiresAt", Value: bson.D{{Key: "$exists", Value: true}}}}),
	}
	err = schema.Change(ctx, coll, func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, tombstones)
		return err
	})
	if err != nil {
		return found, fmt.Errorf("creating the index for tombstones of saga %s: %w", sagaType.Name, err)
	}

	return found, nil
}

// checkUnoccupied returns ErrOccupied if the name has no type yet, and its collection contains documents: they are no sagas.
func (s *Mongo) checkUnoccupied(ctx context.Context, saga string) error {
	if _, known, err := s.FindType(ctx, saga); known || err != nil {
		return err
	}
	err := s.sagaCollection(saga).FindOne(ctx, bson.D{}, options.FindOne().SetProjection(bson.D{{Key: "_id", Value: 1}})).Err()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading collection %s.%s: %w", s.db.Name(), saga, err)
	}

	// Another process may have stored the type and a saga since.
	if _, known, err := s.FindType(ctx, saga); known || err != nil {
		return err
	}
	return NewOccupied(s.db.Name() + "." + saga)
}

// FindType returns the type of the saga with this name, and whether Prepare has stored one. It is one query.
func (s *Mongo) FindType(ctx context.Context, saga string) (found Type, known bool, err error) {
	err = s.types.FindOne(ctx, bson.D{{Key: "_id", Value: saga}}).Decode(&found)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Type{}, false, nil
	}
	if err != nil {
		return Type{}, false, fmt.Errorf("reading the type of saga %s: %w", saga, err)
	}
	return found, true, nil
}

// Types returns the types that Prepare has stored, sorted by name.
func (s *Mongo) Types(ctx context.Context) ([]Type, error) {
	cur, err := cursor.Find(ctx, s.types, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	return cursor.All[Type](ctx, "listing sagas", cur, err)
}

// storedID returns id in the form in which it is stored.
func storedID(id any) any {
	if uid, ok := id.(uuid.UUID); ok {
		return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: uid[:]}
	}
	return id
}

// decodeRecord decodes the document of a saga.
func decodeRecord(raw bson.Raw) (Record, error) {
	var fields storeFields
	if err := bson.Unmarshal(raw, &fields); err != nil {
		return Record{}, err
	}

	record := Record{
		Version:     fields.Version,
		CreatedAt:   fields.CreatedAt,
		UpdatedAt:   fields.UpdatedAt,
		CompletedAt: fields.CompletedAt,
		ExpiresAt:   fields.ExpiresAt,
	}

	switch value := raw.Lookup("_id"); value.Type {
	case bson.TypeBinary:
		_, data := value.Binary()
		id, err := uuid.FromBytes(data)
		if err != nil {
			return Record{}, fmt.Errorf("_id: %w", err)
		}

		record.ID = id
	case bson.TypeString:
		record.ID = value.StringValue()
	case bson.TypeInt32:
		record.ID = value.Int32()
	case bson.TypeInt64:
		record.ID = value.Int64()
	default:
		return Record{}, fmt.Errorf("_id is of type %s", value.Type)
	}

	body, err := withoutStoreFields(raw)
	record.Body = body
	return record, err
}

// withoutStoreFields returns the document without the fields of the Store.
func withoutStoreFields(raw bson.Raw) (bson.Raw, error) {
	elements, err := raw.Elements()
	if err != nil {
		return nil, err
	}

	body := make(bson.D, 0, len(elements))
	for _, e := range elements {
		switch e.Key() {
		case "_id", "version", "createdAt", "updatedAt", "completedAt", "expiresAt":
		default:
			body = append(body, bson.E{Key: e.Key(), Value: e.Value()})
		}
	}

	return bson.Marshal(body)
}
