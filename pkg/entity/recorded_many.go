package entity

import (
	"context"
	"iter"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/event"
)

// InsertMany is Insert for many, in the transaction of ctx: each is an event of its own. All of them must be distinct, else
// the call is refused (a *RefusedError).
func (r *Recorded[T, I]) InsertMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, insert, ts)
}

// UpdateMany is Update for many, as InsertMany is for Insert.
func (r *Recorded[T, I]) UpdateMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, update, ts)
}

// StoreMany is Store for many, as InsertMany is for Insert.
func (r *Recorded[T, I]) StoreMany(ctx context.Context, ts ...T) ([]int64, error) {
	return r.writeMany(ctx, store, ts)
}

func (r *Recorded[T, I]) writeMany(ctx context.Context, v verb, ts []T) ([]int64, error) {
	ids := make([]I, len(ts))
	for i := range ts {
		t := ts[i]
		ids[i] = *r.c.id(&t)
	}
	if _, err := r.keys(ids); err != nil {
		return nil, err
	}
	versions := make([]int64, 0, len(ts))
	for chunk := range slices.Chunk(ts, r.c.chunk) {
		vs, err := r.write(ctx, v, chunk)
		if err != nil {
			return nil, r.undo(ctx, err, len(versions) > 0)
		}
		versions = append(versions, vs...)
	}
	return versions, nil
}

// undo makes sure that of a call that wrote something already nothing stays.
func (r *Recorded[T, I]) undo(ctx context.Context, err error, begun bool) error {
	if begun {
		r.c.docs.RollbackOnly(ctx, err)
	}
	return err
}

// DeleteMany removes and records those of the entities that are there, whatever their versions, in the transaction of ctx,
// and returns how many they were.
func (r *Recorded[T, I]) DeleteMany(ctx context.Context, ids ...I) (int64, error) {
	if _, err := r.keys(ids); err != nil {
		return 0, err
	}
	var n int64
	for chunk := range slices.Chunk(ids, r.c.chunk) {
		keys, err := r.keys(chunk)
		if err != nil {
			return 0, err
		}
		found, err := r.versions(ctx, r.c.docs, keys)
		if err == nil {
			err = r.remove(ctx, chunk, keys, found)
		}
		if err != nil {
			return 0, r.undo(ctx, err, n > 0)
		}
		n += int64(len(found))
	}
	return n, nil
}

// DeleteAll removes and records every entity in the transaction of ctx, and returns how many they were. A server ends a
// transaction after 60 s: for more than some ten thousand there is DeleteAllInChunks.
func (r *Recorded[T, I]) DeleteAll(ctx context.Context) (int64, error) {
	var n int64
	for {
		deleted, err := r.deleteSome(ctx)
		if err != nil {
			return 0, r.undo(ctx, err, n > 0)
		}
		if deleted == 0 {
			return n, nil
		}
		n += deleted
	}
}

// DeleteAllInChunks is DeleteAll with a transaction for each chunk (see WithChunk). On an error it returns how many are
// deleted and recorded by then. If ctx has a transaction, all is done in that.
func (r *Recorded[T, I]) DeleteAllInChunks(ctx context.Context) (n int64, err error) {
	for {
		var deleted int64
		if err := r.c.docs.Transaction(ctx, func(ctx context.Context) (err error) {
			deleted, err = r.deleteSome(ctx)
			return err
		}); err != nil || deleted == 0 {
			return n, err
		}
		n += deleted
	}
}

// deleteSome deletes the first entities.
func (r *Recorded[T, I]) deleteSome(ctx context.Context) (int64, error) {
	docs, err := r.c.docs.Scan(ctx, bson.RawValue{}, r.c.chunk)
	if err != nil {
		return 0, err
	}
	ids := make([]I, len(docs))
	for i, d := range docs {
		if ids[i], err = fromRaw[I](d.Lookup("_id")); err != nil {
			return 0, err
		}
	}
	return r.DeleteMany(ctx, ids...)
}

// StoreInChunks stores what seq yields, with a transaction for each chunk (see WithChunk), and returns how many are stored
// and recorded, also on an error. An id may come again in a later chunk, but not twice in one. If ctx has a transaction,
// all is done in that.
func (r *Recorded[T, I]) StoreInChunks(ctx context.Context, seq iter.Seq[T]) (n int64, err error) {
	chunk := make([]T, 0, r.c.chunk)
	flush := func() error {
		err := r.c.docs.Transaction(ctx, func(ctx context.Context) error {
			_, err := r.StoreMany(ctx, chunk...)
			return err
		})
		if err == nil {
			n += int64(len(chunk))
			chunk = chunk[:0]
		}
		return err
	}
	for t := range seq {
		if chunk = append(chunk, t); len(chunk) == r.c.chunk {
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
	if len(chunk) > 0 {
		err = flush()
	}
	return n, err
}

// RecordAll appends an event "<name>.upserted" for every entity that is there, as it is, with a transaction for each chunk,
// and returns how many. It changes no version, so a Projector that has an entity already passes its event over; one with an
// empty collection is filled by them, while the service goes on writing. Entities from before there were versions get
// version 1. If ctx has a transaction, all is done in that.
func (r *Recorded[T, I]) RecordAll(ctx context.Context) (n int64, err error) {
	var after bson.RawValue
	for {
		var docs []bson.Raw
		if err := r.c.docs.Transaction(ctx, func(ctx context.Context) (err error) {
			if docs, err = r.c.docs.Scan(ctx, after, r.c.chunk); err != nil || len(docs) == 0 {
				return err
			}
			return r.recordAgain(ctx, docs)
		}); err != nil || len(docs) == 0 {
			return n, err
		}
		n += int64(len(docs))
		after = docs[len(docs)-1].Lookup("_id")
	}
}

func (r *Recorded[T, I]) recordAgain(ctx context.Context, docs []bson.Raw) error {
	events := make([]event.Event, len(docs))
	var adopted []bson.Raw
	for i, d := range docs {
		key := d.Lookup("_id")
		id, err := fromRaw[I](key)
		if err != nil {
			return err
		}
		v, err := versionOf(d, r.c.stored)
		if err != nil {
			return err
		}
		if v == 0 {
			v = 1
			if d, err = compose(key, d, r.c.stored, v); err != nil {
				return err
			}
			adopted = append(adopted, d)
		}
		events[i] = changeEvent(r.name, Upserted, id, v, d)
	}
	if err := r.box.Append(ctx, events...); err != nil || len(adopted) == 0 {
		return err
	}
	return r.c.docs.Put(ctx, adopted)
}
