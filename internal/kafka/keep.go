package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outrelay/outrelay/internal/kafka/batch"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

const (
	retryEvery = time.Second // of the quarantine (N4)
	spares     = 8           // partitions of which one keeps the transactional id alive
	// answersLimit is how long a move of our own waits for answers; partitions without one go to quarantine.
	answersLimit = 10 * time.Second
	drainPoll    = 5 * time.Millisecond
)

// keeper releases the quarantine, keeps the transactional id and idle partitions alive, and moves to the next generation.
func (s *Sink) keeper(ctx context.Context) error {
	tick := time.NewTicker(retryEvery)
	defer tick.Stop()
	alive := time.NewTicker(max(s.expiry.Every(), time.Second))
	defer alive.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			err = s.release(ctx)
		case <-alive.C:
			err = s.keepAlive(ctx)
		}
		if errors.Is(err, fence.ErrSelfMove) {
			s.log.Warn("leaving the transactional id for its next generation", "reason", err)
			err = s.move(ctx)
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
		if p := s.part(tp); p != nil && (!p.undrained || tail.OutOfRange) {
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
		if list, ok := offsets[tp.Topic]; ok && int(tp.Partition) < len(list) && list[tp.Partition] >= 0 {
			s.acks.Restore(tp, tail.From)
		}
		s.mu.Lock()
		p := s.part(tp)
		if p == nil {
			s.mu.Unlock()
			continue
		}
		told := s.let(p, tail)
		s.mu.Unlock()
		s.finish(told)
		s.log.Info("partition released", "topic", tp.Topic, "partition", tp.Partition, "read_back", tail.Next-tail.From)
	}
	s.Flush()
	return nil
}

// let opens a partition: of what has waited, the records that were found in it are acked, the others are sent. The lock
// is held.
func (s *Sink) let(p *part, tail *fence.Tail) []outcome {
	ghost, found := len(p.q) > 0 && p.q[0].ghost, p.mine
	own := s.learn(p, tail)
	p.quarantine, p.undrained = false, false
	p.moves()
	p.end, p.used, p.seq = max(p.end, tail.Next), time.Now(), 0
	held := p.q
	p.q, p.open = nil, nil
	var told []outcome
	for _, b := range held {
		if b.ghost {
			s.discard(b)
			continue
		}
		err := each(b, func(i int, rec *record.Record) {
			rec.Topic, rec.Partition = p.tp.Topic, p.tp.Partition
			told = s.forward(p.t, rec, b.tickets[i], b.reserved(i, rec), told)
		})
		if err != nil {
			s.end(fmt.Errorf("%w: reading records that waited in %s-%d: %w", ErrBroken, p.tp.Topic, p.tp.Partition, err))
		}
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	s.owe(p, tail, found, own, ghost)
	if !s.replay { // what follows cannot have been sent before
		p.t.forget()
	}
	s.list(p)
	s.lift(p)
	return told
}

// learn takes over what was found in a partition. After a move of our own that is, from the end of what was acked on, what
// this term has sent without an answer, and all of it is in the queue; what the take-over had found, below, still counts.
// A log that does not reach that far any more, or was read from its start, has lost or contains that. It reports whether it was what
// this term has sent. The lock is held.
func (s *Sink) learn(p *part, tail *fence.Tail) (own bool) {
	flag := tail.OutOfRange || tail.Truncated
	if p.undrained && tail.From >= p.end {
		p.mine, p.flag = tail.Hits, p.flag || flag
		return true
	}
	p.t.hits += tail.Hits.Len() - p.hits.Len()
	p.hits, p.flag = tail.Hits, flag
	return false
}

// keepAlive touches what Kafka would forget (H1, H2).
func (s *Sink) keepAlive(ctx context.Context) error {
	idle, spare := s.quiet()
	if len(idle)+len(spare) == 0 {
		return nil
	}
	return s.session.KeepAlive(ctx, idle, spare)
}

// quiet lists partitions without a batch of ours for long, and some others.
func (s *Sink) quiet() (idle, spare []record.TopicPartition) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now, after := time.Now(), s.expiry.IdleAfter()
	for _, t := range s.topics {
		for _, p := range t.parts {
			switch {
			case p.quarantine:
			case now.Sub(p.used) >= after:
				idle = append(idle, p.tp)
				p.used = now.Add(-after / 2) // if it was not healthy now, it gets another chance before its state expires
			default:
				spare = append(spare, p.tp)
			}
		}
	}
	rand.Shuffle(len(spare), func(i, j int) { spare[i], spare[j] = spare[j], spare[i] })
	return idle, spare[:min(len(spare), spares)]
}

// move leaves a transactional id that hangs (N4): what is in flight is awaited, then the next generation's identity is
// saved and used. A partition whose batch may or may not have been appended goes to quarantine, where it is read. If the next
// generation cannot be had, everything goes on as before.
func (s *Sink) move(ctx context.Context) error {
	defer s.resume()
	undrained, ends, err := s.settled(ctx)
	if err != nil {
		return err
	}
	producer, err := s.session.NextGeneration(ctx, undrained, ends)
	if err != nil {
		s.stay(undrained)
		return fmt.Errorf("taking the next generation: %w", err)
	}
	err = retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		return s.claims.Save(ctx, s.session.Senders(), nil)
	}, func(err error, _ time.Duration) { s.log.Warn("saving the new sender; trying again", "error", err) })
	if err != nil {
		return fmt.Errorf("saving the new sender: %w", err)
	}
	s.rename(batch.Producer(producer), undrained)
	return nil
}

// stay takes back what a move that failed has put into quarantine: the fence does not hold it, and nobody would release it.
func (s *Sink) stay(undrained map[record.TopicPartition]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for tp := range undrained {
		p := s.part(tp)
		p.quarantine, p.undrained = false, false
	}
}

// settled stops new batches, and waits until each frozen one has a definite answer, at most drainLimit long. Then nothing is in
// flight. It returns the partitions whose head may have been appended, with the offset from which it can stand, and the
// ends of what was acked.
func (s *Sink) settled(ctx context.Context) (undrained map[record.TopicPartition]int64, ends map[string][]int64, err error) {
	s.mu.Lock()
	s.pause = frozenOnly
	s.mu.Unlock()
	for deadline := time.Now().Add(s.drainLimit); ; {
		s.mu.Lock()
		busy, unsure := s.frozen()
		if time.Now().After(deadline) {
			s.pause, unsure = nothing, 0
		}
		if busy == 0 && unsure == 0 {
			s.pause = nothing
			undrained, ends = s.unsure()
			s.mu.Unlock()
			return undrained, ends, nil
		}
		s.mu.Unlock()
		if err := retry.Sleep(ctx, drainPoll); err != nil {
			return nil, nil, err
		}
	}
}

// frozen counts partitions in flight, and those whose head may have been appended. The lock is held.
func (s *Sink) frozen() (busy, unsure int) {
	for _, t := range s.topics {
		for _, p := range t.parts {
			if p.busy {
				busy++
			}
			if p.mayStand() {
				unsure++
			}
		}
	}
	return busy, unsure
}

// mayStand reports whether the head may have been appended without our knowing.
func (p *part) mayStand() bool {
	return !p.quarantine && len(p.q) > 0 && p.q[0].frozen && p.q[0].unsure
}

// unsure puts what may stand into quarantine. The lock is held.
func (s *Sink) unsure() (undrained map[record.TopicPartition]int64, ends map[string][]int64) {
	undrained, ends = map[record.TopicPartition]int64{}, map[string][]int64{}
	for _, t := range s.topics {
		list := make([]int64, len(t.parts))
		for i, p := range t.parts {
			if p.quarantine {
				continue
			}
			list[i] = p.end
			if p.mayStand() {
				undrained[p.tp] = p.end
				p.quarantine, p.undrained = true, true
				s.unlist(p)
			}
		}
		ends[t.name] = list
	}
	return undrained, ends
}

// rename uses a new identity: sequences begin again, and batches that were certainly not appended are sealed anew.
func (s *Sink) rename(producer batch.Producer, undrained map[record.TopicPartition]int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.producer = producer
	for _, t := range s.topics {
		for _, p := range t.parts {
			p.seq, p.used = 0, time.Now()
			if _, ok := undrained[p.tp]; ok || len(p.q) == 0 || !p.q[0].frozen || p.quarantine {
				continue
			}
			if p.q[0].ghost { // certainly not appended; it is sent again from where it is held
				s.dropGhost(p)
				continue
			}
			s.divide(p, p.q[0], 1, p.q[0].plain, nil, func(int, *record.Record) (int, *record.Refusal) { return 0, nil })
		}
	}
}

// resume lets everything be sent again.
func (s *Sink) resume() {
	s.mu.Lock()
	s.pause = running
	for _, t := range s.topics {
		for _, p := range t.parts {
			s.list(p)
		}
	}
	s.mu.Unlock()
	s.Flush()
}
