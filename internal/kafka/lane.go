package kafka

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/crash"
	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/retry"
)

// laneID names one connection for records to a broker.
type laneID struct {
	broker int32
	index  int
}

// lane sends what its partitions have, one request at a time. While a request is in flight records gather, so the next
// request is larger the busier the broker is: no linger, and no request that waits behind another one on the connection.
type lane struct {
	id   laneID
	wake chan struct{}

	// Guarded by the sink's lock.
	ready []*part   // in the order in which they became ready: nobody starves behind a large one
	link  *link     // so that place can cut a request to a broker that leads no more
	abort func()    // ends the dial that is under way
	since time.Time // when the request in flight was begun; zero: none

	// The lane's own.
	w       wire
	out     []flight
	results []result
	told    []tell
	fails   int
	wrote   bool          // a part of the request may have reached the broker
	took    time.Duration // of the last request
}

// late reports whether the request in flight takes long. The sink's lock is held.
func (l *lane) late(now time.Time) bool { return !l.since.IsZero() && now.Sub(l.since) > slowRequest }

// flight is one partition's share of a request. The batch belongs to the lane until settle.
type flight struct {
	p *part
	b *pending
}

// laneBackoff is the wait after a connection was lost or refused.
var laneBackoff = retry.Policy{Base: 4 * time.Millisecond, Cap: 200 * time.Millisecond}

// partBackoff is the wait before a partition's batch is sent again.
var partBackoff = retry.Policy{Base: 4 * time.Millisecond, Cap: 200 * time.Millisecond}

// gatePoll is how often a closed gate is looked at: suspended is not lost (N2).
const gatePoll = 10 * time.Millisecond

// run works until ctx ends.
func (l *lane) run(ctx context.Context, s *Sink) {
	stop := context.AfterFunc(ctx, func() { s.cut(l) })
	defer stop()
	defer s.cut(l)
	for {
		if !s.take(l) {
			select {
			case <-l.wake:
				continue
			case <-ctx.Done():
				return
			}
		}
		err := l.send(ctx, s)
		s.settle(l, err)
		if err == nil {
			l.fails = 0
			continue
		}
		l.fails++
		wake(s.renew)
		if retry.Sleep(ctx, laneBackoff.Delay(l.fails)) != nil {
			return
		}
	}
}

// take moves partitions from the ready list into the next request, and freezes their head batches.
func (s *Sink) take(l *lane) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.out = l.out[:0]
	if s.halted {
		return false
	}
	total, n := 0, 0
	now := time.Now()
	for _, p := range l.ready {
		b := p.q[0]
		size := b.b.Len()
		if b.sealed != nil {
			size = len(b.sealed)
		}
		if total > 0 && total+size > s.c.cfg.MaxRequestBytes {
			break
		}
		n++
		p.listed = false
		s.freeze(p, b, now)
		if s.ended != nil {
			return false
		}
		total += size
		p.busy = true
		l.out = append(l.out, flight{p, b})
	}
	rest := copy(l.ready, l.ready[n:])
	clear(l.ready[rest:])
	l.ready = l.ready[:rest]
	return len(l.out) > 0
}

// freeze fixes a batch's boundaries and sequence. One that was sent before keeps them, unless it is so old that the broker
// may have forgotten the producer's state: it would be appended a second time then (H2). The lock is held.
func (s *Sink) freeze(p *part, b *pending, now time.Time) {
	if p.open == b {
		p.open = nil
	}
	if !b.frozen {
		b.frozen, b.seq, b.first = true, p.seq, now
		p.hint = len(b.b.Buffer())
		return
	}
	if limit := s.expiry.ProducerID / 2; b.unsure && limit > 0 && now.Sub(b.first) > limit {
		s.end(fmt.Errorf("%w: a batch for %s-%d has been without an answer for %s; the broker may have forgotten it", ErrBroken, p.tp.Topic, p.tp.Partition, now.Sub(b.first).Round(time.Second)))
	}
}

// send seals, writes one request and reads its answer into l.results.
func (l *lane) send(ctx context.Context, s *Sink) error {
	l.wrote = false
	for _, f := range l.out {
		if err := s.seal(f.b); err != nil {
			return err
		}
	}
	if len(l.out) > 1 {
		slices.SortStableFunc(l.out, func(a, b flight) int {
			if a.p.t == b.p.t {
				return 0
			}
			return strings.Compare(a.p.t.name, b.p.t.name)
		})
	}
	k, err := l.connect(ctx, s)
	if err != nil {
		return err
	}
	// N2: past the local deadline nothing is produced. A process that was suspended wakes up anywhere, so this is the last step
	// before the write.
	for !s.gate() {
		if err := retry.Sleep(ctx, gatePoll); err != nil {
			return err
		}
	}
	crash.At("before-produce")
	l.wrote = true
	l.results, err = l.w.produce(k, s.c.cfg, l.out, l.results[:0])
	crash.At("after-produce-before-ack")
	s.mu.Lock()
	l.took, l.since = time.Since(l.since), time.Time{}
	s.mu.Unlock()
	if err != nil {
		s.cut(l)
		s.c.links.doubt(k.addr)
		return fmt.Errorf("producing to %s: %w", k.addr, err)
	}
	k.used = time.Now()
	return nil
}

// seal encodes the header, and compresses: here, not in Send. A lane owns the frozen heads of its partitions.
func (s *Sink) seal(b *pending) error {
	if b.sealed != nil {
		return nil
	}
	codec := s.codec
	if b.plain {
		codec = batch.None()
	}
	s.mu.Lock()
	producer := s.producer
	var dst []byte
	if !codec.IsNone() {
		dst = s.free.get(batch.Need(b.b.Len() / 2))
	}
	s.mu.Unlock()
	sealed, err := b.b.Seal(codec, dst, producer, b.seq)
	if err != nil {
		return err
	}
	if !codec.IsNone() {
		s.mu.Lock()
		s.free.put(b.b.Buffer()) // Open finds the records in the compressed batch if they are needed again
		b.b.Forget()
		b.zipped = sealed
		s.mu.Unlock()
	}
	b.sealed = sealed
	return nil
}

// connect is the lane's link, made anew if it is lost, idle for too long, or the broker has moved.
func (l *lane) connect(ctx context.Context, s *Sink) (*link, error) {
	addr := s.c.layout.Load().Brokers[l.id.broker]
	s.mu.Lock()
	k := l.link
	s.mu.Unlock()
	if k != nil && (k.addr != addr || time.Since(k.used) > linkIdle) {
		s.cut(l)
		k = nil
	}
	if addr == "" {
		return nil, &connectError{addr: fmt.Sprintf("broker %d", l.id.broker), stage: stageTCP, err: errUnknownBroker}
	}
	dial, cancel := context.WithCancel(ctx)
	defer cancel()
	s.mu.Lock()
	l.since, l.abort = time.Now(), cancel
	s.mu.Unlock()
	var err error
	if k == nil {
		k, err = s.c.dial(dial, addr)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	l.abort = nil
	if err == nil && ctx.Err() != nil {
		k.close()
		err = context.Cause(ctx)
	}
	if err != nil {
		l.since = time.Time{}
		return nil, err
	}
	l.link = k
	return k, nil
}

// cut closes the lane's link; a request in flight fails at once.
func (s *Sink) cut(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.interrupt()
	l.link = nil
}

// interrupt makes the request in flight, or the dial before it, fail at once. The sink's lock is held.
func (l *lane) interrupt() {
	if l.abort != nil {
		l.abort()
	}
	if l.link != nil {
		l.link.close()
	}
}
