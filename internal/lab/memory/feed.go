package memory

import (
	"sync"
	"time"
)

// feed contains the committed events of an outbox that no relay has delivered yet, in commit order.
// It exists before a relay does, so events that are appended before that are not lost.
type feed struct {
	mu      sync.Mutex
	seq     uint64
	pending []committedEnvelope
	wake    chan struct{} // has capacity 1 and is filled by each commit, including changes of scheduled events
}

// committedEnvelope is an envelope with the time of its commit.
type committedEnvelope struct {
	*outboxEntry
	at time.Time
}

// findOrAddFeed returns the feed of a table. All outboxes with the same name share it.
func findOrAddFeed(db *DB, table *storedTable) *feed {
	db.mu.Lock()
	defer db.mu.Unlock()

	if table.feed == nil {
		table.feed = &feed{wake: make(chan struct{}, 1)}
		table.onCommit = table.feed.addCommitted
	}

	return table.feed
}

// nextSequence returns the next number of an insert.
func (f *feed) nextSequence() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()

	f.seq++
	return f.seq
}

// addCommitted adds the inserted envelopes, except for scheduled ones, and wakes the relay.
func (f *feed) addCommitted(inserted []any) {
	now := time.Now()

	f.mu.Lock()
	defer f.mu.Unlock()

	for _, v := range inserted {
		if entry := v.(*outboxEntry); entry.fields.dueAt.IsZero() {
			f.pending = append(f.pending, committedEnvelope{entry, now})
		}
	}

	// One signal is enough, because the relay delivers all pending envelopes.
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// firstPending returns the envelope to be delivered next, and whether there is one.
func (f *feed) firstPending() (committedEnvelope, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()

	if len(f.pending) == 0 {
		return committedEnvelope{}, false
	}
	return f.pending[0], true
}

// countPending returns the number of envelopes to be delivered.
func (f *feed) countPending() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pending)
}

// removeFirst removes the first envelope after its delivery.
func (f *feed) removeFirst() {
	f.mu.Lock()
	defer f.mu.Unlock()

	// Without a reference, the envelope can be garbage-collected.
	f.pending[0] = committedEnvelope{}
	f.pending = f.pending[1:]
}
