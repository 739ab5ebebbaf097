package sink

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

const (
	quarantineRetry = time.Second // between two attempts to read partitions in quarantine (N4)
	maxSpares       = 8           // candidate partitions, one of which keeps the transactional id alive
	aliveChunk      = 32          // idle partitions that are kept alive in one step, which takes a second or two
	settlePoll      = 5 * time.Millisecond
)

// keeper keeps the sender of the sink alive, and reads partitions in quarantine.
type keeper struct {
	sink     *Sink
	session  *fence.Session
	expiry   fence.Expiry
	readable int // partitions in quarantine that a takeover can release; only runKeeper uses it
}

// runKeeper reads partitions in quarantine and keeps the transactional id and idle partitions alive,
// until ctx ends. It returns ErrReopen if a takeover can release some of these partitions, or if the
// transactional id hangs. It then has moved to the next generation.
func (k *keeper) runKeeper(ctx context.Context) error {
	tick := time.NewTicker(quarantineRetry)
	defer tick.Stop()
	alive := time.NewTicker(max(k.expiry.Every(), time.Second))
	defer alive.Stop()

	var more bool // idle partitions are left
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if err = k.readQuarantine(ctx); err == nil && more {
				more, err = k.keepAlive(ctx)
			}
		case <-alive.C:
			more, err = k.keepAlive(ctx)
		}

		// Moving ends the sink, so it is subject to the same limit as other ends on purpose.
		if errors.Is(err, fence.ErrSelfMove) && k.sink.c.takeReopen(time.Now()) {
			k.sink.log.Warn("cannot end the transaction of this producer; moving to its next transactional id", "error", err)
			reason := err
			if err = k.moveToNextGeneration(ctx); err == nil {
				return fmt.Errorf("%w with its next transactional id: %w", ErrReopen, reason)
			}
		}

		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrFenced), errors.Is(err, ErrReopen):
			return err
		case err != nil:
			k.sink.log.Warn("cannot keep the producer alive; trying again", "error", err)
		}
	}
}

// readQuarantine tries once to fence and read the partitions in quarantine (N4). If that has
// succeeded for some, and this round has added none, it returns ErrReopen: the takeover of the next
// sink reads them with all others, and releases them. That happens at most once in reopenEvery.
//
// Records of earlier senders may be in such a partition although later records of their keys were
// given back. A takeover handles these (N7, N8), so there is no other way out of quarantine.
func (k *keeper) readQuarantine(ctx context.Context) error {
	if len(k.session.Quarantined()) == 0 && k.readable == 0 {
		return nil
	}

	// Some partitions can be read although others have failed.
	tails, err := k.session.Retry(ctx)
	k.readable += len(tails)

	k.sink.mu.Lock()
	left, now := k.session.Quarantined(), time.Now()
	for tp, reason := range left {
		if partition := k.sink.findPartitionLocked(tp); partition != nil {
			partition.setObstacle(partition.topic.quarantineObstacle(reason), now)
		}
	}
	k.sink.mu.Unlock()

	if k.readable > 0 && (len(tails) == 0 || len(left) == 0) && err == nil && k.sink.c.takeReopen(now) {
		return fmt.Errorf("%w: %d partitions in quarantine can be read back", ErrReopen, k.readable)
	}
	return err
}

// findPartitionLocked returns the partition tp, or nil if the sink does not have it.
func (s *Sink) findPartitionLocked(tp record.TopicPartition) *partition {
	if topic := s.topics[tp.Topic]; topic != nil && int(tp.Partition) < len(topic.partitions) {
		return topic.partitions[tp.Partition]
	}
	return nil
}

// keepAlive writes to partitions that Kafka would otherwise expire (H1, H2), at most [aliveChunk] of
// them. Each takes some requests, and the quarantine must be checked in between. It reports whether
// more partitions are left.
func (k *keeper) keepAlive(ctx context.Context) (more bool, err error) {
	idle, spare, more := k.quietPartitions()
	if len(idle)+len(spare) == 0 {
		return false, nil
	}
	return more, k.session.KeepAlive(ctx, idle, spare)
}

// quietPartitions returns the partitions to which this sink has sent no batch for long, and some
// random other partitions. It reports whether there are more quiet partitions.
func (k *keeper) quietPartitions() (idle, spare []record.TopicPartition, more bool) {
	k.sink.mu.Lock()
	defer k.sink.mu.Unlock()
	now, after := time.Now(), k.expiry.IdleAfter()
	for _, t := range k.sink.topics {
		for _, p := range t.partitions {
			switch {
			case p.quarantine:
			case now.Sub(p.lastUsed) >= after && len(idle) == aliveChunk:
				more = true
			case now.Sub(p.lastUsed) >= after:
				idle = append(idle, p.tp)
				// If the partition is not healthy now, it gets another chance before its state expires.
				p.lastUsed = now.Add(-after / 2)
			default:
				spare = append(spare, p.tp)
			}
		}
	}

	rand.Shuffle(len(spare), func(i, j int) { spare[i], spare[j] = spare[j], spare[i] })
	return idle, spare[:min(len(spare), maxSpares)], more
}

// moveToNextGeneration prepares the next sink to use the transactional id of the next generation
// (N4), because the current id hangs.
//
// Records flow until it has the new id. Then it pauses the loops and waits until nothing is in flight. A partition with
// a batch that may still arrive stays open for the old id, so that the next sink reads it up to the old id's marker. If the
// next generation cannot be acquired, the sink continues with the old id.
func (k *keeper) moveToNextGeneration(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			k.setPaused(false)
		}
	}()

	_, err = k.session.NextGeneration(ctx, func() (unsettled []record.TopicPartition, ends map[string][]int64, err error) {
		// A batch that is sent after the partitions in doubt are listed would be missing from the list.
		k.setPaused(true)
		for busy := true; busy; {
			if err := retry.Sleep(ctx, settlePoll); err != nil {
				return nil, nil, err
			}
			busy, unsettled, ends = k.inDoubt()
		}
		return unsettled, ends, nil
	})
	if err != nil {
		return fmt.Errorf("taking the next generation: %w", err)
	}

	// Kafka has given us the new id already. A successor fences only senders that the document lists.
	err = retry.Do(ctx, retry.Reopen, func(ctx context.Context) error {
		return k.sink.claims.SaveSenders(ctx, k.session.Senders(), nil)
	}, func(err error, _ time.Duration) {
		k.sink.log.Warn("cannot save the new sender; trying again", "error", err)
	})
	if err != nil {
		return fmt.Errorf("saving the new sender: %w", err)
	}
	return nil
}

// setPaused stops loops from sending, or lets them continue.
func (k *keeper) setPaused(paused bool) {
	k.sink.mu.Lock()
	k.sink.paused = paused
	k.sink.mu.Unlock()
	k.sink.Flush()
}

// inDoubt reports whether something is in flight. It returns the partitions that may contain an
// unacknowledged batch, and the ends of the acked records.
func (k *keeper) inDoubt() (busy bool, unsettled []record.TopicPartition, ends map[string][]int64) {
	k.sink.mu.Lock()
	defer k.sink.mu.Unlock()
	ends = map[string][]int64{}
	for _, t := range k.sink.topics {
		list := make([]int64, len(t.partitions))
		for i, p := range t.partitions {
			busy = busy || p.busy
			// This sink has sent nothing to a partition in quarantine.
			if p.quarantine {
				continue
			}

			list[i] = p.ackedEnd
			if p.needsReadBack || len(p.queue) > 0 && p.queue[0].maybeAppended {
				unsettled = append(unsettled, p.tp)
			}
		}
		ends[t.name] = list
	}
	return busy, unsettled, ends
}
