package consumer

import (
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// damagedAttempts is how often a damaged batch is fetched before it is given up: bytes may have been damaged on their way.
const damagedAttempts = 5

// damagedError says that a fetch began with a batch whose bytes are damaged.
type damagedError struct {
	tp   TopicPartition
	base int64
	end  int64 // the offset behind it, as far as that can be known
	err  error
}

func (e *damagedError) Error() string { return fmt.Sprintf("reading partition %s: %v", e.tp, e.err) }

func (e *damagedError) Unwrap() error { return e.err }

// damage counts the fetches of each partition that began with a damaged batch.
type damage struct {
	mu   sync.Mutex
	seen map[TopicPartition]damaged
}

type damaged struct {
	offset int64 // of the fetches
	times  int
	base   int64 // of the batch that was given up, while its end is searched
	given  bool
}

// passes gives up a damaged batch that was fetched often enough: one broken record stands for all its offsets. If its end is
// not plausible, the offsets behind the first are tried one by one, until the broker answers with another batch.
func (d *damage) passes(bad *damagedError, w *walker, high int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := d.seen[bad.tp]
	if at.offset != w.from {
		at = damaged{offset: w.from}
	}
	at.times++
	if d.seen == nil {
		d.seen = map[TopicPartition]damaged{}
	}
	d.seen[bad.tp] = at
	if at.times < damagedAttempts || w.from >= high {
		return false
	}

	end := bad.end
	plausible := end > max(w.from, bad.base) && end <= high
	if !plausible {
		end = w.from + 1
	}
	if !at.given || at.base != bad.base {
		w.broken(&fetched.Batch{LeaderEpoch: -1, End: end}, w.from, bad.err)
	}
	w.next = end
	delete(d.seen, bad.tp)
	if !plausible {
		d.seen[bad.tp] = damaged{offset: end, times: damagedAttempts, base: bad.base, given: true}
	}
	return true
}
