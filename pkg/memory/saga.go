package memory

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/pkg/saga"
)

// Sagas keeps the records of sagas in a DB. It is a saga.Store, by the database's clock: a tombstone goes when its time
// has come.
type Sagas struct{ db *DB }

var _ saga.Store = (*Sagas)(nil)

// NewSagas makes a store in db.
func NewSagas(db *DB) *Sagas { return &Sagas{db} }

// Transaction is DB.Transaction.
func (s *Sagas) Transaction(ctx context.Context, fn func(ctx context.Context) error) error {
	return s.db.Transaction(ctx, fn)
}

// InTransaction is DB.InTransaction.
func (s *Sagas) InTransaction(ctx context.Context) bool { return s.db.InTransaction(ctx) }

func (s *Sagas) now() time.Time { return time.UnixMilli(s.db.clock.Now().UnixMilli()).UTC() }

func (s *Sagas) table(name string) *rows { return s.db.table(name) }

// at is the record as it is there, nil if there is none or its tombstone's time is over.
func (s *Sagas) at(t *tx, name, key string) *saga.Record {
	r, _ := t.get(s.table(name), key).(*saga.Record)
	if r == nil || !r.ExpiresAt.IsZero() && !s.now().Before(r.ExpiresAt) {
		return nil
	}
	return r
}

// Load is saga.Store's.
func (s *Sagas) Load(ctx context.Context, name string, id any) (r saga.Record, found bool, err error) {
	err = s.db.do(ctx, func(t *tx) error {
		key, err := encodeKey(id)
		if err != nil {
			return refuse(err)
		}
		stored := s.at(t, name, key)
		if found = stored != nil; found {
			r = copyOf(stored)
		}
		return nil
	})
	if err != nil {
		return saga.Record{}, false, fmt.Errorf("loading saga %s %s: %w", name, saga.FormatID(id), err)
	}
	return r, found, nil
}

func copyOf(r *saga.Record) saga.Record {
	c := *r
	c.Body = slices.Clone(r.Body)
	return c
}

// Save is saga.Store's.
func (s *Sagas) Save(ctx context.Context, name string, r saga.Record) (saved saga.Record, err error) {
	err = s.db.do(ctx, func(t *tx) error {
		key, stored, err := s.guarded(t, name, r)
		if err != nil {
			return err
		}
		saved = s.next(r, stored)
		return s.put(t, name, key, saved)
	})
	return saved, s.failed("saving", name, r, err)
}

// next is the record that follows the stored one.
func (s *Sagas) next(r saga.Record, stored *saga.Record) saga.Record {
	now := s.now()
	n := saga.Record{ID: r.ID, Version: 1, Body: slices.Clone(r.Body), CreatedAt: now, UpdatedAt: now}
	if n.Body == nil {
		n.Body = bson.Raw{5, 0, 0, 0, 0}
	}
	if stored != nil {
		n.Version, n.CreatedAt = stored.Version+1, stored.CreatedAt
	}
	return n
}

func (s *Sagas) put(t *tx, name, key string, r saga.Record) error {
	stored := copyOf(&r)
	return t.put(s.table(name), key, &stored)
}

// guarded is the stored record if it has the version of r; else errStale.
func (s *Sagas) guarded(t *tx, name string, r saga.Record) (key string, stored *saga.Record, err error) {
	if key, err = encodeKey(r.ID); err != nil {
		return "", nil, refuse(err)
	}
	stored = s.at(t, name, key)
	version := int64(0)
	if stored != nil {
		version = stored.Version
	}
	if r.Version != saga.AnyVersion && r.Version != version {
		return "", nil, refuse(errStale)
	}
	return key, stored, nil
}

// errStale says that a record has another version.
var errStale = errors.New("stale version")

// Complete is saga.Store's.
func (s *Sagas) Complete(ctx context.Context, name string, r saga.Record, keep time.Duration) error {
	err := s.db.do(ctx, func(t *tx) error {
		if keep <= 0 && r.Version == 0 {
			return nil
		}
		key, stored, err := s.guarded(t, name, r)
		switch {
		case err != nil:
			return err
		case stored == nil && r.Version == saga.AnyVersion:
			return nil
		case keep <= 0:
			return t.put(s.table(name), key, nil)
		}
		tomb := s.next(r, stored)
		tomb.CompletedAt = tomb.UpdatedAt
		tomb.ExpiresAt = tomb.CompletedAt.Add(keep)
		return s.put(t, name, key, tomb)
	})
	return s.failed("completing", name, r, err)
}

// failed tells a conflict from other errors.
func (s *Sagas) failed(doing, name string, r saga.Record, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errStale):
		return &saga.ConflictError{Saga: name, ID: saga.FormatID(r.ID), Version: r.Version}
	case isTransient(err):
		return &saga.ConflictError{Saga: name, ID: saga.FormatID(r.ID), Version: r.Version, Err: err}
	}
	return fmt.Errorf("%s saga %s %s: %w", doing, name, saga.FormatID(r.ID), err)
}

// Recent is saga.Store's.
func (s *Sagas) Recent(ctx context.Context, name string, limit int) (list []saga.Record, err error) {
	if limit <= 0 {
		return nil, nil
	}
	err = s.db.do(ctx, func(t *tx) error {
		list = nil
		t.scan(s.table(name), func(key string, _ any) {
			if r := s.at(t, name, key); r != nil {
				list = append(list, copyOf(r))
			}
		})
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing sagas of %s: %w", name, err)
	}
	slices.SortStableFunc(list, func(a, b saga.Record) int { return cmp.Compare(b.UpdatedAt.UnixMilli(), a.UpdatedAt.UnixMilli()) })
	return list[:min(limit, len(list))], nil
}

// Prepare is saga.Store's.
func (s *Sagas) Prepare(ctx context.Context, info saga.TypeInfo) error {
	err := s.db.do(ctx, func(t *tx) error {
		types := s.table(saga.DefaultTypes)
		if found, _ := t.get(types, info.Name).(*saga.TypeInfo); found != nil {
			if found.Owner != info.Owner || found.ID != info.ID {
				want := info
				want.Messages = nil
				return refuse(&saga.OwnerError{Want: want, Found: *found})
			}
			return nil
		}
		return t.put(types, info.Name, &saga.TypeInfo{Name: info.Name, Owner: info.Owner, ID: info.ID})
	})
	if err != nil {
		return fmt.Errorf("writing down saga %s: %w", info.Name, err)
	}
	return nil
}

// Types is saga.Store's.
func (s *Sagas) Types(ctx context.Context) (list []saga.TypeInfo, err error) {
	err = s.db.do(ctx, func(t *tx) error {
		list = nil
		t.scan(s.table(saga.DefaultTypes), func(_ string, v any) { list = append(list, *v.(*saga.TypeInfo)) })
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("listing sagas: %w", err)
	}
	return list, nil
}
