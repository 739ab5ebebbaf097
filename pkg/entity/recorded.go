package entity

import (
	"context"
	"errors"
	"fmt"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Recorded is a collection that records its changes. Each written entity becomes an event
// "<name>.upserted" with the entity as its payload, and each deleted entity an event
// "<name>.deleted". Entities and events are written in the same transaction.
//
// Every entity has a version in its document (see WithVersionField). The version continues if an
// entity is deleted and created again. For this purpose, a deleted entity leaves its id and version
// in the collection "<collection>_deleted". Do not clear that collection while projectors exist.
//
// No method can write without recording: there are no filters, update operators or aggregations.
// Methods for many entities receive the entities or their ids, and record one event for each.
//
// Without a running transaction, calls fail with outbox.ErrNoTransaction, except for the methods
// that start their own transactions. If a call fails after it has started to write, the transaction
// is rollback-only.
type Recorded[T any, I ID] struct {
	entities *Collection[T, I]
	deleted  entities.Documents // versions of deleted entities
	append   func(ctx context.Context, events ...event.Event) error
	name     string
}

// NewRecorded returns a Recorded over coll that appends events to box, which must be an outbox of
// the same client. id returns a pointer to the id in an entity.
//
// name is the name of the entities in events: the aggregate type, which selects the topic, and the
// beginning of the type of the events. Never change it, even if T is renamed.
//
// NewRecorded does no I/O. The error reports a nil or empty argument, or an option that a Recorded
// does not support.
func NewRecorded[T any, I ID](
	coll *mongo.Collection, box *outbox.Box, name string, id func(*T) *I, opts ...Option,
) (*Recorded[T, I], error) {
	collection, err := New(coll, id, opts...)
	if err != nil {
		return nil, err
	}

	appendEvents := collection.storage.Append
	if appendEvents == nil && box != nil {
		appendEvents = box.Append
	}
	deleted := collection.storage.Deleted
	if deleted == nil {
		deleted = onMongo(deletedCollection(coll))
	}

	var errs []error
	if appendEvents == nil {
		errs = append(errs, errors.New("the outbox is nil"))
	}
	if name == "" {
		errs = append(errs, errors.New("the name is empty"))
	}
	if collection.plain {
		errs = append(errs, fmt.Errorf("%w: a change and its event need a transaction: remove WithoutTransaction", ErrRejected))
	}
	if collection.project != nil {
		errs = append(errs, errors.New("WithProjection applies to a Projector only"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("entity: recorded collection %s: %w", collection.target, err)
	}

	// A Recorded stores versions even if T has no field for them.
	collection.versionKey = collection.versionField
	return &Recorded[T, I]{collection, deleted, appendEvents, name}, nil
}

// deletedCollection returns the collection that contains the versions of the entities that were
// deleted from coll.
func deletedCollection(coll *mongo.Collection) *mongo.Collection {
	return coll.Database().Collection(coll.Name() + "_deleted")
}

// Load returns the entity with this id. If it does not exist, the error is ErrMissing.
func (r *Recorded[T, I]) Load(ctx context.Context, id I) (T, error) { return r.entities.Load(ctx, id) }

// Find returns the entity with this id, and whether it exists.
func (r *Recorded[T, I]) Find(ctx context.Context, id I) (T, bool, error) {
	return r.entities.Find(ctx, id)
}

// Insert adds an entity and returns its version. If an entity with this id exists, the error is ErrExists. entity is not changed.
func (r *Recorded[T, I]) Insert(ctx context.Context, entity T) (int64, error) {
	return firstVersion(r.writeEntities(ctx, verbInsert, []T{entity}))
}

// Update replaces an entity and returns its new version. If the entity does not exist, the error is
// ErrMissing. With WithVersion, the stored version must be the version of entity, otherwise the
// error is ErrStale. entity is not changed.
func (r *Recorded[T, I]) Update(ctx context.Context, entity T) (int64, error) {
	return firstVersion(r.writeEntities(ctx, verbUpdate, []T{entity}))
}

// Store inserts an entity or replaces it, regardless of its stored version, and returns the new
// version. entity is not changed.
func (r *Recorded[T, I]) Store(ctx context.Context, entity T) (int64, error) {
	return firstVersion(r.writeEntities(ctx, verbStore, []T{entity}))
}

// firstVersion returns the version of the only entity that was written.
func firstVersion(vs []int64, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return vs[0], nil
}

// Delete removes an entity regardless of its version, and reports whether it existed. If it did not
// exist, nothing is recorded.
func (r *Recorded[T, I]) Delete(ctx context.Context, id I) (bool, error) {
	n, err := r.DeleteMany(ctx, id)
	return n > 0, err
}

// DeleteEntity removes an entity. If it does not exist, the error is ErrMissing. With
// WithVersion, the stored version must be the version of entity, otherwise the error is ErrStale.
func (r *Recorded[T, I]) DeleteEntity(ctx context.Context, entity T) error {
	id := *r.entities.id(&entity)
	keys, err := r.distinctKeys([]I{id})
	if err != nil {
		return err
	}

	// Read without the entity itself: the event of a deletion has only id and version.
	found, err := r.storedVersions(ctx, r.entities.docs, keys)
	if err != nil {
		return err
	}

	version, ok := found[mapKey(keys[0])]
	if !ok {
		return r.entities.notFoundError(id)
	}
	if err := r.checkVersion(entity, version); err != nil {
		return err
	}

	return r.removeEntities(ctx, []I{id}, keys, found)
}

// verb is the kind of a write.
type verb uint8

const (
	verbInsert verb = iota
	verbUpdate
	verbStore
)

// checkVersion returns ErrStale if entity has another version than the stored one.
func (r *Recorded[T, I]) checkVersion(entity T, stored int64) error {
	if r.entities.versionPtr == nil || *r.entities.versionPtr(&entity) == stored {
		return nil
	}
	return r.entities.staleError(*r.entities.id(&entity), *r.entities.versionPtr(&entity), stored)
}

// distinctKeys returns the ids as BSON values. It fails if an id occurs twice, because the second
// change would not see the first one.
func (r *Recorded[T, I]) distinctKeys(ids []I) ([]bson.RawValue, error) {
	keys := make([]bson.RawValue, len(ids))
	seen := make(map[string]struct{}, len(ids))
	for i, id := range ids {
		key, err := idValue(id)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", r.entities.docs.Name(), err)
		}

		// Both changes would get the same version.
		if _, twice := seen[mapKey(key)]; twice {
			return nil, fmt.Errorf("%s: %w: %s occurs twice in one call", r.entities.docs.Name(), ErrRejected, formatID(id))
		}

		seen[mapKey(key)] = struct{}{}
		keys[i] = key
	}

	return keys, nil
}

// storedVersions returns the versions of the existing documents by their key.
func (r *Recorded[T, I]) storedVersions(
	ctx context.Context, docs entities.Documents, keys []bson.RawValue,
) (map[string]int64, error) {
	if len(keys) == 0 {
		return nil, nil
	}

	// Only the versions are needed, so the documents stay on the server.
	found, err := docs.Find(ctx, keys, r.entities.versionKey)
	if err != nil {
		return nil, err
	}

	vs := make(map[string]int64, len(found))
	for _, d := range found {
		version, err := readVersion(d, r.entities.versionKey)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", docs.Name(), err)
		}

		vs[mapKey(d.Lookup("_id"))] = version
	}

	return vs, nil
}

// writeEntities inserts, updates or stores the entities, which must be distinct, and returns their
// new versions.
//
// Everything is checked before anything is written. The events are written first: Append rejects
// large events without the server, but an error of the server aborts the transaction. It is safe to
// read the versions and to write them plus one: if another transaction changes an entity in
// between, the server reports a write conflict, and the transaction runs again.
func (r *Recorded[T, I]) writeEntities(ctx context.Context, verb verb, ts []T) ([]int64, error) {
	ids := make([]I, len(ts))
	for i := range ts {
		entity := ts[i]
		ids[i] = *r.entities.id(&entity)
	}

	keys, err := r.distinctKeys(ids)
	if err != nil {
		return nil, err
	}

	existing, err := r.storedVersions(ctx, r.entities.docs, keys)
	if err != nil {
		return nil, err
	}

	// An entity that exists cannot be among the deleted ones.
	_, missing := splitKeys(keys, existing)
	deleted, err := r.storedVersions(ctx, r.deleted, missing)
	if err != nil {
		return nil, err
	}

	var (
		next   = make([]int64, len(ts))
		docs   = make([]bson.Raw, len(ts))
		events = make([]event.Event, len(ts))
	)
	// Nothing is written in this loop, so an error leaves the transaction usable.
	for i, entity := range ts {
		stored, exists := existing[mapKey(keys[i])]
		switch {
		case exists && verb == verbInsert:
			return nil, fmt.Errorf("%s %s: %w", r.entities.docs.Name(), formatID(ids[i]), ErrExists)
		case !exists && verb == verbUpdate:
			return nil, r.entities.notFoundError(ids[i])
		case verb == verbUpdate:
			if err := r.checkVersion(entity, stored); err != nil {
				return nil, err
			}
		}

		// The versions of an entity that was deleted go on after the version of its deletion.
		next[i] = 1 + max(stored, deleted[mapKey(keys[i])])
		if docs[i], err = r.entities.encodeEntity(entity, next[i]); err != nil {
			return nil, err
		}

		events[i] = changeEvent(r.name, changeUpserted, ids[i], next[i], event.Document(docs[i]))
	}

	// The outbox checks the size of the events before it sends them.
	if err := r.append(ctx, events...); err != nil {
		return nil, err
	}
	revived, _ := splitKeys(keys, deleted)
	if err := r.putDocuments(ctx, docs, revived); err != nil {
		// The events are in the outbox already, so the transaction must not commit.
		r.entities.docs.RollbackOnly(ctx, err)
		return nil, err
	}

	return next, nil
}

// putDocuments writes the documents and removes the deletions of the revived ones.
func (r *Recorded[T, I]) putDocuments(ctx context.Context, docs []bson.Raw, revived []bson.RawValue) error {
	if err := r.entities.docs.Put(ctx, docs); err != nil || len(revived) == 0 {
		return err
	}

	_, err := r.deleted.Delete(ctx, revived, nil)
	return err
}

// removeEntities deletes the entities that found contains, and records the deletions.
func (r *Recorded[T, I]) removeEntities(
	ctx context.Context, ids []I, keys []bson.RawValue, found map[string]int64,
) error {
	var (
		events   []event.Event
		marks    []bson.Raw
		existing []bson.RawValue
	)
	for i, key := range keys {
		version, ok := found[mapKey(key)]
		if !ok {
			continue
		}

		// A deletion is a change, so it has the next version.
		mark, err := composeDocument(key, emptyDocument, r.entities.versionKey, version+1)
		if err != nil {
			return err
		}

		payload := event.Document(mark)
		if r.entities.tombstones {
			payload = event.Payload{}
		}

		events = append(events, changeEvent(r.name, changeDeleted, ids[i], version+1, payload))
		marks = append(marks, mark)
		existing = append(existing, key)
	}

	if len(existing) == 0 {
		return nil
	}
	if err := r.append(ctx, events...); err != nil {
		return err
	}

	// From here on, an error of the server leaves the transaction half done, even if the caller ignores the error.
	_, err := r.entities.docs.Delete(ctx, existing, nil)
	if err == nil {
		err = r.deleted.Put(ctx, marks)
	}
	if err != nil {
		r.entities.docs.RollbackOnly(ctx, err)
	}
	return err
}

var emptyDocument = bson.Raw{5, 0, 0, 0, 0}

// splitKeys returns the keys that versions contains, and the others.
func splitKeys(keys []bson.RawValue, versions map[string]int64) (found, missing []bson.RawValue) {
	for _, k := range keys {
		if _, ok := versions[mapKey(k)]; ok {
			found = append(found, k)
		} else {
			missing = append(missing, k)
		}
	}
	return found, missing
}
