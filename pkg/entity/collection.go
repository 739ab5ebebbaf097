package entity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/outbox/guard"
)

// Collection stores entities of type T in a collection, in the transaction of the context. Without
// a running transaction each call fails with outbox.ErrNoTransaction, unless the option
// WithoutTransaction is set.
type Collection[T any, I ID] struct {
	config
	docs       entities.Documents
	id         func(*T) *I
	versionPtr func(*T) *int64 // nil if T has no field for the version
	versionKey string          // field of the version in documents, or "" if there are no versions
}

// New returns a Collection over coll. id returns a pointer to the id in an entity. T is encoded as
// with bson.Marshal, except that the id is always stored as _id. New does no I/O. The error reports
// a nil collection, one that a saga of this process uses, or an invalid option. If a saga of another process uses the collection,
// the methods return an error: they read the collection saga_types, once a minute. A user without the right to read it gets no such
// error.
func New[T any, I ID](coll *mongo.Collection, id func(*T) *I, opts ...Option) (*Collection[T, I], error) {
	cfg, err := newConfig(coll, opts)
	if err == nil && id == nil {
		err = errors.New("the function of the id is nil")
	}
	if err != nil {
		return nil, fmt.Errorf("entity: collection %s: %w", cfg.target, err)
	}

	// internal/lab/memory replaces the storage in unit tests.
	docs := cfg.storage.Documents
	if docs == nil {
		var opts []guard.Option
		if cfg.plain {
			opts = append(opts, guard.WithoutTransaction())
		}
		docs = onMongo(coll, opts...)
	}
	collection := &Collection[T, I]{config: cfg, docs: docs, id: id}
	if cfg.version != nil {
		versionPtr, ok := cfg.version.(func(*T) *int64)
		if !ok || versionPtr == nil {
			return nil, fmt.Errorf("entity: collection %s: WithVersion got a %T, want a func(*%s) *int64",
				docs.Name(), cfg.version, reflect.TypeFor[T]())
		}

		collection.versionPtr = versionPtr
		collection.versionKey = cfg.versionField
	}

	return collection, nil
}

// Load returns the entity with this id. If it does not exist, the error is ErrMissing.
func (c *Collection[T, I]) Load(ctx context.Context, id I) (T, error) {
	entity, ok, err := c.Find(ctx, id)
	if err == nil && !ok {
		err = c.notFoundError(id)
	}
	return entity, err
}

// Find returns the entity with this id, and whether it exists.
func (c *Collection[T, I]) Find(ctx context.Context, id I) (entity T, ok bool, err error) {
	key, err := idValue(id)
	if err != nil {
		return entity, false, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	docs, err := c.docs.Find(ctx, []bson.RawValue{key})
	if err != nil || len(docs) == 0 {
		return entity, false, err
	}

	entity, err = c.decodeEntity(docs[0])
	return entity, err == nil, err
}

// Insert adds an entity and returns its version: 1, or 0 without versions. If an entity with this
// id exists, the error is ErrExists. entity is not changed.
func (c *Collection[T, I]) Insert(ctx context.Context, entity T) (int64, error) {
	doc, err := c.encodeEntity(entity, 1)
	if err != nil {
		return 0, err
	}

	// Only one document is inserted, so an error is about its id.
	err = c.docs.Insert(ctx, []bson.Raw{doc})
	if errors.Is(err, ErrExists) {
		return 0, fmt.Errorf("%s %s: %w", c.docs.Name(), formatID(*c.id(&entity)), err)
	}

	return c.returnedVersion(1), err
}

// Update replaces an entity and returns its new version, or 0 without versions. If the entity does
// not exist, the error is ErrMissing. With WithVersion, the stored version must be the version
// of entity, otherwise the error is ErrStale. entity is not changed: to update it again, set its
// version to the returned one.
func (c *Collection[T, I]) Update(ctx context.Context, entity T) (int64, error) {
	var guard *entities.Guard
	if c.versionPtr != nil {
		guard = &entities.Guard{Field: c.versionKey, Version: *c.versionPtr(&entity)}
	}
	return c.replaceDocument(ctx, entity, guard)
}

// replaceDocument replaces the document of entity, if it has the version of guard. guard may be nil.
func (c *Collection[T, I]) replaceDocument(ctx context.Context, entity T, guard *entities.Guard) (int64, error) {
	var next int64
	if guard != nil {
		next = guard.Version + 1
	}

	doc, err := c.encodeEntity(entity, next)
	if err != nil {
		return 0, err
	}

	ok, err := c.docs.Replace(ctx, doc, guard)
	// A missing entity and a changed version both match no document: a second read separates them.
	if err == nil && !ok {
		err = c.mismatchError(ctx, *c.id(&entity), guard)
	}
	if err != nil {
		return 0, err
	}

	return next, nil
}

// storeRounds limits the attempts of a store without a transaction.
const storeRounds = 16

// Store inserts an entity or replaces it, regardless of its stored version: the last write wins. It
// returns the new version, or 0 without versions. entity is not changed.
func (c *Collection[T, I]) Store(ctx context.Context, entity T) (int64, error) {
	if c.versionPtr == nil {
		doc, err := c.encodeEntity(entity, 0)
		if err != nil {
			return 0, err
		}

		return 0, c.docs.Put(ctx, []bson.Raw{doc})
	}

	for round := 1; ; round++ {
		version, err := c.storeOver(ctx, entity)
		// In a transaction, the server detects a race, and the whole transaction runs again.
		lost := errors.Is(err, ErrExists) || errors.Is(err, ErrMissing) || errors.Is(err, ErrStale)
		if !lost || round == storeRounds || inTransaction(ctx) {
			return version, err
		}
	}
}

// storeOver inserts entity, or replaces the stored version that it has read before.
func (c *Collection[T, I]) storeOver(ctx context.Context, entity T) (int64, error) {
	key, err := idValue(*c.id(&entity))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	found, err := c.docs.Find(ctx, []bson.RawValue{key}, c.versionKey)
	if err != nil {
		return 0, err
	}
	// If another insert is faster, this returns ErrExists, and Store or the transaction tries again.
	if len(found) == 0 {
		return c.Insert(ctx, entity)
	}

	version, err := readVersion(found[0], c.versionKey)
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w", c.docs.Name(), formatID(*c.id(&entity)), err)
	}

	return c.replaceDocument(ctx, entity, &entities.Guard{Field: c.versionKey, Version: version})
}

// Delete removes an entity regardless of its version, and reports whether it existed.
func (c *Collection[T, I]) Delete(ctx context.Context, id I) (bool, error) {
	key, err := idValue(id)
	if err != nil {
		return false, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	n, err := c.docs.Delete(ctx, []bson.RawValue{key}, nil)
	return n > 0, err
}

// DeleteEntity removes an entity. If it does not exist, the error is ErrMissing. With
// WithVersion, the stored version must be the version of entity, otherwise the error is ErrStale.
func (c *Collection[T, I]) DeleteEntity(ctx context.Context, entity T) error {
	id := *c.id(&entity)
	key, err := idValue(id)
	if err != nil {
		return fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	// Without WithVersion there is no version to compare.
	var guard *entities.Guard
	if c.versionPtr != nil {
		guard = &entities.Guard{Field: c.versionKey, Version: *c.versionPtr(&entity)}
	}

	n, err := c.docs.Delete(ctx, []bson.RawValue{key}, guard)
	// A missing entity and a changed version both match no document: a second read separates them.
	if err == nil && n == 0 {
		err = c.mismatchError(ctx, id, guard)
	}

	return err
}

// mismatchError returns the error for a change that matched no document.
func (c *Collection[T, I]) mismatchError(ctx context.Context, id I, guard *entities.Guard) error {
	if guard == nil {
		return c.notFoundError(id)
	}

	key, err := idValue(id)
	if err != nil {
		return err
	}

	// The stored version shows whether the entity is gone or was changed.
	found, err := c.docs.Find(ctx, []bson.RawValue{key}, c.versionKey)
	switch {
	case err != nil:
		return err
	case len(found) == 0:
		return c.notFoundError(id)
	}

	version, err := readVersion(found[0], c.versionKey)
	if err != nil {
		return fmt.Errorf("%s %s: %w", c.docs.Name(), formatID(id), err)
	}

	return c.staleError(id, guard.Version, version)
}

// staleError returns the error for an entity with another version than the stored one.
func (c *Collection[T, I]) staleError(id I, given, stored int64) error {
	return fmt.Errorf("%s %s: %w: version %d is stored, version %d was given; load it again",
		c.docs.Name(), formatID(id), ErrStale, stored, given)
}

// notFoundError returns the error for an entity that does not exist.
func (c *Collection[T, I]) notFoundError(id I) error {
	return fmt.Errorf("%s %s: %w", c.docs.Name(), formatID(id), ErrMissing)
}

// returnedVersion returns version, or 0 without versions.
func (c *Collection[T, I]) returnedVersion(version int64) int64 {
	if c.versionPtr == nil {
		return 0
	}
	return version
}

// encodeEntity returns the document of entity with this version.
func (c *Collection[T, I]) encodeEntity(entity T, version int64) (bson.Raw, error) {
	key, err := idValue(*c.id(&entity))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	body, err := marshalEntity(c.registry, entity)
	if err == nil {
		body, err = composeDocument(key, body, c.versionKey, version)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: encoding: %w", c.docs.Name(), formatID(*c.id(&entity)), err)
	}

	return body, nil
}

// decodeEntity returns the entity of a document, with its id and its version.
func (c *Collection[T, I]) decodeEntity(doc bson.Raw) (entity T, err error) {
	id, err := idFromValue[I](doc.Lookup("_id"))
	if err != nil {
		return entity, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}

	decoder := bson.NewDecoder(bson.NewDocumentReader(bytes.NewReader(doc)))
	decoder.SetRegistry(c.registry)
	if err := decoder.Decode(&entity); err != nil {
		return entity, fmt.Errorf("%s %s: decoding: %w", c.docs.Name(), formatID(id), err)
	}

	// T may have no field for _id, so the id is set through the function.
	*c.id(&entity) = id
	if c.versionPtr != nil {
		version, err := readVersion(doc, c.versionKey)
		if err != nil {
			return entity, fmt.Errorf("%s %s: %w", c.docs.Name(), formatID(id), err)
		}

		*c.versionPtr(&entity) = version
	}

	return entity, nil
}

// marshalEntity encodes value with a registry.
func marshalEntity(registry *bson.Registry, value any) (bson.Raw, error) {
	var buf bytes.Buffer
	encoder := bson.NewEncoder(bson.NewDocumentWriter(&buf))
	encoder.SetRegistry(registry)

	err := encoder.Encode(value)
	return buf.Bytes(), err
}
