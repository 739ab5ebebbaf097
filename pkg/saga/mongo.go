package saga

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
	"go.mongodb.org/mongo-driver/v2/mongo/readconcern"
	"go.mongodb.org/mongo-driver/v2/mongo/readpref"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

	"github.com/outrelay/outrelay/pkg/outbox"

	"github.com/outrelay/outrelay/internal/schema"
)

// DefaultTypes is the collection in which Prepare writes down which sagas a database has.
const DefaultTypes = "saga_types"

// Codes of MongoDB by which conflicts are known.
const (
	codeWriteConflict = 112
	codeDuplicateKey  = 11000
)

// MongoStore keeps sagas in a MongoDB database: one collection per saga, one document per instance.
type MongoStore struct {
	db    *mongo.Database
	types *mongo.Collection
}

// NewMongoStore does no I/O. Outside of transactions the store reads from the primary what a majority has, and writes wait
// for a majority, whatever the client's settings are.
func NewMongoStore(db *mongo.Database) (*MongoStore, error) {
	if db == nil {
		return nil, errors.New("saga store: the database is nil")
	}
	s := &MongoStore{db: db}
	s.types = s.collection(DefaultTypes)
	return s, nil
}

func (s *MongoStore) collection(name string) *mongo.Collection {
	return s.db.Collection(name, options.Collection().
		SetReadConcern(readconcern.Majority()).SetWriteConcern(writeconcern.Majority()).SetReadPreference(readpref.Primary()))
}

// Transaction is outbox.Transaction on the database's client.
func (s *MongoStore) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return outbox.Transaction(ctx, s.db.Client(), fn)
}

// InTransaction reports whether ctx carries a session of the driver with a running transaction.
func (s *MongoStore) InTransaction(ctx context.Context) bool {
	sess := mongo.SessionFromContext(ctx)
	return sess != nil && sess.TransactionRunning()
}

// times are the Store's own fields beside _id and version.
type times struct {
	Version     int64     `bson:"version"`
	CreatedAt   time.Time `bson:"createdAt"`
	UpdatedAt   time.Time `bson:"updatedAt"`
	CompletedAt time.Time `bson:"completedAt"`
	ExpiresAt   time.Time `bson:"expiresAt"`
}

// Load reads one document by its id.
func (s *MongoStore) Load(ctx context.Context, saga string, id any) (Record, bool, error) {
	raw, err := s.collection(saga).FindOne(ctx, bson.D{{Key: "_id", Value: native(id)}}).Raw()
	if errors.Is(err, mongo.ErrNoDocuments) {
		return Record{}, false, nil
	}
	if err != nil {
		return Record{}, false, fmt.Errorf("loading saga %s %s: %w", saga, FormatID(id), err)
	}
	r, err := record(raw)
	if err != nil {
		return Record{}, false, fmt.Errorf("loading saga %s %s: %w", saga, FormatID(id), err)
	}
	return r, true, nil
}

// Save is one findAndModify: a start is an upsert for a version that no document has, so a second one meets the unique _id.
func (s *MongoStore) Save(ctx context.Context, saga string, r Record) (Record, error) {
	raw, err := s.replace(ctx, saga, r, bson.D{})
	if err != nil {
		return Record{}, s.failed("saving", saga, r, err)
	}
	return record(raw)
}

// Complete deletes or marks, guarded by the version.
func (s *MongoStore) Complete(ctx context.Context, saga string, r Record, keep time.Duration) error {
	var err error
	switch {
	case keep > 0:
		_, err = s.replace(ctx, saga, r, bson.D{
			{Key: "completedAt", Value: "$$NOW"},
			{Key: "expiresAt", Value: bson.D{{Key: "$add", Value: bson.A{"$$NOW", keep.Milliseconds()}}}},
		})
		if errors.Is(err, mongo.ErrNoDocuments) && r.Version == AnyVersion {
			err = nil
		}
	case r.Version != 0:
		var res *mongo.DeleteResult
		if res, err = s.collection(saga).DeleteOne(ctx, guard(r)); err == nil && res.DeletedCount == 0 && r.Version != AnyVersion {
			err = mongo.ErrNoDocuments
		}
	}
	if err != nil {
		return s.failed("completing", saga, r, err)
	}
	return nil
}

// replace puts the body and the Store's own fields in place of the document of r's id and version. The times are computed
// by the server, so the body is a literal within a pipeline.
func (s *MongoStore) replace(ctx context.Context, saga string, r Record, more bson.D) (bson.Raw, error) {
	body := r.Body
	if body == nil {
		body = bson.Raw{5, 0, 0, 0, 0}
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
	return s.collection(saga).FindOneAndUpdate(ctx, guard(r), update, opts).Raw()
}

func guard(r Record) bson.D {
	g := bson.D{{Key: "_id", Value: native(r.ID)}}
	if r.Version != AnyVersion {
		g = append(g, bson.E{Key: "version", Value: r.Version})
	}
	if r.Version > 0 && !r.CreatedAt.IsZero() { // a saga that was deleted and began anew counts its versions from 1 again
		g = append(g, bson.E{Key: "createdAt", Value: r.CreatedAt})
	}
	return g
}

// failed tells a conflict from other errors. The server's error stays inside: in a transaction its label makes
// outbox.Transaction begin afresh.
func (s *MongoStore) failed(doing, saga string, r Record, err error) error {
	conflict := &ConflictError{Saga: saga, ID: FormatID(r.ID), Version: r.Version}
	if errors.Is(err, mongo.ErrNoDocuments) {
		return conflict
	}
	var server mongo.ServerError
	if errors.As(err, &server) && (server.HasErrorCode(codeDuplicateKey) || server.HasErrorCode(codeWriteConflict)) {
		conflict.Err = err
		return conflict
	}
	return fmt.Errorf("%s saga %s %s: %w", doing, saga, FormatID(r.ID), err)
}

// Recent sorts the collection by its last change. There is no index for it, which each step would pay for.
func (s *MongoStore) Recent(ctx context.Context, saga string, limit int) ([]Record, error) {
	if limit <= 0 {
		return nil, nil
	}
	cur, err := s.collection(saga).Find(ctx, bson.D{}, options.Find().
		SetSort(bson.D{{Key: "updatedAt", Value: -1}, {Key: "_id", Value: 1}}).SetLimit(int64(limit)).SetAllowDiskUse(true))
	if err != nil {
		return nil, fmt.Errorf("listing sagas of %s: %w", saga, err)
	}
	var raws []bson.Raw
	if err := cur.All(ctx, &raws); err != nil {
		return nil, fmt.Errorf("listing sagas of %s: %w", saga, err)
	}
	list := make([]Record, 0, len(raws))
	for _, raw := range raws {
		r, err := record(raw)
		if err != nil {
			return nil, fmt.Errorf("listing sagas of %s: %w", saga, err)
		}
		list = append(list, r)
	}
	return list, nil
}

// Prepare creates the collection and its TTL index for tombstones, and writes the type down. Creating the collection here
// keeps the first steps from conflicting over it.
func (s *MongoStore) Prepare(ctx context.Context, t TypeInfo) error {
	update := bson.D{{Key: "$setOnInsert", Value: bson.D{{Key: "owner", Value: t.Owner}, {Key: "id", Value: t.ID}}}}
	opts := options.FindOneAndUpdate().SetUpsert(true).SetReturnDocument(options.After)
	var found TypeInfo
	err := s.types.FindOneAndUpdate(ctx, bson.D{{Key: "_id", Value: t.Name}}, update, opts).Decode(&found)
	if err != nil {
		return fmt.Errorf("writing down saga %s: %w", t.Name, err)
	}
	if found.Owner != t.Owner || found.ID != t.ID {
		t.Messages = nil
		return &OwnerError{Want: t, Found: found}
	}
	coll, tombstones := s.collection(t.Name), mongo.IndexModel{
		Keys: bson.D{{Key: "expiresAt", Value: 1}},
		Options: options.Index().SetExpireAfterSeconds(0).
			SetPartialFilterExpression(bson.D{{Key: "expiresAt", Value: bson.D{{Key: "$exists", Value: true}}}}),
	}
	err = schema.Change(ctx, coll, func(ctx context.Context) error {
		_, err := coll.Indexes().CreateOne(ctx, tombstones)
		return err
	})
	if err != nil {
		return fmt.Errorf("making the index for tombstones of saga %s: %w", t.Name, err)
	}
	return nil
}

// Types reads what Prepare wrote down.
func (s *MongoStore) Types(ctx context.Context) ([]TypeInfo, error) {
	cur, err := s.types.Find(ctx, bson.D{}, options.Find().SetSort(bson.D{{Key: "_id", Value: 1}}))
	if err != nil {
		return nil, fmt.Errorf("listing sagas: %w", err)
	}
	var list []TypeInfo
	if err := cur.All(ctx, &list); err != nil {
		return nil, fmt.Errorf("listing sagas: %w", err)
	}
	return list, nil
}

// native is the id as it is stored.
func native(id any) any {
	if u, ok := id.(uuid.UUID); ok {
		return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: u[:]}
	}
	return id
}

func record(raw bson.Raw) (Record, error) {
	var t times
	if err := bson.Unmarshal(raw, &t); err != nil {
		return Record{}, err
	}
	r := Record{Version: t.Version, CreatedAt: t.CreatedAt, UpdatedAt: t.UpdatedAt, CompletedAt: t.CompletedAt, ExpiresAt: t.ExpiresAt}
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
	body, err := withoutOwn(raw)
	r.Body = body
	return r, err
}

// withoutOwn is the document without the Store's own fields.
func withoutOwn(raw bson.Raw) (bson.Raw, error) {
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

func legalName(name string) bool {
	return name != "" && len(name) <= 200 && name != DefaultTypes && !strings.ContainsAny(name, "$\x00") && !strings.HasPrefix(name, "system.")
}
