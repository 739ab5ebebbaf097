package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/service/sagas"
)

// sagaStore stores the records of sagas in a DB. It implements sagas.Store. A tombstone is ignored
// when its time is over.
type sagaStore struct{ db *DB }

var _ sagas.Store = (*sagaStore)(nil)

// Sagas returns the store of the sagas that emit into the outbox. Package saga uses it.
func (s *outboxStore) Sagas() sagas.Store { return newSagas(s.db) }

// newSagas returns the sagas in db.
func newSagas(db *DB) *sagaStore { return &sagaStore{db} }

// nowMillis returns the current time with millisecond precision, as MongoDB stores it.
func (s *sagaStore) nowMillis() time.Time { return time.UnixMilli(time.Now().UnixMilli()).UTC() }

// sagaTable returns the table of a saga.
func (s *sagaStore) sagaTable(name string) *storedTable { return s.db.findOrAddTable(name) }

// findRecord returns the record that tx sees. It returns nil if there is none, or if it is a
// tombstone whose time is over.
func (s *sagaStore) findRecord(tx *tx, name, key string) *sagas.Record {
	record, _ := tx.getRow(s.sagaTable(name), key).(*sagas.Record)
	if record == nil || !record.ExpiresAt.IsZero() && !s.nowMillis().Before(record.ExpiresAt) {
		return nil
	}
	return record
}

// Load returns the record with this id: see sagas.Store.
func (s *sagaStore) Load(ctx context.Context, name string, id any) (record sagas.Record, found bool, err error) {
	err = s.db.runOperation(ctx, func(tx *tx) error {
		key, err := encodeKey(id)
		if err != nil {
			return newRejection(err)
		}

		stored := s.findRecord(tx, name, key)
		found = stored != nil
		if found {
			record = cloneSagaRecord(stored)
		}
		return nil
	})
	if err != nil {
		return sagas.Record{}, false, fmt.Errorf("loading saga %s %s: %w", name, sagas.FormatID(id), err)
	}

	return record, found, nil
}

// cloneSagaRecord returns a copy that shares no memory with record.
func cloneSagaRecord(record *sagas.Record) sagas.Record {
	cloned := *record
	cloned.Body = slices.Clone(record.Body)
	return cloned
}

// Save stores a record of the expected version: see sagas.Store.
func (s *sagaStore) Save(ctx context.Context, name string, record sagas.Record) (saved sagas.Record, err error) {
	err = s.db.runOperation(ctx, func(tx *tx) error {
		key, stored, err := s.checkVersion(tx, name, record)
		if err != nil {
			return err
		}

		saved = s.nextRecord(record, stored)
		return s.putRecord(tx, name, key, saved)
	})

	return saved, s.wrapError("saving", name, record, err)
}

// nextRecord returns the record that replaces the stored one, which may be nil.
func (s *sagaStore) nextRecord(record sagas.Record, stored *sagas.Record) sagas.Record {
	now := s.nowMillis()
	n := sagas.Record{ID: record.ID, Version: 1, Body: slices.Clone(record.Body), CreatedAt: now, UpdatedAt: now}

	// MongoDB stores a document, so a nil body becomes an empty one.
	if n.Body == nil {
		n.Body = bson.Raw{5, 0, 0, 0, 0}
	}

	if stored != nil {
		n.Version = stored.Version + 1
		n.CreatedAt = stored.CreatedAt
	}

	return n
}

// putRecord stores a copy of the record.
func (s *sagaStore) putRecord(tx *tx, name, key string, record sagas.Record) error {
	stored := cloneSagaRecord(&record)
	return tx.putRow(s.sagaTable(name), key, &stored)
}

// checkVersion returns the stored record, or nil if there is none. If it does not have the version
// of record, the error is errStale.
func (s *sagaStore) checkVersion(tx *tx, name string, record sagas.Record) (key string, stored *sagas.Record, err error) {
	if key, err = encodeKey(record.ID); err != nil {
		return "", nil, newRejection(err)
	}

	stored = s.findRecord(tx, name, key)
	version := int64(0)
	if stored != nil {
		version = stored.Version
	}

	// The error is a rejection: nothing was written, so the transaction can continue.
	if record.Version != version {
		return "", nil, newRejection(errStale)
	}

	return key, stored, nil
}

// errStale means that the stored record has another version.
var errStale = errors.New("stale version")

// Complete deletes the record or makes it a tombstone: see sagas.Store.
func (s *sagaStore) Complete(ctx context.Context, name string, record sagas.Record, keep time.Duration) error {
	err := s.db.runOperation(ctx, func(tx *tx) error {
		// This saga was never stored and leaves no tombstone, so there is nothing to delete.
		if keep <= 0 && record.Version == 0 {
			return nil
		}

		key, stored, err := s.checkVersion(tx, name, record)
		switch {
		case err != nil:
			return err
		case keep <= 0:
			return tx.putRow(s.sagaTable(name), key, nil)
		}

		// The tombstone keeps the id, so that a late message does not begin the saga again.
		tomb := s.nextRecord(record, stored)
		tomb.CompletedAt = tomb.UpdatedAt
		tomb.ExpiresAt = tomb.CompletedAt.Add(keep)
		return s.putRecord(tx, name, key, tomb)
	})

	return s.wrapError("completing", name, record, err)
}

// wrapError returns sagas.ErrConflict if err reports a conflict.
func (s *sagaStore) wrapError(doing, name string, record sagas.Record, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errStale):
		return sagas.NewConflict(name, record, nil)
	case isTransient(err):
		return sagas.NewConflict(name, record, err)
	}
	return fmt.Errorf("%s saga %s %s: %w", doing, name, sagas.FormatID(record.ID), err)
}

// Recent iterates over the records that were changed last: see sagas.Store.
func (s *sagaStore) Recent(ctx context.Context, name string, limit int) iter.Seq2[sagas.Record, error] {
	return func(yield func(sagas.Record, error) bool) {
		list, err := readSnapshot(ctx, s.db, func(tx *tx) (list []sagas.Record) {
			for key := range rowsOf[*sagas.Record](tx, s.sagaTable(name)) {
				if record := s.findRecord(tx, name, key); record != nil {
					list = append(list, cloneSagaRecord(record))
				}
			}
			return list
		})
		if err != nil {
			yield(sagas.Record{}, fmt.Errorf("listing sagas of %s: %w", name, err))
			return
		}

		slices.SortStableFunc(list, func(a, b sagas.Record) int {
			return cmp.Compare(b.UpdatedAt.UnixMilli(), a.UpdatedAt.UnixMilli())
		})
		for _, record := range list[:min(max(limit, 0), len(list))] {
			if !yield(record, nil) {
				return
			}
		}
	}
}

// Prepare stores the type of a saga: see sagas.Store.
func (s *sagaStore) Prepare(ctx context.Context, want sagas.Type) (found sagas.Type, err error) {
	found, err = runResult(ctx, s.db, func(tx *tx) (sagas.Type, error) {
		types := s.sagaTable(sagas.TypesCollection)
		if stored, _ := tx.getRow(types, want.Name).(*sagas.Type); stored != nil {
			return *stored, nil
		}
		for range rowsOf[any](tx, s.sagaTable(want.Name)) {
			return sagas.Type{}, sagas.NewOccupied(want.Name)
		}
		return want, tx.putRow(types, want.Name, &want)
	})
	if err != nil {
		return found, fmt.Errorf("storing the type of saga %s: %w", want.Name, err)
	}

	return found, nil
}

// Types returns the stored types, sorted by name: see sagas.Store.
func (s *sagaStore) Types(ctx context.Context) (list []sagas.Type, err error) {
	list, err = readSnapshot(ctx, s.db, func(tx *tx) (list []sagas.Type) {
		for _, known := range rowsOf[*sagas.Type](tx, s.sagaTable(sagas.TypesCollection)) {
			list = append(list, *known)
		}
		return list
	})
	if err != nil {
		return nil, fmt.Errorf("listing sagas: %w", err)
	}
	return list, nil
}
