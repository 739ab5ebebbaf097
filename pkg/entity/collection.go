package entity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"reflect"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Collection keeps entities of type T in a collection, in the transaction of the context. A context without a running
// transaction is refused with outbox.ErrNoTransaction, unless WithoutTransaction says otherwise.
type Collection[T any, I ID] struct {
	config
	docs   Documents
	id     func(*T) *I
	ver    func(*T) *int64 // nil: T does not show its version
	stored string          // field of the version in documents; "" where there is none
}

// New makes a Collection over coll; id says where in T the id is. T is encoded as bson.Marshal would, except that the id is
// stored as _id whatever its tag says. It does no I/O.
func New[T any, I ID](coll *mongo.Collection, id func(*T) *I, opts ...Option) (*Collection[T, I], error) {
	if coll == nil {
		return nil, errors.New("entity: the collection is nil")
	}
	c, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("entity: collection %s: %w", coll.Name(), err)
	}
	docs, err := OnMongo(coll, c.plain)
	if err != nil {
		return nil, err
	}
	return NewOn(docs, id, opts...)
}

// NewOn is New over any Documents, which decide by themselves about WithoutTransaction.
func NewOn[T any, I ID](docs Documents, id func(*T) *I, opts ...Option) (*Collection[T, I], error) {
	if docs == nil || id == nil {
		return nil, errors.New("entity: the documents or the function of the id is nil")
	}
	cfg, err := newConfig(opts)
	if err != nil {
		return nil, fmt.Errorf("entity: collection %s: %w", docs.Name(), err)
	}
	c := &Collection[T, I]{config: cfg, docs: docs, id: id}
	if cfg.version != nil {
		ver, ok := cfg.version.(func(*T) *int64)
		if !ok || ver == nil {
			return nil, fmt.Errorf("entity: collection %s: Versioned has a %T, not a func(*%s) *int64", docs.Name(), cfg.version, reflect.TypeFor[T]())
		}
		c.ver, c.stored = ver, cfg.versionField
	}
	return c, nil
}

// Load returns a required entity; the error of one that is not there is a *NotFoundError.
func (c *Collection[T, I]) Load(ctx context.Context, id I) (T, error) {
	t, ok, err := c.Find(ctx, id)
	if err == nil && !ok {
		err = c.missing(id)
	}
	return t, err
}

// Find returns an optional entity, and whether it is there.
func (c *Collection[T, I]) Find(ctx context.Context, id I) (t T, ok bool, err error) {
	key, err := raw(id)
	if err != nil {
		return t, false, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	docs, err := c.docs.Find(ctx, []bson.RawValue{key})
	if err != nil || len(docs) == 0 {
		return t, false, err
	}
	t, err = c.decode(docs[0])
	return t, err == nil, err
}

// Insert adds an entity that must not be there (an *ExistsError) and returns its version: 1, or 0 without versions. t is
// not changed.
func (c *Collection[T, I]) Insert(ctx context.Context, t T) (int64, error) {
	doc, err := c.encode(t, 1)
	if err != nil {
		return 0, err
	}
	err = c.docs.Insert(ctx, []bson.Raw{doc})
	if exists := new(*ExistsError); errors.As(err, exists) {
		return 0, &ExistsError{Collection: c.docs.Name(), ID: text(*c.id(&t)), Err: (*exists).Err}
	}
	return c.number(1), err
}

// Update replaces an entity that must be there (a *NotFoundError) and returns its new version, or 0 without versions. With
// Versioned it must still have the version that t has (a *VersionError). t is not changed: to update it once more, set its
// version to the one returned.
func (c *Collection[T, I]) Update(ctx context.Context, t T) (int64, error) {
	var g *Guard
	if c.ver != nil {
		g = &Guard{c.stored, *c.ver(&t)}
	}
	return c.replace(ctx, t, g)
}

func (c *Collection[T, I]) replace(ctx context.Context, t T, g *Guard) (int64, error) {
	var next int64
	if g != nil {
		next = g.Version + 1
	}
	doc, err := c.encode(t, next)
	if err != nil {
		return 0, err
	}
	ok, err := c.docs.Replace(ctx, doc, g)
	if err == nil && !ok {
		err = c.refused(ctx, *c.id(&t), g)
	}
	if err != nil {
		return 0, err
	}
	return next, nil
}

// storeRounds bounds how often a store without a transaction loses against others.
const storeRounds = 16

// Store inserts the entity, or replaces it whatever its version: the last write wins. It returns the new version, or 0
// without versions. t is not changed.
func (c *Collection[T, I]) Store(ctx context.Context, t T) (int64, error) {
	if c.ver == nil {
		doc, err := c.encode(t, 0)
		if err != nil {
			return 0, err
		}
		return 0, c.docs.Put(ctx, []bson.Raw{doc})
	}
	for round := 1; ; round++ {
		v, err := c.storeOver(ctx, t)
		// In a transaction a race is the server's to find, and the whole is run again.
		lost := errors.Is(err, ErrExists) || errors.Is(err, ErrMissing) || errors.Is(err, ErrStale)
		if !lost || round == storeRounds || inTransaction(ctx) {
			return v, err
		}
	}
}

// storeOver stores t over what is there now.
func (c *Collection[T, I]) storeOver(ctx context.Context, t T) (int64, error) {
	key, err := raw(*c.id(&t))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	found, err := c.docs.Find(ctx, []bson.RawValue{key}, c.stored)
	if err != nil {
		return 0, err
	}
	if len(found) == 0 {
		return c.Insert(ctx, t)
	}
	v, err := versionOf(found[0], c.stored)
	if err != nil {
		return 0, fmt.Errorf("%s %s: %w", c.docs.Name(), text(*c.id(&t)), err)
	}
	return c.replace(ctx, t, &Guard{c.stored, v})
}

// Delete removes an entity, whatever its version, and says whether it was there.
func (c *Collection[T, I]) Delete(ctx context.Context, id I) (bool, error) {
	key, err := raw(id)
	if err != nil {
		return false, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	n, err := c.docs.Delete(ctx, []bson.RawValue{key}, nil)
	return n > 0, err
}

// DeleteEntity removes an entity that must be there (a *NotFoundError) and, with Versioned, have the version that t has (a
// *VersionError).
func (c *Collection[T, I]) DeleteEntity(ctx context.Context, t T) error {
	id := *c.id(&t)
	key, err := raw(id)
	if err != nil {
		return fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	var g *Guard
	if c.ver != nil {
		g = &Guard{c.stored, *c.ver(&t)}
	}
	n, err := c.docs.Delete(ctx, []bson.RawValue{key}, g)
	if err == nil && n == 0 {
		err = c.refused(ctx, id, g)
	}
	return err
}

// refused says why nothing matched.
func (c *Collection[T, I]) refused(ctx context.Context, id I, g *Guard) error {
	if g == nil {
		return c.missing(id)
	}
	key, err := raw(id)
	if err != nil {
		return err
	}
	found, err := c.docs.Find(ctx, []bson.RawValue{key}, c.stored)
	switch {
	case err != nil:
		return err
	case len(found) == 0:
		return c.missing(id)
	}
	v, err := versionOf(found[0], c.stored)
	if err != nil {
		return fmt.Errorf("%s %s: %w", c.docs.Name(), text(id), err)
	}
	return &VersionError{Collection: c.docs.Name(), ID: text(id), Given: g.Version, Stored: v}
}

func (c *Collection[T, I]) missing(id I) error {
	return &NotFoundError{Collection: c.docs.Name(), ID: text(id)}
}

// number is v where there are versions.
func (c *Collection[T, I]) number(v int64) int64 {
	if c.ver == nil {
		return 0
	}
	return v
}

// encode is the document of t.
func (c *Collection[T, I]) encode(t T, version int64) (bson.Raw, error) {
	key, err := raw(*c.id(&t))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	body, err := marshal(c.registry, t)
	if err == nil {
		body, err = compose(key, body, c.stored, version)
	}
	if err != nil {
		return nil, fmt.Errorf("%s %s: encoding: %w", c.docs.Name(), text(*c.id(&t)), err)
	}
	return body, nil
}

// decode is the entity of a document, with its id and version.
func (c *Collection[T, I]) decode(doc bson.Raw) (t T, err error) {
	id, err := fromRaw[I](doc.Lookup("_id"))
	if err != nil {
		return t, fmt.Errorf("%s: %w", c.docs.Name(), err)
	}
	d := bson.NewDecoder(bson.NewDocumentReader(bytes.NewReader(doc)))
	d.SetRegistry(c.registry)
	if err := d.Decode(&t); err != nil {
		return t, fmt.Errorf("%s %s: decoding: %w", c.docs.Name(), text(id), err)
	}
	*c.id(&t) = id
	if c.ver != nil {
		v, err := versionOf(doc, c.stored)
		if err != nil {
			return t, fmt.Errorf("%s %s: %w", c.docs.Name(), text(id), err)
		}
		*c.ver(&t) = v
	}
	return t, nil
}

// marshal is bson.Marshal with a registry.
func marshal(r *bson.Registry, v any) (bson.Raw, error) {
	var buf bytes.Buffer
	e := bson.NewEncoder(bson.NewDocumentWriter(&buf))
	e.SetRegistry(r)
	err := e.Encode(v)
	return buf.Bytes(), err
}
