package sink

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

const (
	// closedTries is how often a connection must end at the same batch before its size counts as the reason.
	closedTries = 2
	// stalledTries is how often a batch may time out alone in its request before smaller batches are built.
	stalledTries = 3
	// leastClosed is the size from which a request can be the reason for which a broker closes a connection, in bytes. Below
	// it, a broker or a device that closes connections is an outage.
	leastClosed = 64 << 10
	// learnedFor is how long a limit counts that Kafka has shown by its behavior. It may be raised meanwhile.
	learnedFor = 10 * time.Minute
	// growAfter is how long a loop sends smaller requests after a timeout.
	growAfter = time.Minute
)

// learnedLimits are sizes that Kafka, or a device on the way, has not accepted although no setting shows the limit. They
// outlive a sink: if an earlier attempt may be in the log, only the read-back of the next sink can show that it is not.
type learnedLimits struct {
	any    atomic.Bool // there is a limit; Send asks for each record
	mu     sync.Mutex
	closed sizeLimit // a sealed batch of this size, alone in its request, ends the connection
	batch  sizeLimit // batches are built below this size
}

// sizeLimit is a number of bytes that counts for learnedFor.
type sizeLimit struct {
	bytes int
	since time.Time
}

func (l *sizeLimit) lower(bytes int, now time.Time) {
	if l.at(now) == 0 || bytes < l.bytes {
		l.bytes, l.since = bytes, now
	}
}

// at returns the limit, or 0 if there is none.
func (l *sizeLimit) at(now time.Time) int {
	if now.Sub(l.since) > learnedFor {
		return 0
	}
	return l.bytes
}

// noteClosed notes that a batch of this size, alone in its request, ends the connection.
func (l *learnedLimits) noteClosed(size int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.any.Store(true)
	l.closed.lower(size, now)
	l.batch.lower(max(size/2, leastClosed/2), now)
}

// noteStalled notes that a batch of this size takes too long.
func (l *learnedLimits) noteStalled(size int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.any.Store(true)
	l.batch.lower(max(size/2, leastClosed/2), now)
}

// closes reports whether a sealed batch of this size ends the connection.
func (l *learnedLimits) closes(size int, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.closed.at(now)
	return limit > 0 && size >= limit
}

// batchBytes returns the largest batch to build, at most the given bytes.
func (l *learnedLimits) batchBytes(most int) int {
	if !l.any.Load() {
		return most
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if limit := l.batch.at(time.Now()); limit > 0 {
		return min(limit, most)
	}
	return most
}

// requestLimitLocked returns the largest request to send, in bytes.
func (l *loop) requestLimitLocked(now time.Time) int {
	most := l.sink.c.limits.requestBytes
	if l.smaller > 0 && now.Sub(l.smallerSince) >= growAfter {
		l.smaller, l.smallerSince = 2*l.smaller, now
	}
	if l.smaller == 0 || l.smaller >= most {
		l.smaller = 0
		return most
	}
	return l.smaller
}

// adaptToFailureLocked makes the next requests smaller after one that the broker has not taken in time, or at which the
// connection was closed: half of the size, down to one batch. If a batch fails alone, smaller batches are needed.
//
// A batch that may be in the log cannot be divided, because its sequence belongs to its bytes. Then the sink ends, and the
// next one builds smaller batches of what its read-back does not find. It returns the reason why the batch waits, or "".
func (l *loop) adaptToFailureLocked(err error, now time.Time) (why string) {
	closed, timedOut := kafkawire.ClosedByBroker(err), kafkawire.TimedOut(err)
	if !l.wrote || !closed && !timedOut {
		for _, f := range l.request {
			f.batch.closedCount = 0
		}
		return ""
	}

	total := 0
	for _, f := range l.request {
		total += f.batch.builder.Len()
	}
	if len(l.request) > 1 {
		l.smaller, l.smallerSince = max(total/2, 1), now
		return ""
	}

	partition, batch := l.request[0].partition, l.request[0].batch
	switch {
	case closed && total >= leastClosed:
		batch.closedCount++
		if batch.closedCount < closedTries {
			return ""
		}
		l.sink.c.learned.noteClosed(total, now)
		why = fmt.Sprintf("Kafka, or a device before it, closes the connection at a request of %d bytes for partition %d of topic %q; "+
			"raise socket.request.max.bytes of the brokers, or lower limits.record", total, partition.tp.Partition, partition.tp.Topic)

	case timedOut:
		batch.stalledCount++
		if batch.stalledCount < stalledTries || batch.builder.Count() == 1 {
			return ""
		}
		l.sink.c.learned.noteStalled(total, now)
		why = fmt.Sprintf("a request of %d bytes for partition %d of topic %q has had no response in time %d times",
			total, partition.tp.Partition, partition.tp.Topic, batch.stalledCount)

	default:
		return ""
	}

	// If nothing of it was appended, it is divided or rejected now.
	if incomplete := errors.Is(err, kafkawire.ErrIncomplete) && !batch.maybeAppended; !incomplete && l.sink.c.mayReopen(now) {
		l.sink.failLocked(fmt.Errorf("%w with smaller batches: %s", ErrReopen, why))
	}
	return why
}

// dropOversized takes the batches out of the next request that would end the connection, and divides or rejects them.
func (l *loop) dropOversized() {
	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()

	now := time.Now()
	kept := l.request[:0]
	for _, f := range l.request {
		size := f.batch.builder.Len()
		if f.batch.maybeAppended || !l.sink.c.learned.closes(size, now) {
			kept = append(kept, f)
			continue
		}

		l.rejectSizeLocked(f.partition, f.batch)
		f.partition.busy = false
		f.partition.markReadyLocked()
		if f.partition.ready {
			retry.Signal(f.partition.loop.wake)
		}
	}

	// The request lets go of the rejected batches.
	clear(l.request[len(kept):])
	l.request = kept
}
