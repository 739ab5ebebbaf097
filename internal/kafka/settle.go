package kafka

import (
	"fmt"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fetched"
	"github.com/outrelay/outrelay/internal/record"
)

const (
	// corruptTries is how often a batch that the broker found corrupt is sent as it is, and then encoded anew.
	corruptTries = 3
	// movedTries is how often an unknown partition is taken for one that is moving.
	movedTries = 5
	// heldEvery is when a partition is tried again after a definite no.
	heldEvery = time.Second
	// sayAfter is from when on a partition that is only retried counts as blocked.
	sayAfter = 2 * time.Second
)

// tell is a callback that waits until the lock is released.
type tell struct {
	p       *part
	base    int64
	tickets []record.Ticket // acked
	restore bool            // base begins anew: the topic is another one than before
	bytes   int
}

// settle applies the answers of one request, or the loss of its connection, to the heads of its partitions. A partition
// stays busy until its callbacks are done, so that nothing else speaks of it meanwhile.
func (s *Sink) settle(l *lane, err error) {
	now := time.Now()
	s.mu.Lock()
	l.told = l.told[:0]
	for i, f := range l.out {
		p, r := f.p, result{}
		if err == nil {
			r = l.results[i]
		}
		if err == nil && r.told {
			s.answer(l, p, &r, now)
			s.pace(p, l, r.code)
			continue
		}
		// The request may have arrived or not: the same bytes again, which the broker knows if it has them.
		f.b.unsure = f.b.unsure || l.wrote
		text := "the broker's answer leaves it out"
		if err != nil {
			text = err.Error()
		}
		s.again(p, obstacle{kindUnreachable, text}, now, 0)
	}
	s.mu.Unlock()
	bytes, count := s.tellAll(l.told)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.resolved(count, bytes)
	for _, f := range l.out {
		p := f.p
		p.busy = false
		s.list(p)
		if p.listed && p.lane != l {
			wake(p.lane.wake)
		}
		if len(p.q) == 0 && p.t.grows && p.t.idle() {
			wake(s.adopt)
		}
		if !p.why.none() && s.hopeless(p, now, false) {
			wake(s.park) // it may be in flight whenever the clock looks
		}
	}
	clear(l.told)
	clear(l.out)
	l.out = l.out[:0]
}

// tellAll calls back without the lock.
func (s *Sink) tellAll(list []tell) (bytes, count int) {
	for i := range list {
		x := &list[i]
		bytes += x.bytes
		count += len(x.tickets)
		if x.restore {
			s.acks.Restore(x.p.tp, x.base)
		}
		s.acks.Acked(x.p.tp, x.base, x.tickets, x.bytes)
	}
	return bytes, count
}

// answer applies a broker's answer to the head of p. The lock is held.
func (s *Sink) answer(l *lane, p *part, r *result, now time.Time) {
	b := p.q[0]
	if r.code != 0 {
		s.c.cfg.Metrics.ProduceErrors.WithLabelValues(r.code.Title()).Inc()
	}
	verdict := classify(r.code)
	if verdict != acked {
		b.unsure = b.unsure || mayStand(r.code)
	}
	switch verdict {
	case acked:
		l.told = append(l.told, s.appended(p, b, r, now))
	case again:
		if r.code != kafkago.NotEnoughReplicas { // the leader is the right one
			wake(s.renew)
		}
		s.again(p, obstacle{kindRefused, fmt.Sprintf("partition %d of topic %q: Kafka answers %v", p.tp.Partition, p.tp.Topic, r.code)}, now, 0)
	case split, records:
		if b.unsure {
			// Kafka looks at the size and the records before it looks for duplicates: an earlier attempt may have been appended.
			s.end(fmt.Errorf("%w: %s-%d: %w, and an earlier attempt may have been appended", ErrBroken, p.tp.Topic, p.tp.Partition, r.code))
			return
		}
		if verdict == records {
			s.refuse(p, b, r)
			return
		}
		p.t.stale = true
		wake(s.renew)
		s.split(p, b)
	case corrupt:
		s.garbled(p, b, now)
	case refused:
		wake(s.renew)
		wait := heldEvery
		if r.code == kafkago.UnknownTopicOrPartition && p.tries < movedTries {
			wait = 0 // a leader that has just moved away answers so, too
		}
		s.again(p, topicObstacle(p.tp.Topic, r.code, false), now, wait)
	case fenced:
		s.end(fmt.Errorf("%w: %s-%d: %w", ErrFenced, p.tp.Topic, p.tp.Partition, r.code))
	case broken:
		s.end(fmt.Errorf("%w: %s-%d: %w", ErrBroken, p.tp.Topic, p.tp.Partition, r.code))
	}
}

// end is fail with the lock held.
func (s *Sink) end(err error) {
	if s.ended != nil {
		return
	}
	s.ended = err
	if s.stop != nil {
		s.stop(err)
	}
}

// appended takes an acked batch off its partition.
func (s *Sink) appended(p *part, b *pending, r *result, now time.Time) tell {
	n := b.b.Count()
	x := tell{p: p, base: r.base, tickets: b.tickets, bytes: b.bytes}
	switch {
	case x.base < 0:
		x.base = p.end // a duplicate whose place the broker no longer knows: it stands at or above that
	case x.base < p.end && !b.unsure && r.code == 0:
		x.restore = true // offsets begin anew: the topic was deleted and created again
		s.log.Warn("the offsets of a partition went back: its topic was created anew", "topic", p.tp.Topic, "partition", p.tp.Partition, "from", p.end, "to", r.base)
		p.end = 0
	}
	if p.t.max > 0 && len(b.sealed)-4 > p.t.max {
		p.t.stale = true // the limit was raised
	}
	p.end = max(p.end, x.base+int64(n))
	p.seq = batch.Next(p.seq, n)
	p.used = now
	p.pop()
	p.moves()
	p.asks = false
	s.discard(b)
	s.lift(p)
	return x
}

// again puts the same bytes off: for a moment, or for wait.
func (s *Sink) again(p *part, why obstacle, now time.Time, wait time.Duration) {
	p.tries++
	p.hold(why, now)
	if wait == 0 {
		wait = partBackoff.Delay(p.tries)
	}
	p.later = true
	time.AfterFunc(wait, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		p.later = false
		s.list(p)
		if p.listed {
			wake(p.lane.wake)
		}
	})
}

// each decodes a batch that was frozen, or not yet.
func each(b *pending, f func(i int, rec *record.Record)) error {
	var from fetched.Batch
	if b.zipped == nil {
		from = fetched.Unsealed(b.b.Records())
	} else {
		var err error
		for from, err = range fetched.Batches(batch.Sealed(b.sealed)) {
			if err != nil {
				return err
			}
		}
	}
	list, err := from.Records(nil)
	if err != nil {
		return err
	}

	var x fetched.Record
	for i := range b.tickets {
		ok, err := list.Next(&x)
		if err != nil {
			return err
		}
		if !ok {
			return fmt.Errorf("%w: %d records instead of %d", fetched.ErrCorrupt, i, len(b.tickets))
		}
		f(i, &record.Record{Key: x.Key, Value: x.Value, Headers: x.Headers, TimeMS: x.TimeMS})
	}
	return nil
}

// divide encodes the records of the head of p anew, in n batches that take the head's place; the first of them has the head's
// sequence, because nothing was appended.
func (s *Sink) divide(p *part, b *pending, n int, plain bool) {
	into := make([]*pending, n)
	count := int(b.b.Count())
	err := each(b, func(i int, rec *record.Record) {
		to := i * n / count
		need, size := sizes(rec)
		if into[to] == nil {
			into[to] = s.newBatch(batch.Need(need))
			into[to].plain = plain
		}
		s.put(into[to], rec, b.tickets[i], size, need)
		s.resolved(1, size) // counted once already
	})
	if err != nil {
		s.end(fmt.Errorf("%w: %s-%d: reading a batch of our own: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		return
	}
	p.replaceHead(into...)
	s.tickets.put(b.tickets)
	s.discard(b)
}

// split halves a batch that is too large; one record that is too large alone is at fault itself.
func (s *Sink) split(p *part, b *pending) {
	p.moves()
	if b.b.Count() == 1 {
		size := len(b.sealed) - 4
		s.pull(p, func(int) *record.Refusal { return tooLarge(p.t, size) })
		return
	}
	s.divide(p, b, 2, b.plain)
}

// refuse takes out exactly the records that the broker names. If it names none, halves find the one.
func (s *Sink) refuse(p *part, b *pending, r *result) {
	n := int(b.b.Count())
	named := slices.ContainsFunc(r.bad, func(i int) bool { return i >= 0 && i < n })
	if !named && n > 1 {
		s.split(p, b)
		return
	}
	p.moves()
	s.pull(p, func(i int) *record.Refusal {
		if n > 1 && !slices.Contains(r.bad, i) {
			return nil
		}
		reason := fmt.Sprintf("Kafka refuses the record for partition %d of topic %q: %v", p.tp.Partition, p.tp.Topic, r.code)
		if r.message != "" {
			reason += " (" + r.message + ")"
		}
		return &record.Refusal{Class: record.RecordRefused, Reason: reason}
	})
}

// garbled handles a checksum that did not fit: the same bytes some times, then encoded anew without compression, then
// held, since something between us and the broker changes what we send.
func (s *Sink) garbled(p *part, b *pending, now time.Time) {
	b.bad++
	if b.unsure && b.bad >= corruptTries { // no other bytes may take its sequence
		s.end(fmt.Errorf("%w: %s-%d: the broker finds a batch corrupt of which an earlier attempt may have been appended", ErrBroken, p.tp.Topic, p.tp.Partition))
		return
	}
	why := obstacle{kindRefused, fmt.Sprintf("Kafka finds batches for partition %d of topic %q corrupt; look for a proxy or a network card that changes data", p.tp.Partition, p.tp.Topic)}
	if b.bad%corruptTries != 0 {
		s.again(p, why, now, 0)
		return
	}
	bad := b.bad
	s.divide(p, b, 1, true)
	p.q[0].bad = bad
	wait := time.Duration(0)
	if bad >= 2*corruptTries {
		wait = heldEvery
	}
	s.again(p, why, now, wait)
}
