package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Table is what a service's own collection is in tests: documents of type V by a key. Its operations join the transaction
// of their context. Documents are stored as BSON, so what BSON does not keep is lost here too, and nobody can change a
// stored one from outside.
type Table[K comparable, V any] struct {
	db   *DB
	rows *rows
}

// NewTable is the table of that name; two of one name share their rows and must have the same types. The names of
// outboxes, inboxes and sagas of the same database are taken by them.
func NewTable[K comparable, V any](db *DB, name string) *Table[K, V] {
	return &Table[K, V]{db: db, rows: db.table(name)}
}

type entry struct {
	Key   bson.RawValue `bson:"k"`
	Value bson.RawValue `bson:"v"`
}

func encodeKey[K any](key K) (string, error) {
	t, raw, err := bson.MarshalValue(key)
	if err != nil {
		return "", fmt.Errorf("encoding the key: %w", err)
	}
	return string(append([]byte{byte(t)}, raw...)), nil
}

func (t *Table[K, V]) encode(key K, value V) (id string, row *entry, err error) {
	if id, err = encodeKey(key); err != nil {
		return "", nil, refuse(err)
	}
	typ, raw, err := bson.MarshalValue(value)
	if err != nil {
		return "", nil, refuse(fmt.Errorf("encoding the document: %w", err))
	}
	return id, &entry{
		Key:   bson.RawValue{Type: bson.Type(id[0]), Value: []byte(id[1:])},
		Value: bson.RawValue{Type: typ, Value: slices.Clone(raw)},
	}, nil
}

func (t *Table[K, V]) wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", what, t.rows.name, err)
}

// Get reads one document; mongo.ErrNoDocuments if there is none.
func (t *Table[K, V]) Get(ctx context.Context, key K) (value V, err error) {
	err = t.db.do(ctx, func(x *tx) error {
		id, err := encodeKey(key)
		if err != nil {
			return refuse(err)
		}
		row, _ := x.get(t.rows, id).(*entry)
		if row == nil {
			return refuse(mongo.ErrNoDocuments)
		}
		return row.Value.Unmarshal(&value)
	})
	return value, t.wrap("reading", err)
}

// Insert adds a document; an error for which mongo.IsDuplicateKeyError is true if the key is there already.
func (t *Table[K, V]) Insert(ctx context.Context, key K, value V) error {
	return t.wrap("inserting into", t.db.do(ctx, func(x *tx) error {
		id, row, err := t.encode(key, value)
		if err != nil {
			return err
		}
		return x.insert(t.rows, id, row)
	}))
}

// Put writes a document, whether or not there is one.
func (t *Table[K, V]) Put(ctx context.Context, key K, value V) error {
	return t.wrap("writing", t.db.do(ctx, func(x *tx) error {
		id, row, err := t.encode(key, value)
		if err != nil {
			return err
		}
		return x.put(t.rows, id, row)
	}))
}

// Delete removes a document; it is no error if there is none.
func (t *Table[K, V]) Delete(ctx context.Context, key K) error {
	return t.wrap("deleting from", t.db.do(ctx, func(x *tx) error {
		id, err := encodeKey(key)
		if err != nil {
			return refuse(err)
		}
		if x.get(t.rows, id) == nil {
			return nil
		}
		return x.put(t.rows, id, nil)
	}))
}

// All reads the whole table.
func (t *Table[K, V]) All(ctx context.Context) (map[K]V, error) {
	out := map[K]V{}
	err := t.db.do(ctx, func(x *tx) error {
		var errs []error
		clear(out)
		x.scan(t.rows, func(_ string, v any) {
			row := v.(*entry)
			var key K
			var value V
			errs = append(errs, row.Key.Unmarshal(&key), row.Value.Unmarshal(&value))
			out[key] = value
		})
		return errors.Join(errs...)
	})
	return out, t.wrap("reading", err)
}

// Len is the number of documents.
func (t *Table[K, V]) Len(ctx context.Context) (n int, err error) {
	err = t.db.do(ctx, func(x *tx) error {
		n = 0
		x.scan(t.rows, func(string, any) { n++ })
		return nil
	})
	return n, t.wrap("counting", err)
}
