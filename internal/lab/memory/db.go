package memory

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

// DB is a database of tables. Each row has all versions that a running transaction may still read.
// Create a DB with NewDB.
type DB struct {
	mu      sync.Mutex
	tables  map[string]*storedTable
	time    uint64 // number of the last commit
	open    map[*tx]struct{}
	changed chan struct{} // closed and replaced at each commit
	faults  func(op Op) error
	rates   rateStore
}

// Op is an operation that can fail. See DB.Inject and Broker.Inject.
type Op struct {
	// Kind is "append" for an event that is appended, "commit" for a transaction that is about to commit, or "publish" for a
	// record that is about to be written to a topic.
	Kind string

	Name  string // of the event, unless Kind is "commit"
	Topic string // if Kind is "publish"
}

// Inject makes the DB call fault before each append and commit. An error of fault is that of the operation. A nil fault removes the
// function.
func (db *DB) Inject(fault func(op Op) error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.faults = fault
}

// injectedError returns the injected error of an operation. It must be called without the lock.
func (db *DB) injectedError(op Op) error {
	db.mu.Lock()
	fault := db.faults
	db.mu.Unlock()
	if fault == nil {
		return nil
	}
	return fault(op)
}

// Changed returns a channel that is closed at the next commit.
func (db *DB) Changed() <-chan struct{} {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.changed
}

// NewDB returns an empty database.
func NewDB() *DB {
	return &DB{tables: map[string]*storedTable{}, open: map[*tx]struct{}{}, changed: make(chan struct{})}
}

// storedTable is a table. A value must not be changed after it was stored. A nil value means that
// the row does not exist.
type storedTable struct {
	name     string
	rows     map[string]*row
	onCommit func(inserted []any) // called for each commit that wrote to the table, in order, under the lock
	feed     *feed                // only for an outbox
}

// row is a row with its committed versions and at most one uncommitted value.

type row struct {
	versions []version // oldest first
	writer   *tx       // the transaction that has written pending, or nil
	pending  any
}

// version is a value that was committed at a time of the DB.
type version struct {
	at    uint64
	value any
}

// tx is one attempt of a transaction.
type tx struct {
	db      *DB
	start   uint64 // time of the snapshot
	writes  []write
	done    chan struct{}
	blocker <-chan struct{} // closed when the conflicting transaction is over
}

// write is a row that a transaction has written.
type write struct {
	table    *storedTable
	key      string
	inserted bool
}

// Error codes and the error label of a MongoDB server.
const (
	codeDuplicateKey  = 11000
	codeWriteConflict = 112
	labelTransient    = "TransientTransactionError"
)

// errDuplicate returns the error of a server for a duplicate key.
func errDuplicate(table, key string) error {
	return mongo.WriteException{WriteErrors: mongo.WriteErrors{{
		Code:    codeDuplicateKey,
		Message: fmt.Sprintf("E11000 duplicate key error collection: %s index: _id_ dup key: %q", table, key),
	}}}
}

// errConflict returns the error of a server for a write conflict.
func errConflict(table string) error {
	return mongo.CommandError{
		Code:    codeWriteConflict,
		Name:    "WriteConflict",
		Labels:  []string{labelTransient},
		Message: "another transaction has written the same row of " + table,
	}
}

// findOrAddTable returns the table called name.
func (db *DB) findOrAddTable(name string) *storedTable {
	db.mu.Lock()
	defer db.mu.Unlock()

	table := db.tables[name]
	if table == nil {
		table = &storedTable{name: name, rows: map[string]*row{}}
		db.tables[name] = table
	}

	return table
}

// beginTx begins a transaction. It must be ended with commit or abort.
func (db *DB) beginTx() *tx {
	db.mu.Lock()
	defer db.mu.Unlock()

	tx := &tx{db: db, start: db.time, done: make(chan struct{})}
	db.open[tx] = struct{}{}
	return tx
}

// getRow returns the row as the transaction sees it, or nil if it does not exist.
func (t *tx) getRow(table *storedTable, key string) any {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	return t.visibleLocked(table.rows[key])
}

// visibleLocked returns the value of row that the transaction sees.
func (t *tx) visibleLocked(row *row) any {
	switch {
	case row == nil:
		return nil
	case row.writer == t:
		return row.pending
	}

	for _, v := range slices.Backward(row.versions) {
		if v.at <= t.start {
			return v.value
		}
	}

	return nil
}

// rowsOf iterates over every row that the transaction sees, in the order of the keys and without the lock. All values of
// the table are of type V.
func rowsOf[V any](tx *tx, table *storedTable) iter.Seq2[string, V] {
	tx.db.mu.Lock()
	defer tx.db.mu.Unlock()
	found := map[string]V{}
	for key, r := range table.rows {
		if value := tx.visibleLocked(r); value != nil {
			found[key] = value.(V)
		}
	}

	return func(yield func(key string, value V) bool) {
		for _, key := range slices.Sorted(maps.Keys(found)) {
			if !yield(key, found[key]) {
				return
			}
		}
	}
}

// putRow writes a row. A nil value removes it. If another transaction has written the row since
// this one began, the error is a write conflict.
func (t *tx) putRow(table *storedTable, key string, value any) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	return t.writeLocked(write{table: table, key: key}, value)
}

// removeRows removes the rows of these keys that exist, and returns their number.
func (t *tx) removeRows(table *storedTable, keys ...string) (n int64, err error) {
	for _, key := range keys {
		if t.getRow(table, key) == nil {
			continue
		}
		if err := t.putRow(table, key, nil); err != nil {
			return 0, err
		}
		n++
	}
	return n, nil
}

// insertRow writes a row that must not exist. If it exists, the error is a duplicate key.
func (t *tx) insertRow(table *storedTable, key string, value any) error {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()

	row := table.rows[key]
	// The other transaction may still abort. So a row that it writes is a conflict, and not a duplicate.
	pendingElsewhere := row != nil && row.writer != nil && row.writer != t
	if row != nil && !pendingElsewhere && t.visibleLocked(row) != nil {
		return errDuplicate(table.name, key)
	}
	return t.writeLocked(write{table: table, key: key, inserted: true}, value)
}

// writeLocked stores the value as pending, or returns a write conflict.
func (t *tx) writeLocked(next write, value any) error {
	table := next.table
	existing := table.rows[next.key]
	if existing == nil {
		existing = &row{}
		table.rows[next.key] = existing
	}

	switch {
	case existing.writer == t:
		existing.pending = value
		if next.inserted {
			// The row was removed before, in the same transaction.
			t.moveToEndLocked(table, next.key)
		}
		return nil

	case existing.writer != nil:
		// The caller can wait until the other transaction is over.
		t.blocker = existing.writer.done
		return errConflict(table.name)

	case len(existing.versions) > 0 && existing.versions[len(existing.versions)-1].at > t.start:
		// Another transaction has committed the row since this one began.
		return errConflict(table.name)
	}

	existing.writer = t
	existing.pending = value
	t.writes = append(t.writes, next)
	return nil
}

// moveToEndLocked moves a row that was removed and inserted again to the end of the inserted rows.
func (t *tx) moveToEndLocked(table *storedTable, key string) {
	t.writes = slices.DeleteFunc(t.writes, func(write write) bool { return write.table == table && write.key == key })
	t.writes = append(t.writes, write{table, key, true})
}

// commit makes the writes visible to later transactions, and reports them to the followers of the
// tables.
func (t *tx) commit() {
	db := t.db
	db.mu.Lock()
	defer db.mu.Unlock()
	// A transaction without writes makes no version.
	if len(t.writes) > 0 {
		db.time++
		close(db.changed)
		db.changed = make(chan struct{})
	}

	// The tables in the order of their first write, each with the inserted values.
	var order []*storedTable
	inserted := map[*storedTable][]any{}
	for _, w := range t.writes {
		row := w.table.rows[w.key]
		row.versions = append(row.versions, version{db.time, row.pending})
		if _, known := inserted[w.table]; !known {
			order = append(order, w.table)
			inserted[w.table] = nil
		}
		if w.inserted && row.pending != nil {
			inserted[w.table] = append(inserted[w.table], row.pending)
		}
		row.writer = nil
		row.pending = nil
	}

	// Without this transaction, older versions may be unnecessary.
	t.finishLocked()
	for _, w := range t.writes {
		w.table.pruneRowLocked(w.key, db.oldestSnapshotLocked())
	}

	// Followers are called at the end, when the transaction no longer exists for the database.
	for _, table := range order {
		if table.onCommit != nil {
			table.onCommit(inserted[table])
		}
	}
}

// abort discards the writes. It does nothing if the transaction is over.
func (t *tx) abort() {
	t.db.mu.Lock()
	defer t.db.mu.Unlock()
	if _, running := t.db.open[t]; !running {
		return
	}

	for _, w := range t.writes {
		row := w.table.rows[w.key]
		if row != nil && row.writer == t {
			row.writer = nil
			row.pending = nil
			w.table.pruneRowLocked(w.key, t.db.oldestSnapshotLocked())
		}
	}

	t.finishLocked()
}

// finishLocked ends the transaction and wakes the transactions that wait for it.
func (t *tx) finishLocked() {
	delete(t.db.open, t)
	close(t.done)
}

// oldestSnapshotLocked returns the time of the oldest snapshot that a transaction may read.
func (db *DB) oldestSnapshotLocked() uint64 {
	at := db.time
	for t := range db.open {
		at = min(at, t.start)
	}
	return at
}

// pruneRowLocked removes the versions of a row that no transaction can read any more.
func (t *storedTable) pruneRowLocked(key string, oldest uint64) {
	row := t.rows[key]
	if row == nil {
		return
	}

	// The oldest transaction reads the last version before its start, so that version stays.
	for len(row.versions) > 1 && row.versions[1].at <= oldest {
		row.versions = row.versions[1:]
	}

	deleted := len(row.versions) == 1 && row.versions[0].value == nil && row.versions[0].at <= oldest
	if (len(row.versions) == 0 || deleted) && row.writer == nil {
		delete(t.rows, key)
	}
}

// waitForBlocker blocks until the conflicting transaction is over, for a moment if there is none, or until ctx ends. A callback may
// return a transient error without a conflict.
func (t *tx) waitForBlocker(ctx context.Context) error {
	var moment <-chan time.Time
	if t.blocker == nil {
		timer := time.NewTimer(10 * time.Millisecond)
		defer timer.Stop()
		moment = timer.C
	}

	select {
	case <-t.blocker:
		return nil
	case <-moment:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// isTransient reports whether a transaction that failed with err must start again.
func isTransient(err error) bool {
	var labeled mongo.LabeledError
	return errors.As(err, &labeled) && labeled.HasErrorLabel(labelTransient)
}
