package fence

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// The patience of one attempt to write a marker. It is repeated a second later.
const (
	oldStuck  = 300 * time.Millisecond
	oldTotal  = 3 * time.Second
	ownTotal  = 5 * time.Second // N4: if a transaction of this owner takes longer, the owner moves to the next id
	retryIdle = time.Second
)

// Retry tries to release partitions from quarantine (N4). The caller calls it every second while
// Quarantined is not empty. It reads the healthy partitions again. Where the marker of an earlier sender
// is missing, it writes that sender's barrier over that partition alone. Released partitions may be
// written to once Senders and their offsets are saved. Some partitions may be released although the call
// returns an error: ErrSelfMove (the barrier of this owner hangs), ErrFenced, or the end of ctx.
func (s *Session) Retry(ctx context.Context) (map[record.TopicPartition]*Tail, error) {
	s.txn.Lock()
	defer s.txn.Unlock()
	released := map[record.TopicPartition]*Tail{}
	waiting := s.quarantinedPartitions()
	if len(waiting) == 0 || s.in.Gate != nil && !s.in.Gate() {
		return released, context.Cause(ctx)
	}

	var topics []string
	for _, tp := range waiting {
		topics = append(topics, tp.Topic)
	}
	health, err := s.client.Health(ctx, slices.Compact(topics))
	if err != nil {
		// The cluster is away. The next call tries again.
		return released, context.Cause(ctx)
	}
	for _, tp := range waiting {
		if why := health.Reason(tp); why != healthy {
			s.setReason(tp, why)
		}
	}

	// The read continues where the last one ended.
	readable := health.Healthy(waiting)
	idle := min(s.in.Idle, retryIdle)
	list, ends := make([]*reading, 0, len(readable)), s.readEnds(ctx, health, readable, idle)
	for _, tp := range readable {
		list = append(list, &reading{TopicPartition: tp, tail: s.heldTail(tp), end: ends[tp]})
	}
	reader := s.newReader()
	reader.idle = idle
	if err := s.readAndRelease(ctx, reader, list, released); err != nil {
		return released, err
	}

	hanging := map[int]bool{}
	for _, p := range list {
		if released[p.TopicPartition] != nil {
			continue
		}
		if err := s.writeBarriers(ctx, p.TopicPartition, hanging); err != nil {
			return released, err
		}
		// writeBarriers has continued the read of this tail.
		if tail := s.releaseIfFenced(&reading{TopicPartition: p.TopicPartition, tail: p.tail}); tail != nil {
			released[p.TopicPartition] = tail
		}
	}
	return released, context.Cause(ctx)
}

func (s *Session) heldTail(tp record.TopicPartition) *Tail {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[tp].tail
}

// setReason notes why a partition is in quarantine.
func (s *Session) setReason(tp record.TopicPartition, reason kafkawire.Obstacle) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[tp].reason = reason
}

// writeBarriers writes the barrier of each sender that is open in tp and whose marker was not read there.
// hanging contains the generations without a response in this call of Retry, so that many partitions do
// not wait for the same id.
func (s *Session) writeBarriers(ctx context.Context, tp record.TopicPartition, hanging map[int]bool) error {
	tail, current, generation := s.heldTail(tp), s.Producer(), s.Generation()
	for _, x := range s.openSenders(tp) {
		above := x.Producer
		if tail.hasMarkersAbove([]Producer{above}) || hanging[x.generation] {
			continue
		}

		var err error
		if x.ID == current.ID && x.generation == generation {
			// The epoch of this owner is above every earlier epoch of its id, and records continue to flow to
			// other partitions.
			err = s.writeOwnMarker(ctx, tp, tail)
			if err != nil && !errors.Is(err, errRejected) {
				return err
			}
		} else {
			err = s.writeOldMarker(ctx, tp, tail, above, x.generation)
			hanging[x.generation] = err != nil
		}

		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err != nil {
			id := s.formatID(x.generation)
			s.setReason(tp, kafkawire.Obstacle{Cause: fmt.Sprintf("the marker of transactional id %s cannot be written: %v", id, err)})
		}
	}
	return nil
}

// writeOldMarker takes the id of an earlier generation, which no process sends with, writes its marker
// into tp and reads it.
func (s *Session) writeOldMarker(
	ctx context.Context, tp record.TopicPartition, tail *Tail, above Producer, generation int,
) error {
	patience := Patience{Stuck: oldStuck, Total: oldTotal, Gate: s.in.Gate}
	s.mu.Lock()
	producer, taken := s.old[generation]
	s.mu.Unlock()
	if !taken {
		var err error
		if producer, err = s.client.Init(ctx, s.formatID(generation), anyEpoch, patience); err != nil {
			return err
		}
		s.noteForgotten(ctx, generation, producer)
		s.mu.Lock()
		s.old[generation] = producer
		s.mu.Unlock()
	}

	rejected, _, err := s.client.Barrier(ctx, s.formatID(generation), producer, []record.TopicPartition{tp}, patience)
	// Another owner has taken the id, or the coordinator has forgotten it. The next attempt takes it again.
	if errors.Is(err, ErrFenced) || errors.Is(err, kafkawire.InvalidProducerIDMapping) {
		s.mu.Lock()
		delete(s.old, generation)
		s.mu.Unlock()
	}
	if err := errors.Join(err, rejected[tp]); err != nil {
		return err
	}
	return s.readMarker(ctx, tp, tail, above, retryIdle)
}

// errRejected means that a partition could not be part of a transaction. The id does not hang.
var errRejected = errors.New("the partition cannot be part of a transaction")

// writeOwnMarker runs an empty transaction of this owner over one partition and reads its marker, within
// the time of In.Own.
func (s *Session) writeOwnMarker(ctx context.Context, tp record.TopicPartition, tail *Tail) error {
	limit, began := s.in.Own, time.Now()
	id, current := s.TransactionalID(), s.Producer()
	patience := Patience{Stuck: limit, Total: limit, Gate: s.in.Gate}
	rejected, _, err := s.client.Barrier(ctx, id, current, []record.TopicPartition{tp}, patience)
	switch {
	case err == nil && rejected[tp] != nil:
		return fmt.Errorf("%w: %w", errRejected, rejected[tp])
	case err == nil:
		// A marker has the epoch of its transaction, so it is above the previous epoch only.
		above := Producer{ID: current.ID, Epoch: current.Epoch - 1}
		// The read gets some time even if the transaction has used all of it.
		err = s.readMarker(ctx, tp, tail, above, max(limit-time.Since(began), limit/5))
	case errors.Is(err, ErrFenced) || errors.Is(err, kafkawire.TransactionalIDAuthorizationFailed):
		return err
	}

	if err == nil || ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return fmt.Errorf("marker of transactional id %s in %s not complete after %s: %w: %w",
		id, formatPartition(tp), time.Since(began).Round(time.Millisecond), ErrSelfMove, err)
}

// readMarker continues to read until a marker above a producer is found.
func (s *Session) readMarker(
	ctx context.Context, tp record.TopicPartition, tail *Tail, above Producer, limit time.Duration,
) error {
	reader := s.newReader()
	reader.idle = limit
	marker := &reading{TopicPartition: tp, tail: tail, await: []Producer{above}}
	if err := reader.readAll(ctx, []*reading{marker}); err != nil {
		return err
	}
	return marker.err
}
