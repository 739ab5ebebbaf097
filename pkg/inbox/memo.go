package inbox

import (
	"context"
	"sync"

	"go.mongodb.org/mongo-driver/v2/mongo"
)

type memoKey struct{}

// memo is what was answered in one attempt of a transaction. A nil memo knows nothing.
type memo struct {
	sess *mongo.Session

	mu    sync.Mutex
	known map[Entry]bool
}

// Remember is called first in a transaction's callback, with the context that it got, and returns the one to go on with:
// there Admit and Once know what they have answered before in this transaction, so that several parts of a handler may ask
// for the same entry; one without a place is the same as any with its key that was fresh. Once does it by itself. It has no
// effect where no transaction runs. The callback's every attempt needs its own, so call it nowhere else.
func Remember(ctx context.Context) context.Context {
	if !inTransaction(ctx) || memoOf(ctx) != nil {
		return ctx
	}
	return context.WithValue(ctx, memoKey{}, &memo{sess: mongo.SessionFromContext(ctx), known: make(map[Entry]bool)})
}

// memoOf is the memo of the transaction that an operation with ctx would be in.
func memoOf(ctx context.Context) *memo {
	m, _ := ctx.Value(memoKey{}).(*memo)
	if m == nil || mongo.SessionFromContext(ctx) != m.sess || !m.sess.TransactionRunning() {
		return nil
	}
	return m
}

// answer fills in what is known and lists the rest.
func (m *memo) answer(list []Entry) (fresh []bool, rest []int) {
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
		f, ok := m.known[e]
		if !ok {
			rest = append(rest, i)
		}
		fresh[i] = f
	}
	return fresh, rest
}

// keep remembers answers. Within one list a repeated entry was answered true and then false: the first counts.
func (m *memo) keep(list []Entry, fresh []bool) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for i, e := range list {
		if _, ok := m.known[e]; !ok {
			m.known[e] = fresh[i]
		}
		if plain := (Entry{Key: e.Key}); fresh[i] {
			m.known[plain] = true
		}
	}
}

// fresh says whether this handling is the one of an entry.
func (m *memo) fresh(e Entry) bool {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.known[e]
}
