package fence

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/record"
)

// KeepAlive keeps what Kafka remembers of us: the transactional id, which expires although data flows (plain batches never
// reach the coordinator), and the producer state of partitions without traffic, where fencing and duplicate detection
// lapse. To be called every Expiry.Every.
//
// idle are the partitions without a batch of our producer id for Expiry.IdleAfter: each gets a marker. spare are
// partitions of which one will do if no idle one is healthy, to keep the id alive. Only healthy partitions are touched, one
// after the other, since a marker that cannot be written hangs the id (N4).
//
// A conditional InitProducerID would keep the id alive as well, and touch no partition. It is not used while data flows:
// it raises the coordinator's epoch above the one that is being sent with, so the next barrier of ours (of a quarantined
// or an idle partition) would have to carry the higher epoch and would fence our own batches there. An empty transaction
// leaves epoch and sequences alone.
//
// Errors: ErrSelfMove when a marker is not complete within 5 s, or the coordinator has forgotten the id, or its epoch nears
// the end: the caller drains, calls NextGeneration, saves Senders and takes over anew. ErrNoHealthy: nothing was kept alive, ask
// again within minutes. ErrFenced; ctx's end. With neither idle nor spare partitions there is nothing to keep: nothing was
// sent.
func (s *Session) KeepAlive(ctx context.Context, idle, spare []record.TopicPartition) error {
	s.txn.Lock()
	defer s.txn.Unlock()
	if err := s.pat().open(ctx); err != nil {
		return err
	}
	current := s.Producer()
	if current.Epoch >= s.in.epochs {
		return fmt.Errorf("epoch %d of transactional id %s nears its end: %w", current.Epoch, s.TransactionalID(), ErrSelfMove)
	}
	done := false
	for _, tp := range idle {
		ok, err := s.touch(ctx, tp)
		if err != nil {
			return err
		}
		done = done || ok
	}
	for _, tp := range spare {
		if done {
			return nil
		}
		var err error
		if done, err = s.touch(ctx, tp); err != nil {
			return err
		}
	}
	if !done && len(idle)+len(spare) > 0 {
		return fmt.Errorf("keeping transactional id %s alive: %w", s.TransactionalID(), ErrNoHealthy)
	}
	return nil
}

// touch writes a marker into a partition, if that is healthy at this moment and not quarantined.
func (s *Session) touch(ctx context.Context, tp record.TopicPartition) (bool, error) {
	s.mu.Lock()
	quarantined := s.held[tp] != nil
	s.mu.Unlock()
	if quarantined {
		return false, nil
	}
	h, err := s.c.Health(ctx, []string{tp.Topic})
	if err != nil || h.Reason(tp) != "" {
		return false, context.Cause(ctx)
	}
	// A partition that is short of a replica is one failure away from hanging the id, but it needs its marker all the same
	// before its state expires.
	end, err := s.c.offset(ctx, h.Partitions[tp].Leader, tp, last)
	if err != nil {
		return false, context.Cause(ctx)
	}
	err = s.complete(ctx, tp, newTail(end), s.in.Own)
	if errors.Is(err, errRefused) {
		return false, nil
	}
	return err == nil, err
}

// NextGeneration leaves the transactional id for the one of the next generation (the self-move of N4). The caller has
// stopped sending for good: it saves Senders, and ends the session. Every batch sent with the old producer is acked, except in the
// partitions of unsure: the next take-over keeps them in quarantine until the old id's marker was read there. ends are the offsets
// after the last acked record by topic: the old producer id counts in read-backs until the stored offsets have passed them.
func (s *Session) NextGeneration(ctx context.Context, unsure []record.TopicPartition, ends map[string][]int64) (Producer, error) {
	s.txn.Lock()
	defer s.txn.Unlock()
	s.mu.Lock()
	left := record.Sender{ID: s.current.ID, Epoch: s.current.Epoch, Generation: s.generation, EndOffsets: cloneUntil(ends), Open: slices.Clone(unsure)}
	s.mu.Unlock()
	slices.SortFunc(left.Open, compareTP)
	if err := s.nextGeneration(ctx); err != nil {
		return Producer{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = s.retired.add(left)
	return s.current, nil
}
