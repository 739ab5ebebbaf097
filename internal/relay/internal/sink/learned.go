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
	// growAfter is how long a loop sends smaller requests after a timeout, and how long a broker that has closed a connection at a small
	// request shows no limit.
	growAfter = time.Minute
)

// learnedLimits are sizes that Kafka, or a device on the way, has not accepted although no setting shows the limit. They
// outlive a sink: if an earlier attempt may be in the log, only the read-back of the next sink can show that it is not.
type learnedLimits struct {
	any     atomic.Bool // there is a limit; Send asks for each record
	mu      sync.Mutex
	brokers map[string]*closings // by address
	batch   sizeLimit            // batches are built below this size, for all brokers
}

// closings are the requests at which one broker has closed the connection.
type closings struct {
	large sizeLimit // a sealed batch of this size, alone in its request, ends the connection
	small time.Time // when the connection was last closed at a request below leastClosed
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

// closingsLocked returns the closings of the broker at addr.
func (l *learnedLimits) closingsLocked(addr string) *closings {
	if l.brokers == nil {
		l.brokers = map[string]*closings{}
	}
	if l.brokers[addr] == nil {
		l.brokers[addr] = &closings{}
	}
	return l.brokers[addr]
}

// noteSmallClosed notes that the broker at addr has closed the connection at a request whose size cannot be the reason. So its closings
// at large requests show no limit either.
func (l *learnedLimits) noteSmallClosed(addr string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	*l.closingsLocked(addr) = closings{small: now}
}

// noteClosed notes that a batch of this size, alone in its request, ends the connection to the broker at addr. It returns false if the
// broker closes connections at small requests too: then the size is not the reason.
func (l *learnedLimits) noteClosed(addr string, size int, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	closings := l.closingsLocked(addr)
	if now.Sub(closings.small) < growAfter {
		return false
	}

	l.any.Store(true)
	closings.large.lower(size, now)
	l.batch.lower(max(size/2, leastClosed/2), now)
	return true
}

// noteStalled notes that a batch of this size takes too long.
func (l *learnedLimits) noteStalled(size int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.any.Store(true)
	l.batch.lower(max(size/2, leastClosed/2), now)
}

// closes reports whether a sealed batch of this size ends the connection to the broker at addr.
func (l *learnedLimits) closes(addr string, size int, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	limit := l.closingsLocked(addr).large.at(now)
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
	// The size of a small request is not the reason.
	if total < leastClosed {
		if closed {
			l.sink.c.learned.noteSmallClosed(l.brokerAddr(), now)
		}
		return ""
	}
	if len(l.request) > 1 {
		l.smaller, l.smallerSince = max(total/2, leastClosed/2), now
		return ""
	}

	partition, batch := l.request[0].partition, l.request[0].batch
	switch {
	case closed:
		batch.closedCount++
		if batch.closedCount < closedTries || !l.sink.c.learned.noteClosed(l.brokerAddr(), total, now) {
			return ""
		}
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
	}

	// If nothing of it was appended, it is divided or rejected now.
	if incomplete := errors.Is(err, kafkawire.ErrIncomplete) && !batch.maybeAppended; !incomplete && l.sink.c.takeReopen(now) {
		l.sink.failLocked(fmt.Errorf("%w with smaller batches: %s", ErrReopen, why))
	}
	return why
}

// dropOversized takes the batches out of the next request that would end the connection, and divides or rejects them.
func (l *loop) dropOversized() {
	l.sink.mu.Lock()
	defer l.sink.mu.Unlock()

	now, addr := time.Now(), l.brokerAddr()
	kept := l.request[:0]
	for _, f := range l.request {
		size := f.batch.builder.Len()
		if f.batch.maybeAppended || !l.sink.c.learned.closes(addr, size, now) {
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
