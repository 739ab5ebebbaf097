package sagas

import (
	"context"
	"errors"
	"fmt"
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
	s := &Mongo{db: db}
	s.types = s.sagaCollection(TypesCollection)
	return s
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

	r, err := decodeRecord(raw)
	if err != nil {
		return Record{}, false, fmt.Errorf("loading saga %s %s: %w", saga, FormatID(id), err)
	}

	return r, true, nil
}

// Save stores the record: see Store.Save. It is one findAndModify command. A start is an upsert of
// a version that no document has, so a second start violates the unique index of _id.
func (s *Mongo) Save(ctx context.Context, saga string, r Record) (Record, error) {
	raw, err := s.replaceDocument(ctx, saga, r, bson.D{})
	if err != nil {
		return Record{}, s.wrapError("saving", saga, r, err)
	}

	return decodeRecord(raw)
}

// Complete deletes the record or makes it a tombstone: see Store.Complete. It is one command.
func (s *Mongo) Complete(ctx context.Context, saga string, r Record, keep time.Duration) error {
	var err error
	switch {
	case keep > 0:
		_, err = s.replaceDocument(ctx, saga, r, bson.D{
			{Key: "completedAt", Value: "$$NOW"},
			{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", keep.Milliseconds()}}}},
		})
	// A saga that was never stored has no document to delete.
	case r.Version != 0:
		var res *mongo.DeleteResult
		// The filter has the version, so another step has been faster.
		res, err = s.sagaCollection(saga).DeleteOne(ctx, versionFilter(r))
		if err == nil && res.DeletedCount == 0 {
			err = mongo.ErrNoDocuments
		}
	}

	if err != nil {
		return s.wrapError("completing", saga, r, err)
	}

	return nil
}

// replaceDocument replaces the document with the id and the version of r by the body of r and the
// fields of the Store. The server computes the times, so the update is a pipeline that contains the
// body as a literal.
func (s *Mongo) replaceDocument(ctx context.Context, saga string, r Record, more bson.D) (bson.Raw, error) {
	body := r.Body
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
	opts := options.FindOneAndUpdate().SetReturnDocument(options.After).SetUpsert(r.Version == 0)
	return s.sagaCollection(saga).FindOneAndUpdate(ctx, versionFilter(r), update, opts).Raw()
}

// versionFilter returns a filter for the document with the id and the version of r.
func versionFilter(r Record) bson.D {
	g := bson.D{{Key: "_id", Value: storedID(r.ID)}, {Key: "version", Value: r.Version}}

	// A saga that was deleted and started again counts its versions from 1 again.
	if r.Version > 0 && !r.CreatedAt.IsZero() {
		g = append(g, bson.E{Key: "createdAt", Value: r.CreatedAt})
	}
	return g
}

// wrapError returns ErrConflict if err reports a conflict.
func (s *Mongo) wrapError(doing, saga string, r Record, err error) error {
	if errors.Is(err, mongo.ErrNoDocuments) {
		return NewConflict(saga, r, nil)
	}

	var server mongo.ServerError
	if errors.As(err, &server) && (server.HasErrorCode(codeDuplicateKey) || server.HasErrorCode(codeWriteConflict)) {
		return NewConflict(saga, r, err)
	}

	return fmt.Errorf("%s saga %s %s: %w", doing, saga, FormatID(r.ID), err)
}

// Recent returns the records that were changed last: see Store.Recent. It sorts the whole
// collection, because an index would add cost to each step.
func (s *Mongo) Recent(ctx context.Context, saga string, limit int) ([]Record, error) {
	if limit <= 0 {
		return nil, nil
	}

	cur, err := s.sagaCollection(saga).Find(ctx, bson.D{}, options.Find().
		SetSort(bson.D{{Key: "updatedAt", Value: -1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(limit)).
		SetAllowDiskUse(true))
	raws, err := cursor.All[bson.Raw](ctx, "listing sagas of "+saga, cur, err)
	if err != nil {
		return nil, err
	}

	list := make([]Record, 0, len(raws))
	for _, raw := range raws {
		r, err := decodeRecord(raw)
		if err != nil {
			return nil, fmt.Errorf("listing sagas of %s: %w", saga, err)
		}
		list = append(list, r)
	}

	return list, nil
}

// Prepare creates the collection and its TTL index for tombstones, and stores the type: see
// Store.Prepare. Because the collection exists, the first steps do not conflict when they create
// it.
func (s *Mongo) Prepare(ctx context.Context, t Type) (Type, error) {
	// An existing type stays.
	update := bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "owner", Value: t.Owner}, {Key: "id", Value: t.ID}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)

	var found Type
	err := s.types.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: t.Name}}, update, opts).Decode(&found)
	if err != nil {
		return Type{}, fmt.Errorf("storing the type of saga %s: %w", t.Name, err)
	}
	// The caller rejects a type that differs, so it needs no collection.
	if found != t {
		return found, nil
	}

	coll := s.sagaCollection(t.Name)
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
		return found, fmt.Errorf("creating the index for tombstones of saga %s: %w", t.Name, err)
	}

	return found, nil
}

// Types returns the types that Prepare has stored, sorted by name.
func (s *Mongo) Types(ctx context.Context) ([]Type, error) {
	cur, err := s.types.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	return cursor.All[Type](ctx, "listing sagas", cur, err)
}

// storedID returns id in the form in which it is stored.
func storedID(id any) any {
	if u, ok := id.(uuid.UUID); ok {
		return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}
	}
	return id
}

// decodeRecord decodes the document of a saga.
func decodeRecord(raw bson.Raw) (Record, error) {
	var t storeFields
	if err := bson.Unmarshal(raw, &t); err != nil {
		return Record{}, err
	}

	r := Record{
		Version:     t.Version,
		CreatedAt:   t.CreatedAt,
		UpdatedAt:   t.UpdatedAt,
		CompletedAt: t.CompletedAt,
		ExpiresAt:   t.ExpiresAt,
	}

	switch v := raw.Lookup("_id"); v.Type {
	case bson.TypeBinary:
		_, data := v.Binary()
		id, err := uuid.FromBytes(data)
		if err != nil {
			return Record{}, fmt.Errorf("_id: %w", err)
		}

		r.ID = id
	case bson.TypeString:
		r.ID = v.StringValue()
	case bson.TypeInt32:
		r.ID = v.Int32()
	case bson.TypeInt64:
		r.ID = v.Int64()
	default:
		return Record{}, fmt.Errorf("_id is of type %s", v.Type)
	}

	body, err := withoutStoreFields(raw)
	r.Body = body
	return r, err
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
