package entity

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/event"
)

// Appender is an outbox, as far as a Recorded uses it: an *outbox.Box.
type Appender interface {
	Append(ctx context.Context, events ...event.Event) error
}

// Recorded is a collection that records its own changes: each entity written becomes an event "<name>.upserted" with the
// entity as its payload, each one deleted an event "<name>.deleted", in the same transaction. All changes have a version,
// kept in the document (see WithVersionField), that goes on counting when the entity is deleted and made again; for that a
// deleted entity leaves its id and version in the collection "<collection>_deleted", which must not be cleared while
// somebody projects.
//
// There is nothing here that could write without recording: no filters, no update operators, no aggregation. What changes
// many entities takes the entities or their ids, and is as many events.
//
// Without a running transaction each call is refused with outbox.ErrNoTransaction, except those that make their own. An
// error of a call that had begun to write makes the transaction rollback-only.
type Recorded[T any, I ID] struct {
	c    *Collection[T, I]
	gone Documents
	box  Appender
	name string
}

// NewRecorded makes a Recorded over coll that appends to box, which must be an outbox of the same client. name is what the
// entities are called on the wire, for good: a program's type may be renamed, the name may not. It is the aggregate type,
// which chooses the topic, and begins the type of the events. It does no I/O.
func NewRecorded[T any, I ID](coll *mongo.Collection, box Appender, name string, id func(*T) *I, opts ...Option) (*Recorded[T, I], error) {
	if coll == nil {
		return nil, errors.New("entity: the collection is nil")
	}
	docs, err := OnMongo(coll, false)
	if err != nil {
		return nil, err
	}
	gone, err := OnMongo(deletedOf(coll), false)
	if err != nil {
		return nil, err
	}
	return NewRecordedOn(docs, gone, box, name, id, opts...)
}

// deletedOf is the collection with the versions of what was deleted from coll.
func deletedOf(coll *mongo.Collection) *mongo.Collection {
	return coll.Database().Collection(coll.Name() + "_deleted")
}

// NewRecordedOn is NewRecorded over any Documents: gone keeps the versions of what was deleted from docs. One transaction
// must span both and box.
func NewRecordedOn[T any, I ID](docs, gone Documents, box Appender, name string, id func(*T) *I, opts ...Option) (*Recorded[T, I], error) {
	c, err := NewOn(docs, id, opts...)
	if err != nil {
		return nil, err
	}
	var errs []error
	if gone == nil || box == nil {
		errs = append(errs, errors.New("the outbox or the documents for what was deleted is nil"))
	}
	if name == "" {
		errs = append(errs, errors.New("the name is empty"))
	}
	if c.plain {
		errs = append(errs, &RefusedError{docs.Name(), "a change and its event need a transaction: WithoutTransaction is not for a Recorded"})
	}
	if c.project != nil {
		errs = append(errs, errors.New("ProjectAs is for a Projector"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("entity: recorded collection %s: %w", docs.Name(), err)
	}
	c.stored = c.versionField
	return &Recorded[T, I]{c, gone, box, name}, nil
}

// Load returns a required entity; the error of one that is not there is a *NotFoundError.
func (r *Recorded[T, I]) Load(ctx context.Context, id I) (T, error) { return r.c.Load(ctx, id) }

// Find returns an optional entity, and whether it is there.
func (r *Recorded[T, I]) Find(ctx context.Context, id I) (T, bool, error) { return r.c.Find(ctx, id) }

// Insert adds an entity that must not be there (an *ExistsError) and returns its version.
func (r *Recorded[T, I]) Insert(ctx context.Context, t T) (int64, error) {
	return first(r.write(ctx, insert, []T{t}))
}

// Update replaces an entity that must be there (a *NotFoundError) and returns its new version. With Versioned it must still
// have the version that t has (a *VersionError). t is not changed.
func (r *Recorded[T, I]) Update(ctx context.Context, t T) (int64, error) {
	return first(r.write(ctx, update, []T{t}))
}

// Store inserts the entity, or replaces it whatever its version, and returns the new version. t is not changed.
func (r *Recorded[T, I]) Store(ctx context.Context, t T) (int64, error) {
	return first(r.write(ctx, store, []T{t}))
}

func first(vs []int64, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return vs[0], nil
}

// Delete removes an entity, whatever its version, and says whether it was there; if not, nothing is recorded.
func (r *Recorded[T, I]) Delete(ctx context.Context, id I) (bool, error) {
	n, err := r.DeleteMany(ctx, id)
	return n > 0, err
}

// DeleteEntity removes an entity that must be there (a *NotFoundError) and, with Versioned, have the version that t has (a
// *VersionError).
func (r *Recorded[T, I]) DeleteEntity(ctx context.Context, t T) error {
	id := *r.c.id(&t)
	keys, err := r.keys([]I{id})
	if err != nil {
		return err
	}
	found, err := r.versions(ctx, r.c.docs, keys)
	if err != nil {
		return err
	}
	v, ok := found[keyOf(keys[0])]
	if !ok {
		return r.c.missing(id)
	}
	if err := r.guard(t, v); err != nil {
		return err
	}
	return r.remove(ctx, []I{id}, keys, found)
}

// Apply carries the actions out in their order, up to the first error.
func (r *Recorded[T, I]) Apply(ctx context.Context, actions ...Action[T]) error {
	return apply(ctx, r, r.c.id, actions)
}

// guard refuses t if it is of another version than the stored one.
func (r *Recorded[T, I]) guard(t T, stored int64) error {
	if r.c.ver == nil || *r.c.ver(&t) == stored {
		return nil
	}
	return &VersionError{Collection: r.c.docs.Name(), ID: text(*r.c.id(&t)), Given: *r.c.ver(&t), Stored: stored}
}

func (r *Recorded[T, I]) keys(ids []I) ([]bson.RawValue, error) {
	keys := make([]bson.RawValue, len(ids))
	seen := make(map[string]struct{}, len(ids))
	for i, id := range ids {
		key, err := raw(id)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.c.docs.Name(), err)
		}
		if _, twice := seen[keyOf(key)]; twice {
			return nil, &RefusedError{r.c.docs.Name(), fmt.Sprintf("%s is there twice in one call", text(id))}
		}
		seen[keyOf(key)] = struct{}{}
		keys[i] = key
	}
	return keys, nil
}

// versions are those of the documents that are there, by key.
func (r *Recorded[T, I]) versions(ctx context.Context, docs Documents, keys []bson.RawValue) (map[string]int64, error) {
	if len(keys) == 0 {
		return nil, nil
	}
	found, err := docs.Find(ctx, keys, r.c.stored)
	if err != nil {
		return nil, err
	}
	vs := make(map[string]int64, len(found))
	for _, d := range found {
		v, err := versionOf(d, r.c.stored)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", docs.Name(), err)
		}
		vs[keyOf(d.Lookup("_id"))] = v
	}
	return vs, nil
}

// write does the verb to all of ts, which are distinct, and returns their new versions.
//
// All is decided before anything is sent; then the events go first, because Append refuses by itself what is too large,
// and what comes after can only be refused by the server, which aborts the transaction. Reading versions and writing them
// plus one is safe: in a transaction a change by others in between is a write conflict, and the whole is run again.
func (r *Recorded[T, I]) write(ctx context.Context, v verb, ts []T) ([]int64, error) {
	ids := make([]I, len(ts))
	for i := range ts {
		t := ts[i]
		ids[i] = *r.c.id(&t)
	}
	keys, err := r.keys(ids)
	if err != nil {
		return nil, err
	}
	here, err := r.versions(ctx, r.c.docs, keys)
	if err != nil {
		return nil, err
	}
	gone, err := r.versions(ctx, r.gone, pick(keys, here, false))
	if err != nil {
		return nil, err
	}
	var (
		next   = make([]int64, len(ts))
		docs   = make([]bson.Raw, len(ts))
		events = make([]event.Event, len(ts))
	)
	for i, t := range ts {
		stored, ok := here[keyOf(keys[i])]
		switch {
		case ok && v == insert:
			return nil, &ExistsError{Collection: r.c.docs.Name(), ID: text(ids[i])}
		case !ok && v == update:
			return nil, r.c.missing(ids[i])
		case v == update:
			if err := r.guard(t, stored); err != nil {
				return nil, err
			}
		}
		next[i] = 1 + max(stored, gone[keyOf(keys[i])])
		if docs[i], err = r.c.encode(t, next[i]); err != nil {
			return nil, err
		}
		events[i] = changeEvent(r.name, Upserted, ids[i], next[i], docs[i])
	}
	if err := r.box.Append(ctx, events...); err != nil {
		return nil, err
	}
	if err := r.put(ctx, docs, pick(keys, gone, true)); err != nil {
		r.c.docs.RollbackOnly(ctx, err)
		return nil, err
	}
	return next, nil
}

// put writes documents and forgets that they were deleted once.
func (r *Recorded[T, I]) put(ctx context.Context, docs []bson.Raw, revived []bson.RawValue) error {
	if err := r.c.docs.Put(ctx, docs); err != nil || len(revived) == 0 {
		return err
	}
	_, err := r.gone.Delete(ctx, revived, nil)
	return err
}

// remove deletes and records what found has of the keys.
func (r *Recorded[T, I]) remove(ctx context.Context, ids []I, keys []bson.RawValue, found map[string]int64) error {
	var (
		events []event.Event
		marks  []bson.Raw
		there  []bson.RawValue
	)
	for i, key := range keys {
		v, ok := found[keyOf(key)]
		if !ok {
			continue
		}
		mark, err := compose(key, emptyDocument, r.c.stored, v+1)
		if err != nil {
			return err
		}
		var payload any = mark
		if r.c.tombstones {
			payload = nil
		}
		events = append(events, changeEvent(r.name, Deleted, ids[i], v+1, payload))
		marks, there = append(marks, mark), append(there, key)
	}
	if len(there) == 0 {
		return nil
	}
	if err := r.box.Append(ctx, events...); err != nil {
		return err
	}
	_, err := r.c.docs.Delete(ctx, there, nil)
	if err == nil {
		err = r.gone.Put(ctx, marks)
	}
	if err != nil {
		r.c.docs.RollbackOnly(ctx, err)
	}
	return err
}

var emptyDocument = bson.Raw{5, 0, 0, 0, 0}

// pick are the keys that m has, or has not.
func pick(keys []bson.RawValue, m map[string]int64, have bool) (out []bson.RawValue) {
	for _, k := range keys {
		if _, ok := m[keyOf(k)]; ok == have {
			out = append(out, k)
		}
	}
	return out
}
