package memory

import (
	"context"
	"fmt"
	"slices"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/service/entities"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/entity"
	"github.com/outrelay/outrelay/pkg/outbox"
)

// NewEntities returns an option with which package entity stores in db: entities and projections in the collection name, versions
// of deleted entities in "<name>_deleted".
func NewEntities(db *DB, name string) entity.Option {
	return entity.WithStorage(entities.Storage{
		Documents: NewDocuments(db, name),
		Deleted:   NewDocuments(db, name+"_deleted"),
		View:      NewView(db, name),
	})
}

// Documents stores the documents of entities. It implements entities.Documents. Scan uses the order of the encoded ids.
type Documents struct {
	db    *DB
	rows  *storedTable
	plain bool // calls may run without a transaction
}

var _ entities.Documents = (*Documents)(nil)

// NewDocuments returns the documents called name in db.
func NewDocuments(db *DB, name string) *Documents {
	return &Documents{db: db, rows: db.findOrAddTable(name)}
}

// NewPlainDocuments is NewDocuments for calls that may be without a transaction.
func NewPlainDocuments(db *DB, name string) *Documents {
	documents := NewDocuments(db, name)
	documents.plain = true
	return documents
}

// Name returns the name of the documents.
func (d *Documents) Name() string { return d.rows.name }

// runOperation runs callback in the transaction of ctx, which is required unless d.plain is set.
func (d *Documents) runOperation(ctx context.Context, callback func(tx *tx) error) error {
	if !d.plain && d.db.unitFromContext(ctx) == nil {
		return fmt.Errorf("%s: %w", d.Name(), outbox.ErrNoTransaction)
	}
	return d.db.runOperation(ctx, func(tx *tx) error {
		if err := d.db.checkNoSagas(tx, d.Name()); err != nil {
			return err
		}
		return callback(tx)
	})
}

// checkNoSagas returns an error if the table of that name contains sagas.
func (db *DB) checkNoSagas(tx *tx, name string) error {
	if saga, _ := tx.getRow(db.findOrAddTable(sagas.TypesCollection), name).(*sagas.Type); saga != nil {
		return sagas.RejectEntities(name, saga.Owner)
	}
	return nil
}

// Find returns the existing documents with these ids: see entities.Documents. It ignores the fields.
func (d *Documents) Find(ctx context.Context, ids []bson.RawValue, _ ...string) (list []bson.Raw, err error) {
	err = d.runOperation(ctx, func(tx *tx) error {
		// After a conflict the operation runs again, so each run begins with an empty list.
		list = nil
		for _, id := range ids {
			if doc := d.findDocument(tx, id); doc != nil {
				list = append(list, slices.Clone(doc))
			}
		}

		return nil
	})
	return list, err
}

// rawKey returns the key of the row for an id.
func rawKey(id bson.RawValue) string { return string(append([]byte{byte(id.Type)}, id.Value...)) }

// findDocument returns the document that tx sees, or nil.
func (d *Documents) findDocument(tx *tx, id bson.RawValue) bson.Raw {
	doc, _ := tx.getRow(d.rows, rawKey(id)).(bson.Raw)
	return doc
}

// Scan returns at most limit documents after an id: see entities.Documents.
func (d *Documents) Scan(ctx context.Context, after bson.RawValue, limit int) (list []bson.Raw, err error) {
	err = d.runOperation(ctx, func(tx *tx) error {
		list = nil
		for key, doc := range rowsOf[bson.Raw](tx, d.rows) {
			if len(list) < limit && (after.IsZero() || key > rawKey(after)) {
				list = append(list, slices.Clone(doc))
			}
		}
		return nil
	})
	return list, err
}

// Insert adds documents: see entities.Documents.
func (d *Documents) Insert(ctx context.Context, docs []bson.Raw) error {
	return d.runOperation(ctx, func(tx *tx) error {
		for _, doc := range docs {
			err := tx.insertRow(d.rows, rawKey(doc.Lookup("_id")), slices.Clone(doc))
			if mongo.IsDuplicateKeyError(err) {
				return fmt.Errorf("%w: %w", entity.ErrExists, err)
			}
			if err != nil {
				return err
			}
		}

		return nil
	})
}

// Put adds or replaces documents: see entities.Documents.
func (d *Documents) Put(ctx context.Context, docs []bson.Raw) error {
	return d.runOperation(ctx, func(tx *tx) error {
		for _, doc := range docs {
			if err := tx.putRow(d.rows, rawKey(doc.Lookup("_id")), slices.Clone(doc)); err != nil {
				return err
			}
		}
		return nil
	})
}

// Replace replaces a document that has the version of guard: see entities.Documents.
func (d *Documents) Replace(ctx context.Context, doc bson.Raw, guard *entities.Guard) (matched bool, err error) {
	err = d.runOperation(ctx, func(tx *tx) error {
		id := doc.Lookup("_id")
		matched = matchesGuard(d.findDocument(tx, id), guard)
		if !matched {
			return nil
		}
		return tx.putRow(d.rows, rawKey(id), slices.Clone(doc))
	})
	return matched, err
}

// matchesGuard reports whether doc exists and has the version of guard. A nil guard matches every version.
func matchesGuard(doc bson.Raw, guard *entities.Guard) bool {
	switch {
	case doc == nil:
		return false
	case guard == nil:
		return true
	}

	value, err := doc.LookupErr(guard.Field)
	// A document without a version has version 0.
	if err != nil || value.Type == bson.TypeNull {
		return guard.Version == 0
	}

	n, ok := value.AsInt64OK()
	return ok && n == guard.Version
}

// Delete removes documents that have the version of guard: see entities.Documents.
func (d *Documents) Delete(ctx context.Context, ids []bson.RawValue, guard *entities.Guard) (n int64, err error) {
	err = d.runOperation(ctx, func(tx *tx) error {
		n = 0
		for _, id := range ids {
			if !matchesGuard(d.findDocument(tx, id), guard) {
				continue
			}
			if err := tx.putRow(d.rows, rawKey(id), nil); err != nil {
				return err
			}

			n++
		}

		return nil
	})
	return n, err
}

// Transaction calls DB.Transaction.
func (d *Documents) Transaction(ctx context.Context, fn func(context.Context) error) error {
	return d.db.Transaction(ctx, fn)
}

// RollbackOnly prevents the transaction of ctx from committing.
func (d *Documents) RollbackOnly(ctx context.Context, cause error) {
	d.db.unitFromContext(ctx).state().SetRollbackOnly(cause)
}

// View is the target of a projector. It implements entities.View.
type View struct {
	db       *DB
	rows     *storedTable // the documents
	versions *storedTable // of the entities, also of deleted ones
}

var _ entities.View = (*View)(nil)

// NewView returns the view called name in db.
func NewView(db *DB, name string) *View {
	return &View{db: db, rows: db.findOrAddTable(name), versions: db.findOrAddTable(name + "_versions")}
}

// Name returns the name that was passed to NewView.
func (v *View) Name() string { return v.rows.name }

// Apply stores the states: see entities.View.
func (v *View) Apply(ctx context.Context, states []entities.State) error {
	return v.db.runOperation(ctx, func(tx *tx) error {
		if err := v.db.checkNoSagas(tx, v.Name()); err != nil {
			return err
		}
		for _, s := range states {
			key := rawKey(s.ID)
			// Older versions are ignored, also after a deletion.
			if old, ok := tx.getRow(v.versions, key).(int64); ok && old >= s.Version {
				continue
			}
			if err := tx.putRow(v.versions, key, s.Version); err != nil {
				return err
			}

			// A nil value removes the row, but a nil bson.Raw would be one.
			var doc any
			if s.Doc != nil {
				doc = slices.Clone(s.Doc)
			}
			if err := tx.putRow(v.rows, key, doc); err != nil {
				return err
			}
		}

		return nil
	})
}

// All returns the documents in the order of the encoded ids.
func (v *View) All(ctx context.Context) ([]bson.Raw, error) {
	return readSnapshot(ctx, v.db, func(tx *tx) (list []bson.Raw) {
		for _, doc := range rowsOf[bson.Raw](tx, v.rows) {
			list = append(list, slices.Clone(doc))
		}
		return list
	})
}
