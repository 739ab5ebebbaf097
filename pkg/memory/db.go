package memory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// DB is a database: tables of rows, each with the versions that somebody may still read. The zero value is not usable.
type DB struct {
	clock  Clock
	mu     sync.Mutex
	tables map[string]*rows
	time   uint64 // of the last commit
	open   map[*tx]struct{}
}

// DBOption configures a DB. WithClock is one.
type DBOption interface{ db(*DB) }

// NewDB makes an empty database.
func NewDB(opts ...DBOption) *DB {
	db := &DB{clock: systemClock{}, tables: map[string]*rows{}, open: map[*tx]struct{}{}}
	for _, o := range opts {
		o.db(db)
	}
	return db
}

// rows are a table. A value must not be changed once it is in; nil is no row.
type rows struct {
	name      string
	rows      map[string]*row
	committed func(inserted []any) // called at each commit that wrote here, in commit order, with the lock held
	follower  *feed                // of an outbox
}

type row struct {
	versions []version // committed, oldest first
	writer   *tx       // whose uncommitted value is pending
	pending  any
}

type version struct {
	at    uint64
	value any
}

// tx is one attempt of a transaction.
type tx struct {
	db      *DB
	start   uint64
	writes  []write
	done    chan struct{}
	blocker <-chan struct{} // closed when the transaction that was in the way is over
}

type write struct {
	table    *rows
	key      string
	inserted bool
}

// The codes and the label by which callers know what a server would have answered.
const (
	codeDuplicateKey  = 11000
	codeWriteConflict = 112
	labelTransient    = "TransientTransactionError"
)

func errDuplicate(table, key string) error {
	return mongo.WriteException{WriteErrors: mongo.WriteErrors{{
		Code: codeDuplicateKey, Message: fmt.Sprintf("E11000 duplicate key error collection: %s index: _id_ dup key: %q", table, key),
	}}}
}

func errConflict(table string) error {
	return mongo.CommandError{
		Code: codeWriteConflict, Name: "WriteConflict", Labels: []string{labelTransient},
		Message: "another transaction has written the same row of " + table,
	}
}

func (db *DB) table(name string) *rows {
	db.mu.Lock()
	defer db.mu.Unlock()
	t := db.tables[name]
	if t == nil {
		t = &rows{name: name, rows: map[string]*row{}}
		db.tables[name] = t
	}
	return t
}

func (db *DB) begin() *tx {
	db.mu.Lock()
	defer db.mu.Unlock()
	t := &tx{db: db, start: db.time, done: make(chan struct{})}
	db.open[t] = struct{}{}
	return t
}

// get is the row as the transaction sees it; nil without one.
func (t *tx) get(table *rows, key string) any {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	return t.see(table.rows[key])
}

func (t *tx) see(r *row) any {
	switch {
	case r == nil:
		return nil
	case r.writer == t:
		return r.pending
	}
	for _, v := range slices.Backward(r.versions) {
		if v.at <= t.start {
			return v.value
		}
	}
	return nil
}

// scan calls f with every row that the transaction sees, in the order of the keys.
func (t *tx) scan(table *rows, f func(key string, value any)) {
	t.db.mu.Lock()
	found := map[string]any{}
	for key, r := range table.rows {
		if v := t.see(r); v != nil {
			found[key] = v
		}
	}
	t.db.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(found)) {
		f(key, found[key])
	}
}

// put writes a row, nil to remove it. It fails where another transaction has written the row since this one began.
func (t *tx) put(table *rows, key string, value any) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	return t.write(table, key, value, false)
}

// insert writes a row that is not there yet.
func (t *tx) insert(table *rows, key string, value any) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if r := table.rows[key]; r != nil && (r.writer == nil || r.writer == t) && t.see(r) != nil {
		return errDuplicate(table.name, key)
	}
	return t.write(table, key, value, true)
}

func (t *tx) write(table *rows, key string, value any, insert bool) error {
	r := table.rows[key]
	if r == nil {
		r = &row{}
		table.rows[key] = r
	}
	switch {
	case r.writer == t:
		r.pending = value
		if insert { // after it was removed in the same transaction
			t.insertedAnew(table, key)
		}
		return nil
	case r.writer != nil:
		t.blocker = r.writer.done
		return errConflict(table.name)
	case len(r.versions) > 0 && r.versions[len(r.versions)-1].at > t.start:
		return errConflict(table.name)
	}
	r.writer, r.pending = t, value
	t.writes = append(t.writes, write{table, key, insert})
	return nil
}

// insertedAnew gives a row that was removed and inserted again its place among the inserted ones.
func (t *tx) insertedAnew(table *rows, key string) {
	t.writes = slices.DeleteFunc(t.writes, func(w write) bool { return w.table == table && w.key == key })
	t.writes = append(t.writes, write{table, key, true})
}

// commit makes the writes visible to all that begins afterwards, and reports them to those who follow a table.
func (t *tx) commit() {
	db := t.db
	db.mu.Lock()
	defer db.mu.Unlock()
	if len(t.writes) > 0 {
		db.time++
	}
	var order []*rows
	inserted := map[*rows][]any{}
	for _, w := range t.writes {
		r := w.table.rows[w.key]
		r.versions = append(r.versions, version{db.time, r.pending})
		if _, known := inserted[w.table]; !known {
			order, inserted[w.table] = append(order, w.table), nil
		}
		if w.inserted && r.pending != nil {
			inserted[w.table] = append(inserted[w.table], r.pending)
		}
		r.writer, r.pending = nil, nil
	}
	t.finish()
	for _, w := range t.writes {
		w.table.forget(w.key, db.oldest())
	}
	for _, table := range order {
		if table.committed != nil {
			table.committed(inserted[table])
		}
	}
}

func (t *tx) abort() {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if _, running := t.db.open[t]; !running {
		return
	}
	for _, w := range t.writes {
		r := w.table.rows[w.key]
		if r != nil && r.writer == t {
			r.writer, r.pending = nil, nil
			w.table.forget(w.key, t.db.oldest())
		}
	}
	t.finish()
}

func (t *tx) finish() {
	delete(t.db.open, t)
	close(t.done)
}

// oldest is the snapshot that nobody reads behind.
func (db *DB) oldest() uint64 {
	at := db.time
	for t := range db.open {
		at = min(at, t.start)
	}
	return at
}

// forget removes the versions of a row that nobody can read any more.
func (t *rows) forget(key string, oldest uint64) {
	r := t.rows[key]
	if r == nil {
		return
	}
	for len(r.versions) > 1 && r.versions[1].at <= oldest {
		r.versions = r.versions[1:]
	}
	gone := len(r.versions) == 0 || len(r.versions) == 1 && r.versions[0].value == nil && r.versions[0].at <= oldest
	if gone && r.writer == nil {
		delete(t.rows, key)
	}
}

// wait returns when what was in the way of the transaction is over.
func (t *tx) wait(ctx context.Context) error {
	if t.blocker == nil {
		return ctx.Err()
	}
	select {
	case <-t.blocker:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// isTransient reports whether a transaction that failed with err is to start afresh.
func isTransient(err error) bool {
	var labelled mongo.LabeledError
	return errors.As(err, &labelled) && labelled.HasErrorLabel(labelTransient)
}
