package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

// Table replaces a collection of a service in tests. It contains documents of type V with keys of
// type K. Its operations join the transaction of their context. Documents are stored as BSON:
// values that BSON cannot represent are lost here too, and stored documents cannot be changed from
// outside.
type Table[K comparable, V any] struct {
	db   *DB
	rows *storedTable
}

// NewTable returns the table called name. Tables with the same name share their rows and must have
// the same types. The name must not be the name of an outbox, an inbox or a saga of the database.
func NewTable[K comparable, V any](db *DB, name string) *Table[K, V] {
	return &Table[K, V]{db: db, rows: db.findOrAddTable(name)}
}

// tableRow is a stored document with its key.
type tableRow struct {
	Key   bson.RawValue `bson:"k"`
	Value bson.RawValue `bson:"v"`
}

// encodeKey returns the key of a row for any value that BSON can represent.
func encodeKey[K any](key K) (string, error) {
	bsonType, raw, err := bson.MarshalValue(key)
	if err != nil {
		return "", fmt.Errorf("encoding the key: %w", err)
	}
	return string(append([]byte{byte(bsonType)}, raw...)), nil
}

// encodeRow returns the key and the row for a document. Errors are rejections.
func (t *Table[K, V]) encodeRow(key K, value V) (id string, row *tableRow, err error) {
	if id, err = encodeKey(key); err != nil {
		return "", nil, newRejection(err)
	}

	typ, raw, err := bson.MarshalValue(value)
	if err != nil {
		return "", nil, newRejection(fmt.Errorf("encoding the document: %w", err))
	}

	return id, &tableRow{
		Key:   bson.RawValue{Type: bson.Type(id[0]), Value: []byte(id[1:])},
		Value: bson.RawValue{Type: typ, Value: slices.Clone(raw)},
	}, nil
}

// wrapError adds the operation and the name of the table to err.
func (t *Table[K, V]) wrapError(operation string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s: %w", operation, t.rows.name, err)
}

// Get returns the document with this key. If it does not exist, the error is mongo.ErrNoDocuments.
func (t *Table[K, V]) Get(ctx context.Context, key K) (value V, err error) {
	err = t.db.runOperation(ctx, func(tx *tx) error {
		id, err := encodeKey(key)
		if err != nil {
			return newRejection(err)
		}

		row, _ := tx.getRow(t.rows, id).(*tableRow)
		if row == nil {
			return newRejection(mongo.ErrNoDocuments)
		}

		return row.Value.Unmarshal(&value)
	})
	return value, t.wrapError("reading", err)
}

// Insert adds a document. If the key exists, mongo.IsDuplicateKeyError reports true for the error.
func (t *Table[K, V]) Insert(ctx context.Context, key K, value V) error {
	return t.wrapError("inserting into", t.db.runOperation(ctx, func(tx *tx) error {
		id, row, err := t.encodeRow(key, value)
		if err != nil {
			return err
		}
		return tx.insertRow(t.rows, id, row)
	}))
}

// Put adds a document, or replaces the one with the same key.
func (t *Table[K, V]) Put(ctx context.Context, key K, value V) error {
	return t.wrapError("writing", t.db.runOperation(ctx, func(tx *tx) error {
		id, row, err := t.encodeRow(key, value)
		if err != nil {
			return err
		}
		return tx.putRow(t.rows, id, row)
	}))
}

// Delete removes a document. It returns nil if the document does not exist.
func (t *Table[K, V]) Delete(ctx context.Context, key K) error {
	return t.wrapError("deleting from", t.db.runOperation(ctx, func(tx *tx) error {
		id, err := encodeKey(key)
		if err != nil {
			return newRejection(err)
		}
		if tx.getRow(t.rows, id) == nil {
			return nil
		}

		return tx.putRow(t.rows, id, nil)
	}))
}

// All returns all documents by their key.
func (t *Table[K, V]) All(ctx context.Context) (map[K]V, error) {
	out, err := runResult(ctx, t.db, func(tx *tx) (map[K]V, error) {
		all := map[K]V{}
		var errs []error
		for _, row := range rowsOf[*tableRow](tx, t.rows) {
			var key K
			var value V
			errs = append(errs, row.Key.Unmarshal(&key), row.Value.Unmarshal(&value))
			all[key] = value
		}
		return all, errors.Join(errs...)
	})
	return out, t.wrapError("reading", err)
}
