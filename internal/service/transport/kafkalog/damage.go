package kafkalog

import (
	"fmt"
	"sync"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// damagedAttempts is how often a damaged batch is fetched before it is given up: its bytes may have been
// damaged in transit.
const damagedAttempts = 5

// damagedError means that a fetch began with a damaged batch.
type damagedError struct {
	tp   transport.TopicPartition
	base int64
	end  int64 // the offset after the batch, if its header is right
	err  error
}

func (e *damagedError) Error() string { return fmt.Sprintf("reading partition %s: %v", e.tp, e.err) }

func (e *damagedError) Unwrap() error { return e.err }

// damage counts the fetches of each partition that began with a damaged batch.
type damage struct {
	mu   sync.Mutex
	seen map[transport.TopicPartition]damaged
}

type damaged struct {
	offset  int64 // of the fetches
	times   int
	base    int64 // of the batch that was given up, while its end is searched
	givenUp bool
}

// giveUp gives up a damaged batch that was fetched often enough, and reports whether it did. One broken
// record stands for all offsets of the batch. If its end is not plausible, the offsets after the first are
// tried one by one, until the broker returns another batch.
func (d *damage) giveUp(bad *damagedError, walker *walker, high int64) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := d.seen[bad.tp]
	// Attempts count for one offset.
	if at.offset != walker.from {
		at = damaged{offset: walker.from}
	}
	at.times++
	if d.seen == nil {
		d.seen = map[transport.TopicPartition]damaged{}
	}
	d.seen[bad.tp] = at
	if at.times < damagedAttempts || walker.from >= high {
		return false
	}

	end := bad.end
	plausible := end > max(walker.from, bad.base) && end <= high
	if !plausible {
		end = walker.from + 1
	}
	// One record stands for the whole batch, even if its offsets are passed one by one.
	if !at.givenUp || at.base != bad.base {
		walker.addBroken(&fetched.Batch{LeaderEpoch: -1, End: end}, walker.from, bad.err)
	}
	walker.next = end

	delete(d.seen, bad.tp)
	// The end of the batch is unknown, so the next offset gets no further attempts.
	if !plausible {
		d.seen[bad.tp] = damaged{offset: end, times: damagedAttempts, base: bad.base, givenUp: true}
	}
	return true
}
