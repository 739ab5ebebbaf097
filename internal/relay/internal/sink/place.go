package sink

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

const (
	metadataEvery = 5 * time.Second
	// renewEvery bounds how often responses can force fresh metadata: at most one request in that
	// time, for all causes together.
	renewEvery = 20 * time.Millisecond
	// slowRequest is the time without a response after which the sink checks whether the leader has
	// moved.
	slowRequest   = time.Second
	troubledEvery = slowRequest / 2
	// epochTrustedFor is how long a lower leader epoch is treated as an outdated view of the cluster.
	// After that, the topic must have been deleted and created again.
	epochTrustedFor = 6 * metadataEvery
)

// refresher keeps the layout and the limits of the topics up to date. It has no state of its own
// in addition to its wake channel, and works on the topics of the sink under the sink's lock.
type refresher struct {
	sink *Sink
	wake chan struct{} // one token: fresh metadata is needed
}

// runMetadataRefresh keeps the layout up to date until ctx ends. It reads all topics regularly, many of them in turns, and
// topics in trouble twice a second, and at once when a response shows that the layout is outdated.
// So it finds leaders that move while a request hangs at the old leader, and leaders that come back.
func (r *refresher) runMetadataRefresh(ctx context.Context) error {
	regular := time.NewTicker(metadataEvery)
	defer regular.Stop()
	trouble := time.NewTicker(troubledEvery)
	defer trouble.Stop()

	var rounds turns
	for {
		var names []string
		select {
		case <-ctx.Done():
			return nil
		case <-trouble.C:
			names = r.troubledTopics(time.Now())
		case <-regular.C:
			names = rounds.next(r.openTopicNames(), topicsInTurn)
		case <-r.wake:
			if names = r.troubledTopics(time.Now()); len(names) == 0 {
				names = rounds.next(r.openTopicNames(), topicsInTurn)
			}
		}
		if len(names) == 0 {
			continue
		}

		begin := time.Now()
		layout, err := r.sink.c.kafka.Metadata(ctx, names)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			r.applyLayout(layout)
			if err := r.loadTopicConfigs(ctx); err != nil && ctx.Err() == nil {
				r.sink.log.Debug("reading topic limits failed", "error", err)
			}
		}
		// However many partitions fail at once, their wake-ups share one request.
		_ = retry.Sleep(ctx, max(renewEvery-time.Since(begin), 0))
	}
}

// troubledTopics returns the topics with a partition whose request takes long or has failed, or
// whose records wait for a leader.
func (r *refresher) troubledTopics(now time.Time) []string {
	r.sink.mu.Lock()
	defer r.sink.mu.Unlock()
	var names []string
	for name, t := range r.sink.topics {
		if slices.ContainsFunc(t.partitions, func(partition *partition) bool {
			return partition.tries > 0 || partition.needsLeader() || partition.busy && partition.loop != nil && partition.loop.isLateLocked(now)
		}) {
			names = append(names, name)
		}
	}
	return names
}

// applyLayout moves partitions to the loops of their leaders. If a broker leads a partition no
// longer, its request in flight is interrupted. The same bytes go to the new leader, which
// recognizes them if it has them.
func (r *refresher) applyLayout(layout *kafkawire.Layout) {
	now := time.Now()
	r.sink.mu.Lock()
	defer r.sink.mu.Unlock()
	for name, tl := range layout.Topics {
		topic := r.sink.topics[name]
		if topic == nil || len(topic.partitions) == 0 {
			continue
		}
		if tl.Err != nil {
			r.detachTopicLocked(topic, tl.Err, now)
			continue
		}
		if topic.obstacle.kind == kindMissing || topic.obstacle.kind == kindForbidden {
			topic.obstacle = obstacle{}
		}

		// N9: keys hash to other partitions from now on, so a takeover has to read the old partitions
		// back first. A record that may be in the old partition of its key waits until that one is read. The
		// takeover would put a partition without a leader into quarantine.
		if n := len(topic.partitions); n < len(tl.Partitions) && haveLeaders(tl.Partitions[n:]) && r.sink.c.takeReopen(now) {
			r.sink.failLocked(fmt.Errorf("%w: topic %q has grown from %d to %d partitions",
				ErrReopen, name, n, len(tl.Partitions)))
			return
		}

		for _, p := range topic.partitions {
			r.setLeaderLocked(p, tl.Partitions, now)
		}
	}
	r.forgetDeletedLocked(now)
}

// forgetDeletedLocked ends the sink if many topics were deleted since it was opened, or one was deleted long ago: only a takeover forgets
// topics, and until then the watcher document and each request for metadata contain them. Topics for which records wait are not counted.
func (r *refresher) forgetDeletedLocked(now time.Time) {
	deleted, oldest := 0, now
	for _, topic := range r.sink.topics {
		if topic.isDeletedLocked() {
			deleted++
			if topic.since.Before(oldest) {
				oldest = topic.since
			}
		}
	}

	limits := &r.sink.c.limits
	if deleted == 0 || deleted < limits.deletedTopics && now.Sub(oldest) < limits.deletedFor || !r.sink.c.takeReopen(now) {
		return
	}
	r.sink.failLocked(fmt.Errorf("%w: %d topics that were deleted are forgotten", ErrReopen, deleted))
}

// isDeletedLocked reports whether the topic was deleted after the sink was opened, and no record waits for it. What was missing at the
// takeover is in quarantine.
func (t *topic) isDeletedLocked() bool {
	return t.obstacle.kind == kindMissing && t.isOpen() && !t.parked && len(t.waiting) == 0 &&
		!slices.ContainsFunc(t.partitions, func(partition *partition) bool {
			return partition.loop != nil || len(partition.queue) > 0 || partition.busy || partition.parked || partition.quarantine || partition.needsReadBack
		})
}

// haveLeaders reports whether every partition of list has a leader.
func haveLeaders(list []kafkawire.PartitionLayout) bool {
	return !slices.ContainsFunc(list, func(layout kafkawire.PartitionLayout) bool { return layout.Leader < 0 })
}

// detachTopicLocked removes the partitions of a topic that is missing or forbidden from their loops.
// Its records wait.
func (r *refresher) detachTopicLocked(topic *topic, err error, now time.Time) {
	why := topicObstacle(topic.name, err)
	code, _ := err.(kafkawire.Code) //nolint:errorlint // kafkawire.Layout holds the bare code
	if code == kafkawire.UnknownTopicOrPartition {
		why.cause = fmt.Sprintf("topic %q was deleted, or may not be described", topic.name)
		why.fix = kafkawire.TopicFix(why.kind, topic.name, len(topic.partitions))
	}
	topic.setObstacle(why, now)
	if topic.takeLog(now, createdByHand) {
		r.sink.log.Error("cannot write a topic; its records wait", why.logFields(topic.name)...)
	}

	for _, p := range topic.partitions {
		p.unmarkReadyLocked()
		// A topic that is created again starts with lower leader epochs.
		p.leader, p.loop, p.leaderEpoch = -1, nil, 0
		p.away = p.away || code == kafkawire.UnknownTopicOrPartition
		if !p.quarantine {
			p.setObstacle(why, now)
		}
	}
}

// setLeaderLocked moves partition to the loop of its leader in layout. It ignores a leader epoch that is
// lower than an epoch that another broker has named: a broker that is cut off from the others
// continues to name itself.
func (r *refresher) setLeaderLocked(partition *partition, layout []kafkawire.PartitionLayout, now time.Time) {
	leader := int32(-1)
	gone := int(partition.tp.Partition) >= len(layout)
	if !gone {
		epoch := layout[partition.tp.Partition].Epoch
		if epoch < partition.leaderEpoch && now.Sub(partition.epochSeen) <= epochTrustedFor {
			return
		}
		partition.leaderEpoch, partition.epochSeen = epoch, now
		leader = layout[partition.tp.Partition].Leader
	}

	var to *loop
	if leader >= 0 {
		to = r.sink.loops.findOrAddLoopLocked(leader, partition)
	}

	topic, id := partition.tp.Topic, partition.tp.Partition
	switch {
	case partition.quarantine:
		// The reason of the quarantine explains more than the state of the leader.
	case partition.needsReadBack && to != nil:
		partition.setObstacle(obstacle{kindQuarantined, fmt.Sprintf("a batch may be in partition %d of topic %q, "+
			"which could not be written; a takeover reads it soon", id, topic), ""}, now)
	case gone:
		partition.away = true
		partition.setObstacle(obstacle{
			kindTooSmall, fmt.Sprintf("topic %q no longer has a partition %d", topic, id),
			kafkawire.TopicFix(kindTooSmall, topic, len(partition.topic.partitions)),
		}, now)
	case to == nil:
		partition.setObstacle(obstacle{kindNoLeader, fmt.Sprintf("partition %d of topic %q has no leader", id, topic), "check its brokers"}, now)
	case partition.loop == nil:
		partition.clearObstacle()
	}

	partition.leader = leader
	if partition.loop != to {
		partition.unmarkReadyLocked()
		// The old leader may hold the request until it times out.
		if partition.busy && partition.loop != nil {
			partition.loop.interruptLocked()
		}
		partition.loop = to
		partition.markReadyLocked()
		if partition.ready {
			retry.Signal(to.wake)
		}
	}
	r.sink.parker.unparkLocked(partition)
}

// chooseLoopLocked moves partition to the slow loop of its broker after a request that was rejected late, and
// back after a request that was not. The broker may not lead any longer, so it becomes the last
// candidate for metadata requests. partition must be busy.
func (l *loop) chooseLoopLocked(partition *partition, code kafkawire.Code) {
	partition.slow = code != 0 && (partition.slow || l.lastDuration > slowRequest)
	if partition.slow && l.link != nil {
		l.sink.c.kafka.MarkFailed(l.link.Addr())
	}
	if partition.loop != nil {
		partition.loop = l.sink.loops.findOrAddLoopLocked(partition.leader, partition)
	}
}

// loadTopicConfigs reads the limits of topics where they are unknown or were found wrong. If they may
// not be read, the responses of the brokers decide.
func (r *refresher) loadTopicConfigs(ctx context.Context) error {
	r.sink.mu.Lock()
	var names []string
	for name, t := range r.sink.topics {
		if t.configStale && len(t.partitions) > 0 {
			// Cleared before the request: a loop may find the limit wrong again in the meantime.
			t.configStale = false
			names = append(names, name)
		}
	}
	r.sink.mu.Unlock()

	configs, err := r.sink.c.kafka.DescribeTopics(ctx, names)

	r.sink.mu.Lock()
	defer r.sink.mu.Unlock()
	if err != nil {
		r.markConfigsStaleLocked(names)
	}
	for name, cfg := range configs {
		r.sink.topics[name].setConfig(cfg, r.sink.c.limits.batchBytes)
	}
	return err
}

// markConfigsStaleLocked makes loadTopicConfigs read the limits of topics again after a failure.
func (r *refresher) markConfigsStaleLocked(names []string) {
	for _, name := range names {
		r.sink.topics[name].configStale = true
	}
}

// setConfig applies the configuration of the topic. maxBatchBytes is the largest batch that the
// sink's own configuration allows.
func (t *topic) setConfig(cfg kafkawire.TopicConfig, maxBatchBytes int) {
	t.compacted = cfg.CleanupPolicy == "" || cfg.Compacted()
	t.keepsTimes = cfg.TimestampType == "CreateTime"
	t.maxBytes = cfg.MaxMessageBytes
	t.batchLimit = maxBatchBytes
	if t.maxBytes > 0 {
		t.batchLimit = min(maxBatchBytes, t.maxBytes)
	}
}

// loadLayout reads leaders and limits of the known topics.
func (r *refresher) loadLayout(ctx context.Context) error {
	names := r.openTopicNames()
	if len(names) == 0 {
		return nil
	}
	if err := r.loadTopicConfigs(ctx); err != nil {
		return err
	}

	for part := range slices.Chunk(names, topicsInTurn) {
		layout, err := r.sink.c.kafka.Metadata(ctx, part)
		if err != nil {
			return err
		}
		r.applyLayout(layout)
	}
	return nil
}

// openTopicNames returns the sorted names of the topics with partitions.
func (r *refresher) openTopicNames() []string {
	r.sink.mu.Lock()
	defer r.sink.mu.Unlock()
	var names []string
	for name, t := range r.sink.topics {
		if len(t.partitions) > 0 {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}
