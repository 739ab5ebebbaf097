package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

const (
	retryEvery = time.Second // of the quarantine (N4)
	spares     = 8           // partitions of which one keeps the transactional id alive
	aliveChunk = 32          // idle partitions that are kept alive in one go, which takes a second or two
	restPoll   = 5 * time.Millisecond
)

// keeper releases the quarantine, keeps the transactional id and idle partitions alive, and leaves an id that hangs.
func (s *Sink) keeper(ctx context.Context) error {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	alive := time.NewTicker(max(s.expiry.Every(), time.Second))
	defer alive.Stop()
	var more bool // partitions are left to be kept alive
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if err = s.release(ctx); err == nil && more {
				more, err = s.keepAlive(ctx)
			}
		case <-alive.C:
			more, err = s.keepAlive(ctx)
		}
		if errors.Is(err, fence.ErrSelfMove) && s.c.mayReopen(time.Now()) {
			s.log.Warn("leaving the transactional id for its next generation", "reason", err)
			why := err
			if err = s.leave(ctx); err == nil {
				return fmt.Errorf("%w with its next transactional id: %w", ErrReopen, why)
			}
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrFenced):
			return err
		case err != nil:
			s.log.Warn("keeping the producer; trying again", "error", err)
		}
	}
}

// release is one attempt to let partitions out of quarantine: fenced and read, saved, then sent to (N4).
func (s *Sink) release(ctx context.Context) error {
	quarantined := s.session.Quarantined()
	if len(quarantined) == 0 {
		return nil
	}
	tails, err := s.session.Retry(ctx)
	if len(tails) > 0 {
		if e := s.admitTails(ctx, tails); e != nil {
			return e
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for tp, why := range s.session.Quarantined() {
		if p := s.part(tp); p != nil {
			p.hold(obstacle{kindQuarantined, why}, now)
		}
	}
	return err
}

// part finds a partition. The lock is held.
func (s *Sink) part(tp record.TopicPartition) *part {
	if t := s.topics[tp.Topic]; t != nil && int(tp.Partition) < len(t.parts) {
		return t.parts[tp.Partition]
	}
	return nil
}

// admitTails saves what is released, until that has succeeded: the fence has let go of it already.
func (s *Sink) admitTails(ctx context.Context, tails map[record.TopicPartition]*fence.Tail) error {
	offsets := map[string][]int64{}
	s.mu.Lock()
	for tp, tail := range tails {
		if p := s.part(tp); p != nil {
			set(offsets, tp, tail.From)
		}
	}
	s.mu.Unlock()
	err := retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		return s.claims.Save(ctx, s.session.Senders(), offsets)
	}, func(err error, _ time.Duration) { s.log.Warn("saving released partitions; trying again", "error", err) })
	if err != nil {
		return fmt.Errorf("saving released partitions: %w", err)
	}
	for tp, tail := range tails {
		s.mu.Lock()
		p := s.part(tp)
		s.mu.Unlock()
		if p == nil {
			continue
		}
		s.acks.Restore(tp, tail.From)
		s.mu.Lock()
		s.let(p, tail)
		s.mu.Unlock()
		s.log.Info("partition released", "topic", tp.Topic, "partition", tp.Partition, "read_back", tail.Next-tail.From)
	}
	s.Flush()
	return nil
}

// let opens a partition: of what has waited, the records that were found in it are acked, the others are sent. The lock
// is held.
func (s *Sink) let(p *part, tail *fence.Tail) {
	p.t.hits += tail.Hits.Len() - p.hits.Len()
	p.hits, p.flag = tail.Hits, tail.OutOfRange || tail.Truncated
	p.quarantine = false
	p.moves()
	p.end, p.used, p.seq = max(p.end, tail.Next), time.Now(), 0
	held := p.q
	p.q, p.open = nil, nil
	for _, b := range held {
		err := each(b, func(i int, rec *record.Record) {
			rec.Topic, rec.Partition = p.tp.Topic, p.tp.Partition
			s.forward(p.t, rec, b.tickets[i])
		})
		if err != nil {
			s.end(fmt.Errorf("%w: reading records that waited in %s-%d: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		}
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	p.keep() // what was given back, or sent by an earlier owner outside of the stream's order, is among the hits
	if low := p.hits.Lowest(); low >= 0 {
		s.holder.Found(p.tp, low) // N8: nobody looks it up before its turn, which may be late
	}
	if !s.replay { // what follows cannot have been sent before
		p.t.forget()
	}
	s.list(p)
	s.lift(p)
}

// keepAlive touches what Kafka would forget (H1, H2), [aliveChunk] partitions at most. It reports whether more are left: each takes some
// requests, and the quarantine is looked at in between.
func (s *Sink) keepAlive(ctx context.Context) (more bool, err error) {
	idle, spare, more := s.quiet()
	if len(idle)+len(spare) == 0 {
		return false, nil
	}
	return more, s.session.KeepAlive(ctx, idle, spare)
}

// quiet lists partitions without a batch of ours for long, and some others, and reports whether more are without one.
func (s *Sink) quiet() (idle, spare []record.TopicPartition, more bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, after := time.Now(), s.expiry.IdleAfter()
	for _, t := range s.topics {
		for _, p := range t.parts {
			switch {
			case p.quarantine:
			case now.Sub(p.used) >= after && len(idle) == aliveChunk:
				more = true
			case now.Sub(p.used) >= after:
				idle = append(idle, p.tp)
				p.used = now.Add(-after / 2) // if it was not healthy now, it gets another chance before its state expires
			default:
				spare = append(spare, p.tp)
			}
		}
	}
	rand.Shuffle(len(spare), func(i, j int) { spare[i], spare[j] = spare[j], spare[i] })
	return idle, spare[:min(len(spare), spares)], more
}

// leave makes the next generation's transactional id that of the sink which follows (N4), for this one hangs. What is in
// flight is awaited and nothing more is sent; a partition with a batch that may still arrive stays open for the old id, so that the
// next sink reads it behind the old id's marker. If the next generation cannot be had, everything goes on as before.
func (s *Sink) leave(ctx context.Context) (err error) {
	s.halt(true)
	defer func() {
		if err != nil {
			s.halt(false)
		}
	}()
	var unsure []record.TopicPartition
	var ends map[string][]int64
	for busy := true; busy; {
		if err := retry.Sleep(ctx, restPoll); err != nil {
			return err
		}
		busy, unsure, ends = s.inDoubt()
	}
	if _, err := s.session.NextGeneration(ctx, unsure, ends); err != nil {
		return fmt.Errorf("taking the next generation: %w", err)
	}
	err = retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		return s.claims.Save(ctx, s.session.Senders(), nil)
	}, func(err error, _ time.Duration) { s.log.Warn("saving the new sender; trying again", "error", err) })
	if err != nil {
		return fmt.Errorf("saving the new sender: %w", err)
	}
	return nil
}

// halt keeps lanes from sending, or lets them go on.
func (s *Sink) halt(yes bool) {
	s.mu.Lock()
	s.halted = yes
	s.mu.Unlock()
	s.Flush()
}

// inDoubt lists the partitions in which an unacknowledged batch may stand, and the ends of what was acked. busy: something is
// in flight.
func (s *Sink) inDoubt() (busy bool, unsure []record.TopicPartition, ends map[string][]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	ends = map[string][]int64{}
	for _, t := range s.topics {
		list := make([]int64, len(t.parts))
		for i, p := range t.parts {
			busy = busy || p.busy
			if p.quarantine {
				continue
			}
			list[i] = p.end
			if p.unread || len(p.q) > 0 && p.q[0].unsure {
				unsure = append(unsure, p.tp)
			}
		}
		ends[t.name] = list
	}
	return busy, unsure, ends
}
