package fence

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// KeepAlive keeps the state that Kafka has of this owner. The transactional id expires although records
// flow, because plain batches never reach the coordinator. The producer state of partitions without
// records expires too, and with it fencing and the detection of duplicates. The caller calls it every
// Expiry.Every.
//
// idle are the partitions without a batch of the producer id for Expiry.IdleAfter. Each gets a marker. If
// no idle partition is healthy, one of spare gets a marker, to keep the id alive. Only healthy partitions
// get one, one after another, because a marker that cannot be written hangs the id (N4).
//
// A conditional InitProducerID would keep the id alive as well, without touching a partition. It is not
// used while records flow, because it raises the epoch at the coordinator above the epoch that the owner
// sends with. The next barrier of the owner would need the higher epoch, and would fence the owner's own
// batches. An empty transaction does not change the epoch and the sequences.
//
// Errors: ErrSelfMove if a marker is not complete within 5 s, or if the coordinator has forgotten the id. The
// caller then drains, calls NextGeneration, saves Senders and takes over again. errNoHealthy: nothing was
// kept alive, so the caller tries again within minutes. ErrFenced, or the end of ctx. Without idle and spare
// partitions no record was sent, so there is no id to keep.
func (s *Session) KeepAlive(ctx context.Context, idle, spare []record.TopicPartition) error {
	s.txn.Lock()
	defer s.txn.Unlock()
	if err := s.patience().waitForGate(ctx); err != nil {
		return err
	}

	written := false
	for _, tp := range idle {
		ok, err := s.markIfHealthy(ctx, tp)
		if err != nil {
			return err
		}
		written = written || ok
	}
	// One marker is enough to keep the id alive.
	for _, tp := range spare {
		if written {
			return nil
		}
		var err error
		if written, err = s.markIfHealthy(ctx, tp); err != nil {
			return err
		}
	}

	if !written && len(idle)+len(spare) > 0 {
		return fmt.Errorf("keeping transactional id %s alive: %w", s.TransactionalID(), errNoHealthy)
	}
	return nil
}

// markIfHealthy writes a marker into a partition that is healthy now and not quarantined. It reports
// whether it did.
func (s *Session) markIfHealthy(ctx context.Context, tp record.TopicPartition) (bool, error) {
	s.mu.Lock()
	quarantined := s.held[tp] != nil
	s.mu.Unlock()
	if quarantined {
		return false, nil
	}

	// A partition that lacks a replica is one failure away from hanging the id. It still needs its
	// marker before its state expires.
	health, err := s.client.Health(ctx, []string{tp.Topic})
	if err != nil || health.Reason(tp) != healthy {
		return false, context.Cause(ctx)
	}
	// The marker will be at or above the present end, so the read begins there.
	end, err := s.client.kafka.LeaderOffset(ctx, health.layout.LeaderAddr(tp), tp, kafkawire.LogEnd)
	if err != nil {
		return false, context.Cause(ctx)
	}

	err = s.writeOwnMarker(ctx, tp, newTail(end.Offset))
	if errors.Is(err, errRejected) {
		return false, nil
	}
	return err == nil, err
}

// NextGeneration leaves the transactional id for the id of the next generation (N4). Then the caller saves Senders and ends
// the session. It fails if the coordinator does not respond in time.
//
// It calls settle when it has the new id: only from then on must the caller not send any more. settle returns the partitions in
// which a batch of the old producer is not acked. The next takeover keeps those in quarantine until it has read the marker of the
// old id there. ends are the offsets after the last acked record, by topic. Read-backs count the old producer id until the
// stored offsets have passed them.
func (s *Session) NextGeneration(
	ctx context.Context, settle func() (unsettled []record.TopicPartition, ends map[string][]int64, err error),
) (Producer, error) {
	s.txn.Lock()
	defer s.txn.Unlock()
	// The old id serves for records even if the coordinator is away for long.
	patience := s.patience()
	patience.Total = 2 * max(s.in.Own, s.in.Stuck)
	got, generation, err := s.initNextGeneration(ctx, patience)
	if err != nil {
		return Producer{}, err
	}
	unsettled, ends, err := settle()
	if err != nil {
		return Producer{}, err
	}

	// The sender is noted before the move: afterwards, current is the new identity.
	s.mu.Lock()
	left := record.Sender{
		ID:         s.current.ID,
		Epoch:      s.current.Epoch,
		Generation: s.generation,
		Cluster:    s.cluster,
		EndOffsets: cloneOffsets(ends),
		Open:       slices.Clone(unsettled),
	}
	s.mu.Unlock()
	slices.SortFunc(left.Open, comparePartitions)
	s.moveTo(ctx, got, generation)

	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = s.retired.withSender(left)
	return s.current, nil
}
