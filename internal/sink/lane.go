package sink

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/retry"
)

// laneID names one connection for records to a broker.
type laneID struct {
	broker int32
	index  int
}

// lane sends the batches of its partitions, one request at a time. Records gather while a request
// is in flight, so requests grow with the load of the broker. There is no linger, and no request
// waits behind another request on the connection.
type lane struct {
	id   laneID
	wake chan struct{}

	// Guarded by the sink's lock.
	ready        []*partition    // in the order in which they became ready, so that a large one starves no other
	link         *kafkawire.Link // here, so that applyLayout can interrupt a request to a broker that leads no more
	abortDial    func()          // ends the dial that is in progress
	requestBegan time.Time       // zero: no request is in flight

	// Used only by the lane's goroutine.
	producer     kafkawire.Producer
	request      []flight
	batches      []kafkawire.PartitionBatch // the same, as it is encoded
	results      []kafkawire.ProduceResult
	acked        []ackedBatch
	failures     int
	wrote        bool          // a part of the request may have reached the broker
	lastDuration time.Duration // of the last request
}

// isLateLocked reports whether the request in flight takes long.
func (l *lane) isLateLocked(now time.Time) bool {
	return !l.requestBegan.IsZero() && now.Sub(l.requestBegan) > slowRequest
}

// flight is one partition's share of a request. The batch belongs to the lane until settleRequest.
type flight struct {
	partition *partition
	batch     *pending
}

// laneBackoff is the wait after a connection was lost or refused.
var laneBackoff = retry.Policy{Base: 4 * time.Millisecond, Cap: 200 * time.Millisecond}

// partitionBackoff is the wait before a partition's batch is sent again.
var partitionBackoff = retry.Policy{Base: 4 * time.Millisecond, Cap: 200 * time.Millisecond}

// gatePoll is the interval at which a closed gate is checked. A lease whose local deadline has
// passed is suspended, but not lost (N2).
const gatePoll = 10 * time.Millisecond

// sendLoop sends requests until ctx ends.
func (l *lane) sendLoop(ctx context.Context, s *Sink) {
	stop := context.AfterFunc(ctx, func() { s.cutLink(l) })
	defer stop()
	defer s.cutLink(l)

	for {
		if !s.fillRequest(l) {
			select {
			case <-l.wake:
				continue
			case <-ctx.Done():
				return
			}
		}

		err := l.sendRequest(ctx, s)
		s.settleRequest(l, err)
		if err == nil {
			l.failures = 0
			continue
		}

		l.failures++
		wake(s.renewWake)
		if retry.Sleep(ctx, laneBackoff.Delay(l.failures)) != nil {
			return
		}
	}
}

// fillRequest moves partitions from the ready list into the next request, and freezes their head
// batches. It reports whether there is something to send.
func (s *Sink) fillRequest(l *lane) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.request = l.request[:0]
	if s.paused {
		return false
	}

	total, n := 0, 0
	now := time.Now()
	for _, p := range l.ready {
		b := p.queue[0]
		size := b.builder.Len()
		if b.sealed != nil {
			size = len(b.sealed)
		}
		if total > 0 && total+size > s.c.cfg.MaxRequestBytes {
			break
		}

		n++
		p.ready = false
		s.freezeLocked(p, b, now)
		if s.ended != nil {
			return false
		}

		total += size
		p.busy = true
		l.request = append(l.request, flight{p, b})
	}

	rest := copy(l.ready, l.ready[n:])
	clear(l.ready[rest:])
	l.ready = l.ready[:rest]
	return len(l.request) > 0
}

// freezeLocked fixes the boundaries and the sequence of the head b. A batch that was sent before
// keeps them. If it is so old that the broker may have forgotten the producer's state, the sink
// ends: the broker would append the batch a second time (H2).
func (s *Sink) freezeLocked(p *partition, b *pending, now time.Time) {
	if p.openBatch == b {
		p.openBatch = nil
	}
	if !b.frozen {
		b.frozen, b.seq, b.firstSent = true, p.nextSeq, now
		p.sizeHint = len(b.builder.Buffer())
		return
	}

	limit := s.expiry.ProducerID / 2
	if b.maybeAppended && limit > 0 && now.Sub(b.firstSent) > limit {
		s.failLocked(fmt.Errorf("%w: a batch for %s-%d has had no definite response for %s; the broker may have forgotten it",
			ErrBroken, p.tp.Topic, p.tp.Partition, now.Sub(b.firstSent).Round(time.Second)))
	}
}

// sendRequest seals the batches of l.request, writes one request and reads its response into
// l.results.
func (l *lane) sendRequest(ctx context.Context, s *Sink) error {
	l.wrote = false
	for _, f := range l.request {
		if err := s.sealBatch(f.batch); err != nil {
			return err
		}
	}

	// The request groups partitions by topic.
	if len(l.request) > 1 {
		slices.SortStableFunc(l.request, func(a, b flight) int {
			if a.partition.topic == b.partition.topic {
				return 0
			}
			return strings.Compare(a.partition.topic.name, b.partition.topic.name)
		})
	}

	l.batches = l.batches[:0]
	for _, f := range l.request {
		b := kafkawire.PartitionBatch{Topic: f.partition.tp.Topic, Partition: f.partition.tp.Partition, Sealed: f.batch.sealed}
		l.batches = append(l.batches, b)
	}

	k, err := l.ensureLink(ctx, s)
	if err != nil {
		return err
	}

	// N2: nothing is produced after the local deadline. A suspended process can wake up anywhere, so
	// this is the last step before the write.
	for !s.gate() {
		if err := retry.Sleep(ctx, gatePoll); err != nil {
			return err
		}
	}

	crash.At("before-produce")
	l.wrote = true
	l.results, err = l.producer.Produce(k, s.c.cfg.RequestTimeout, l.batches, l.results[:0])
	crash.At("after-produce-before-ack")

	s.mu.Lock()
	l.lastDuration, l.requestBegan = time.Since(l.requestBegan), time.Time{}
	s.mu.Unlock()
	if err != nil {
		s.cutLink(l)
		s.c.kafka.MarkFailed(k.Addr())
		return fmt.Errorf("producing to %s: %w", k.Addr(), err)
	}
	return nil
}

// sealBatch encodes the header and compresses. The lane does this instead of Send, because it owns
// the frozen heads of its partitions and needs no lock for them.
func (s *Sink) sealBatch(b *pending) error {
	if b.sealed != nil {
		return nil
	}
	codec := s.codec
	if b.uncompressed {
		codec = batch.None()
	}

	s.mu.Lock()
	producer := s.producer
	var dst []byte
	if !codec.IsNone() {
		dst = s.freeBuffers.get(batch.BufferSize(b.builder.Len() / 2))
	}
	s.mu.Unlock()

	sealed, err := b.builder.Seal(codec, dst, producer, b.seq)
	if err != nil {
		return err
	}

	// If the records are needed again, forEachRecord finds them in the compressed batch.
	if !codec.IsNone() {
		s.mu.Lock()
		s.freeBuffers.put(b.builder.Buffer())
		b.builder.Forget()
		b.compressed = sealed
		s.mu.Unlock()
	}
	b.sealed = sealed
	return nil
}

// ensureLink returns the lane's link. It dials a new one if there is none, if it was idle for too
// long, or if the broker has another address now.
func (l *lane) ensureLink(ctx context.Context, s *Sink) (*kafkawire.Link, error) {
	addr := s.c.kafka.Layout().Brokers[l.id.broker]
	s.mu.Lock()
	k := l.link
	s.mu.Unlock()

	if k != nil && (k.Addr() != addr || k.IsStale()) {
		s.cutLink(l)
		k = nil
	}
	if addr == "" {
		return nil, kafkawire.UnknownBrokerError(l.id.broker)
	}

	dialCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	l.requestBegan, l.abortDial = time.Now(), cancel
	s.mu.Unlock()

	var err error
	if k == nil {
		k, err = s.c.kafka.Dial(dialCtx, addr)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	l.abortDial = nil
	if err == nil && ctx.Err() != nil {
		k.Close()
		err = context.Cause(ctx)
	}
	if err != nil {
		l.requestBegan = time.Time{}
		return nil, err
	}
	l.link = k
	return k, nil
}

// cutLink closes the lane's link. A request in flight fails at once.
func (s *Sink) cutLink(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.interruptLocked()
	l.link = nil
}

// interruptLocked makes the request in flight, or the dial before it, fail at once.
func (l *lane) interruptLocked() {
	if l.abortDial != nil {
		l.abortDial()
	}
	if l.link != nil {
		l.link.Close()
	}
}
