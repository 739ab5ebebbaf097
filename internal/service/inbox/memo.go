package inbox

import (
	"context"
	"sync"
)

// memoKey is the key of the memo of an Inbox in a context.
type memoKey struct{ inbox *Inbox }

// memo contains the results of Admit in one attempt of a transaction. A nil memo contains none.
type memo struct {
	transaction any

	mu      sync.Mutex
	results map[Entry]bool
}

// Remember returns a context in which Admit and Once remember their results for the transaction. So
// several parts of a handler may ask for the same entry. An entry without a place counts as equal
// to a fresh entry with the same key.
//
// Call it first in the callback of a transaction, with the context of the callback, and nowhere
// else: each attempt needs its own memory. Once calls it itself. Without a running transaction it
// returns ctx.
func (x *Inbox) Remember(ctx context.Context) context.Context {
	transaction := x.store.CurrentTransaction(ctx)
	if transaction == nil || x.memoFromContext(ctx) != nil {
		return ctx
	}
	return context.WithValue(ctx, memoKey{x}, &memo{transaction: transaction, results: make(map[Entry]bool)})
}

// memoFromContext returns the memo of the transaction that an operation with ctx would belong to,
// or nil.
func (x *Inbox) memoFromContext(ctx context.Context) *memo {
	memo, _ := ctx.Value(memoKey{x}).(*memo)
	if memo == nil || x.store.CurrentTransaction(ctx) != memo.transaction {
		return nil
	}
	return memo
}

// knownResults returns the known results, and the indexes of the entries without a result.
func (m *memo) knownResults(list []Entry) (fresh []bool, rest []int) {
	fresh = make([]bool, len(list))
	if m != nil {
		m.mu.Lock()
		defer m.mu.Unlock()
	}

	for i, e := range list {
		if m == nil {
			rest = append(rest, i)
			continue
		}

		isFresh, ok := m.results[e]
		if !ok {
			rest = append(rest, i)
		}
		fresh[i] = isFresh
	}

	return fresh, rest
}

// storeResults stores the results for the entries. If an entry occurs twice in a list, its results
// are true and false, and the first one is stored.
func (m *memo) storeResults(list []Entry, fresh []bool) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()

	for i, e := range list {
		if _, ok := m.results[e]; !ok {
			m.results[e] = fresh[i]
		}

		if fresh[i] {
			m.results[Entry{Key: e.Key}] = true
		}
	}
}

// isFresh reports whether this transaction handles the entry.
func (m *memo) isFresh(entry Entry) bool {
	if m == nil {
		return false
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	return m.results[entry]
}
