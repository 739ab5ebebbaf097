package memory

import (
	"sync"
	"time"
)

// feed is what was committed to an outbox and no relay has delivered yet, in commit order. It is there before a relay is,
// so what is appended before the start is not lost.
type feed struct {
	clock Clock

	mu      sync.Mutex
	seq     uint64
	pending []committed
	more    chan struct{} // holds one when something was committed, a change of a scheduled event included
}

type committed struct {
	*envelope
	at time.Time
}

// feedOf is the feed of a table, one for all outboxes of its name.
func feedOf(db *DB, table *rows) *feed {
	db.mu.Lock()
	defer db.mu.Unlock()
	if table.follower == nil {
		table.follower = &feed{clock: db.clock, more: make(chan struct{}, 1)}
		table.committed = table.follower.add
	}
	return table.follower
}

func (f *feed) next() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	return f.seq
}

func (f *feed) add(inserted []any) {
	now := f.clock.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range inserted {
		if e := v.(*envelope); e.ev.dueAt.IsZero() {
			f.pending = append(f.pending, committed{e, now})
		}
	}
	select {
	case f.more <- struct{}{}:
	default:
	}
}

// first is what is to be delivered next.
func (f *feed) first() (committed, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.pending) == 0 {
		return committed{}, false
	}
	return f.pending[0], true
}

// delivered takes the first away.
func (f *feed) delivered() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pending[0] = committed{}
	f.pending = f.pending[1:]
}
