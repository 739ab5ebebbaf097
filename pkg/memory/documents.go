package memory

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// Documents are what entities of pkg/entity are kept in: entity.NewOn, entity.NewRecordedOn and entity.NewProjectorOn take
// them. Their order in Scan is that of the encoded ids.
type Documents struct {
	db    *DB
	rows  *rows
	plain bool
}

var _ entity.Documents = (*Documents)(nil)

// NewDocuments are the documents of that name in db. With plain, a context without a transaction is allowed.
func NewDocuments(db *DB, name string, plain bool) *Documents {
	return &Documents{db: db, rows: db.table(name), plain: plain}
}

// Name is what NewDocuments was given.
func (d *Documents) Name() string { return d.rows.name }

func (d *Documents) do(ctx context.Context, f func(t *tx) error) error {
	if !d.plain && d.db.unitOf(ctx) == nil {
		return fmt.Errorf("%s: %w", d.Name(), outbox.ErrNoTransaction)
	}
	return d.db.do(ctx, f)
}

// Find is entity.Documents'.
func (d *Documents) Find(ctx context.Context, ids []bson.RawValue, _ ...string) (list []bson.Raw, err error) {
	err = d.do(ctx, func(t *tx) error {
		list = nil
		for _, id := range ids {
			if doc := d.at(t, id); doc != nil {
				list = append(list, slices.Clone(doc))
			}
		}
		return nil
	})
	return list, err
}

func rawKey(id bson.RawValue) string { return string(append([]byte{byte(id.Type)}, id.Value...)) }

func (d *Documents) at(t *tx, id bson.RawValue) bson.Raw {
	doc, _ := t.get(d.rows, rawKey(id)).(bson.Raw)
	return doc
}

// Scan is entity.Documents'.
func (d *Documents) Scan(ctx context.Context, after bson.RawValue, limit int) (list []bson.Raw, err error) {
	err = d.do(ctx, func(t *tx) error {
		list = nil
		t.scan(d.rows, func(key string, v any) {
			if len(list) < limit && (after.IsZero() || key > rawKey(after)) {
				list = append(list, slices.Clone(v.(bson.Raw)))
			}
		})
		return nil
	})
	return list, err
}

// Insert is entity.Documents'.
func (d *Documents) Insert(ctx context.Context, docs []bson.Raw) error {
	return d.do(ctx, func(t *tx) error {
		for _, doc := range docs {
			err := t.insert(d.rows, rawKey(doc.Lookup("_id")), slices.Clone(doc))
			if mongo.IsDuplicateKeyError(err) {
				return &entity.ExistsError{Collection: d.Name(), Err: err}
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// Put is entity.Documents'.
func (d *Documents) Put(ctx context.Context, docs []bson.Raw) error {
	return d.do(ctx, func(t *tx) error {
		for _, doc := range docs {
			if err := t.put(d.rows, rawKey(doc.Lookup("_id")), slices.Clone(doc)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Replace is entity.Documents'.
func (d *Documents) Replace(ctx context.Context, doc bson.Raw, g *entity.Guard) (matched bool, err error) {
	err = d.do(ctx, func(t *tx) error {
		id := doc.Lookup("_id")
		if matched = guarded(d.at(t, id), g); !matched {
			return nil
		}
		return t.put(d.rows, rawKey(id), slices.Clone(doc))
	})
	return matched, err
}

// guarded says whether the document is there and has the version of the guard.
func guarded(doc bson.Raw, g *entity.Guard) bool {
	switch {
	case doc == nil:
		return false
	case g == nil:
		return true
	}
	v, err := doc.LookupErr(g.Field)
	if err != nil || v.Type == bson.TypeNull {
		return g.Version == 0
	}
	n, ok := v.AsInt64OK()
	return ok && n == g.Version
}

// Delete is entity.Documents'.
func (d *Documents) Delete(ctx context.Context, ids []bson.RawValue, g *entity.Guard) (n int64, err error) {
	err = d.do(ctx, func(t *tx) error {
		n = 0
		for _, id := range ids {
			if !guarded(d.at(t, id), g) {
				continue
			}
			if err := t.put(d.rows, rawKey(id), nil); err != nil {
				return err
			}
			n++
		}
		return nil
	})
	return n, err
}

// Transaction is DB.Transaction.
func (d *Documents) Transaction(ctx context.Context, fn func(context.Context) error) error {
	return d.db.Transaction(ctx, fn)
}

// RollbackOnly makes sure that the transaction of ctx does not commit.
func (d *Documents) RollbackOnly(ctx context.Context, cause error) {
	d.db.unitOf(ctx).doom(cause)
}

// View is what a projector of pkg/entity writes to. It is an entity.View.
type View struct {
	db   *DB
	rows *rows
}

var _ entity.View = (*View)(nil)

// viewed is the state of an entity: the document, or nil where it was deleted.
type viewed struct {
	version int64
	doc     bson.Raw
}

// NewView is the view of that name in db.
func NewView(db *DB, name string) *View { return &View{db: db, rows: db.table(name)} }

// Name is what NewView was given.
func (v *View) Name() string { return v.rows.name }

// Apply is entity.View's.
func (v *View) Apply(ctx context.Context, states []entity.State) error {
	return v.db.do(ctx, func(t *tx) error {
		for _, s := range states {
			key := rawKey(s.ID)
			if old, _ := t.get(v.rows, key).(*viewed); old != nil && old.version >= s.Version {
				continue
			}
			if err := t.put(v.rows, key, &viewed{s.Version, slices.Clone(s.Doc)}); err != nil {
				return err
			}
		}
		return nil
	})
}

// All are the documents in the order of the encoded ids.
func (v *View) All(ctx context.Context) (list []bson.Raw, err error) {
	err = v.db.do(ctx, func(t *tx) error {
		list = nil
		t.scan(v.rows, func(_ string, x any) {
			if doc := x.(*viewed).doc; doc != nil {
				list = append(list, slices.Clone(doc))
			}
		})
		return nil
	})
	return list, err
}
