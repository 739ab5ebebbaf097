package entity

import (
	"context"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// InsertMany inserts the entities in the transaction of ctx and returns their versions. It records
// one event for each. If an id occurs twice, the error is ErrRejected. If it fails after it has
// started to write, the transaction is rollback-only. For other errors, see Insert.
func (r *Recorded[T, I]) InsertMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, verbInsert, ts)
}

// UpdateMany updates the entities in the transaction of ctx and returns their new versions, in the
// same way as InsertMany. For other errors, see Update.
func (r *Recorded[T, I]) UpdateMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, verbUpdate, ts)
}

// StoreMany stores the entities in the transaction of ctx and returns their new versions, in the
// same way as InsertMany.
func (r *Recorded[T, I]) StoreMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, verbStore, ts)
}

// writeMany writes the entities chunk by chunk.
func (r *Recorded[T, I]) writeMany(ctx context.Context, verb verb, ts []T) ([]int64, error) {
	ids := make([]I, len(ts))
	for i := range ts {
		entity := ts[i]
		ids[i] = *r.entities.id(&entity)
	}

	// The ids must be distinct in the whole call, not only in each chunk.
	if _, err := r.distinctKeys(ids); err != nil {
		return nil, err
	}

	versions := make([]int64, 0, len(ts))
	for chunk := range slices.Chunk(ts, r.entities.chunk) {
		vs, err := r.writeEntities(ctx, verb, chunk)
		if err != nil {
			return nil, r.rollBackIfBegun(ctx, err, len(versions) > 0)
		}

		versions = append(versions, vs...)
	}

	return versions, nil
}

// rollBackIfBegun makes the transaction rollback-only if the call has written something. It returns
// err.
func (r *Recorded[T, I]) rollBackIfBegun(ctx context.Context, err error, begun bool) error {
	if begun {
		r.entities.docs.RollbackOnly(ctx, err)
	}
	return err
}

// DeleteMany deletes the existing entities with these ids regardless of their versions in the
// transaction of ctx. It records one event for each and returns their number.
func (r *Recorded[T, I]) DeleteMany(ctx context.Context, ids ...I) (int64, error) {
	// Checked for the whole call, as in writeMany.
	if _, err := r.distinctKeys(ids); err != nil {
		return 0, err
	}

	var deleted int64
	for chunk := range slices.Chunk(ids, r.entities.chunk) {
		keys, err := r.distinctKeys(chunk)
		if err != nil {
			return 0, err
		}

		found, err := r.storedVersions(ctx, r.entities.docs, keys)
		if err == nil {
			err = r.removeEntities(ctx, chunk, keys, found)
		}
		if err != nil {
			return 0, r.rollBackIfBegun(ctx, err, deleted > 0)
		}
		deleted += int64(len(found))
	}

	return deleted, nil
}

// DeleteAll deletes all entities in the transaction of ctx. It records one event for each and
// returns their number. MongoDB ends a transaction after 60 s, which is enough for about ten
// thousand entities. Delete more of them by DeleteMany in several transactions.
func (r *Recorded[T, I]) DeleteAll(ctx context.Context) (int64, error) {
	var n int64
	for {
		deleted, err := r.deleteChunk(ctx)
		if err != nil {
			return 0, r.rollBackIfBegun(ctx, err, n > 0)
		}
		if deleted == 0 {
			return n, nil
		}

		n += deleted
	}
}

// deleteChunk deletes the first chunk of entities and returns their number.
func (r *Recorded[T, I]) deleteChunk(ctx context.Context) (int64, error) {
	// Deleted entities are gone from the next scan, so each chunk starts at the beginning.
	docs, err := r.entities.docs.Scan(ctx, bson.RawValue{}, r.entities.chunk)
	if err != nil {
		return 0, err
	}

	ids := make([]I, len(docs))
	for i, d := range docs {
		if ids[i], err = idFromValue[I](d.Lookup("_id")); err != nil {
			return 0, err
		}
	}

	return r.DeleteMany(ctx, ids...)
}

// RecordAll appends an event "<name>.upserted" for each existing entity, with one transaction for
// each chunk (see WithChunk). It returns the number of events, also with an error. If ctx has a
// transaction, everything is done in it.
//
// Versions do not change, so a Projector that has the entity ignores the event, and a Projector
// with an empty collection receives all entities. The service can continue to write: a change and
// RecordAll conflict, so the event of an entity is never behind the event of a later change, and a
// compacted topic keeps the latest. Entities that were stored without versions get version 1.
func (r *Recorded[T, I]) RecordAll(ctx context.Context) (n int64, err error) {
	var after bson.RawValue
	for {
		var docs []bson.Raw
		err := r.entities.docs.Transaction(ctx, func(ctx context.Context) (err error) {
			docs, err = r.entities.docs.Scan(ctx, after, r.entities.chunk)
			if err != nil || len(docs) == 0 {
				return err
			}
			return r.recordChunk(ctx, docs)
		})
		if err != nil || len(docs) == 0 {
			return n, err
		}

		// The position moves after the transaction, because a repeated transaction must read the same entities.
		n += int64(len(docs))
		after = docs[len(docs)-1].Lookup("_id")
	}
}

// recordChunk appends events for the documents, and stores the documents again. Documents without a version get version 1.
//
// Reads conflict with no other transaction, and neither does a write that changes nothing. So each document is written
// with another version first.
func (r *Recorded[T, I]) recordChunk(ctx context.Context, docs []bson.Raw) error {
	events := make([]event.Event, len(docs))
	touched, stored := make([]bson.Raw, len(docs)), make([]bson.Raw, len(docs))
	for i, d := range docs {
		key := d.Lookup("_id")
		id, err := idFromValue[I](key)
		if err != nil {
			return err
		}

		version, err := readVersion(d, r.entities.versionKey)
		if err != nil {
			return err
		}

		// A document without a version is older than the recording of its collection.
		if stored[i] = d; version == 0 {
			version = 1
			if stored[i], err = composeDocument(key, d, r.entities.versionKey, version); err != nil {
				return err
			}
		}
		if touched[i], err = composeDocument(key, d, r.entities.versionKey, version+1); err != nil {
			return err
		}

		events[i] = changeEvent(r.name, changeUpserted, id, version, event.Document(stored[i]))
	}

	if err := r.append(ctx, events...); err != nil {
		return err
	}
	err := r.entities.docs.Put(ctx, touched)
	if err == nil {
		err = r.entities.docs.Put(ctx, stored)
	}
	// In a transaction of the caller, only half of it may be stored.
	return r.rollBackIfBegun(ctx, err, err != nil)
}
