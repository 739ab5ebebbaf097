package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

const (
	idleEvery = 10 * time.Second // N8
	trimEvery = time.Second
)

// Run sends until ctx ends, and then returns nil. It returns ErrFenced if another owner has taken
// over, and ErrBroken or ErrReopen if a new sink has to find out which records arrived. It waits for
// all goroutines that it has started before it returns.
func (s *Sink) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup

	s.mu.Lock()
	s.cancelRun = cancel
	// The sink may have ended since Open.
	if s.ended != nil {
		cancel(s.ended)
	}
	s.loops.start = func(loop *loop) { wg.Go(func() { loop.sendLoop(ctx) }) }
	// Open has made the loops of the leaders that it found.
	for _, l := range s.loops.byID {
		s.loops.start(l)
	}
	s.mu.Unlock()

	s.registerGauges()
	background := []func(context.Context) error{
		s.refresher.runMetadataRefresh, s.opener.runOpener, s.opener.runCreator, s.keeper.runKeeper,
		s.runHousekeeping, s.parker.runParker,
	}
	for _, run := range background {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				s.fail(err)
			}
		})
	}
	retry.Signal(s.opener.wake)
	retry.Signal(s.refresher.wake)
	s.Flush()

	<-ctx.Done()
	s.mu.Lock()
	// No goroutine may be added to wg while Wait runs.
	s.loops.start = nil
	if s.ended == nil {
		s.ended = errClosed
	}
	err := s.ended
	s.mu.Unlock()
	wg.Wait()

	if errors.Is(err, errClosed) {
		return nil
	}
	return fmt.Errorf("kafka sink: %w", err)
}

// runHousekeeping trims memory and moves the stored offsets of idle partitions, until ctx ends.
func (s *Sink) runHousekeeping(ctx context.Context) error {
	trim := time.NewTicker(trimEvery)
	defer trim.Stop()
	idle := time.NewTicker(idleEvery)
	defer idle.Stop()

	var rounds turns
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-trim.C:
			s.batches.chunks.TrimUnused()
		case <-idle.C:
			s.refreshIdleOffsets(ctx, rounds.next(s.refresher.openTopicNames(), topicsInTurn))
		}
	}
}

// refreshIdleOffsets moves the stored offsets of idle partitions of the topics forward (N8). If no record is
// queued or in flight, the next record gets at least the end offset that the leader reports now.
//
// It skips partitions in three cases. During a reread, the read-back has found records below the
// end. In quarantine, the partition was not read yet. If a record was sent during the request, the
// reported end may be above that record. So Idle is called under the lock, before the next record
// can be sent.
func (s *Sink) refreshIdleOffsets(ctx context.Context, topics []string) {
	leaders, enqueued := s.restingPartitions(topics)
	if len(leaders) == 0 {
		return
	}

	ends, err := s.c.kafka.ListOffsets(ctx, leaders)
	if err != nil && ctx.Err() == nil {
		// A leader has failed or moved.
		retry.Signal(s.refresher.wake)
		s.log.Debug("listing offsets of idle partitions failed", "error", err)
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	for tp, end := range ends {
		partition := s.findPartitionLocked(tp)
		if s.isRestingLocked(partition) && partition.enqueued == enqueued[tp] { // N8
			// If a later record is below this end, the topic was deleted and created again.
			partition.ackedEnd = max(partition.ackedEnd, end)
			s.acks.Idle(tp, end)
		}
	}
}

// isRestingLocked reports whether partition has no record of this sink queued or in flight, and no record
// that was not read back.
func (s *Sink) isRestingLocked(partition *partition) bool {
	return !s.rereading && len(partition.queue) == 0 && !partition.busy && !partition.quarantine && !partition.needsReadBack
}

// restingPartitions returns the leaders of the resting partitions of the topics, and the number of records that were
// ever queued for each.
func (s *Sink) restingPartitions(topics []string) (leaders map[record.TopicPartition]int32, enqueued map[record.TopicPartition]uint64) {
	leaders, enqueued = map[record.TopicPartition]int32{}, map[record.TopicPartition]uint64{}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range topics {
		// The topics of a sink are never removed.
		for _, p := range s.topics[name].partitions {
			if s.isRestingLocked(p) && p.loop != nil {
				leaders[p.tp], enqueued[p.tp] = p.leader, p.enqueued
			}
		}
	}
	return leaders, enqueued
}

// Unwritable is a target whose records wait.
type Unwritable struct {
	Topic     string
	Partition int32 // −1: the topic
	Kind      string
	Cause     string // for operators: the event and its target
	Fix       string // "" if it is part of the cause
	Since     time.Time
	// Records is the number of records that wait, and of those that were given back or not taken since the target was parked, at least.
	Records int
	Parked  bool
	// Partitions is the number of partitions that a missing or too small topic needs; 0: any.
	Partitions int
}

// Reason returns the cause and the fix.
func (b Unwritable) Reason() string { return kafkawire.JoinFix(b.Cause, b.Fix) }

// State returns the targets whose records wait, sorted by topic and partition. It leaves out targets
// for which nothing waits, even if they cannot be written. The gauge of the quarantine counts all
// partitions instead.
func (s *Sink) State() []Unwritable {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	var list []Unwritable
	for _, t := range s.topics {
		if n := countRecords(t.waiting) + t.waitingRecords(); n > 0 && !t.obstacle.none() {
			list = append(list, Unwritable{t.name, -1, t.obstacle.kind, t.obstacle.cause, t.obstacle.fix, t.since, n, t.parked, t.neededFor(t.obstacle)})
		}

		for _, p := range t.partitions {
			n := countRecords(p.queue) + p.waitingRecords()
			if n == 0 || p.obstacle.none() {
				continue
			}

			// A short retry is normal operation.
			retrying := p.obstacle.kind == kindUnreachable || p.obstacle.kind == kindRejected
			if retrying && !p.quarantine && !p.parked && now.Sub(p.since) < reportAfter {
				continue
			}
			list = append(list, Unwritable{t.name, p.tp.Partition, p.obstacle.kind, p.obstacle.cause, p.obstacle.fix, p.since, n, p.parked, t.neededFor(p.obstacle)})
		}
	}

	slices.SortFunc(list, func(a, b Unwritable) int {
		if order := strings.Compare(a.Topic, b.Topic); order != 0 {
			return order
		}
		return int(a.Partition - b.Partition)
	})
	return list
}

// neededFor returns the number of partitions that ends the obstacle, or 0 if the obstacle does not depend on the number.
func (t *topic) neededFor(o obstacle) int {
	if o.kind != kindMissing && o.kind != kindTooSmall {
		return 0
	}
	return len(t.partitions)
}

// registerGauges connects the gauges whose values are computed when they are read.
func (s *Sink) registerGauges() {
	metricSet := s.c.cfg.Metrics
	metricSet.InflightRecords.SetSource(func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(s.batches.unresolvedRecords)
	})
	metricSet.InflightBytes.SetSource(func() float64 {
		s.mu.Lock()
		defer s.mu.Unlock()
		return float64(s.batches.unresolvedBytes)
	})
	metricSet.Quarantined.SetSource(func() float64 { return float64(len(s.keeper.session.Quarantined())) })
}
