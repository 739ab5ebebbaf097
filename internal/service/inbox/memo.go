package inbox

import (
	"context"
	"sync"
)

// memoKey is the key of the memo of an Inbox in a context.
type memoKey struct{ inbox *Inbox }

// memo contains the answers of Admit in one attempt of a transaction. A nil memo contains none.
type memo struct {
	transaction any

	mu      sync.Mutex
	answers map[Entry]bool
}

// Remember returns a context in which Admit and Once remember their answers for the transaction. So
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
	return context.WithValue(ctx, memoKey{x}, &memo{transaction: transaction, answers: make(map[Entry]bool)})
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

// knownAnswers returns the known answers, and the indexes of the entries without an answer.
func (m *memo) knownAnswers(list []Entry) (fresh []bool, rest []int) {
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

		isFresh, ok := m.answers[e]
		if !ok {
			rest = append(rest, i)
		}
		fresh[i] = isFresh
	}

	return fresh, rest
}

// storeAnswers stores the answers for the entries. If an entry occurs twice in a list, its answers
// are true and false, and the first one is stored.
func (m *memo) storeAnswers(list []Entry, fresh []bool) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()

	for i, e := range list {
		if _, ok := m.answers[e]; !ok {
			m.answers[e] = fresh[i]
		}

		if fresh[i] {
			m.answers[Entry{Key: e.Key}] = true
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
	return m.answers[entry]
}
