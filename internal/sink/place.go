package sink

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/retry"
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

// runMetadataRefresh keeps the layout up to date until ctx ends. It reads all topics regularly, and
// topics in trouble twice a second, and at once when a response shows that the layout is outdated.
// So it finds leaders that move while a request hangs at the old leader, and leaders that come back.
func (s *Sink) runMetadataRefresh(ctx context.Context) error {
	regular := time.NewTicker(metadataEvery)
	defer regular.Stop()
	trouble := time.NewTicker(troubledEvery)
	defer trouble.Stop()

	for {
		var names []string
		select {
		case <-ctx.Done():
			return nil
		case <-trouble.C:
			names = s.troubledTopics(time.Now())
		case <-regular.C:
			names = s.adoptedTopics()
		case <-s.renewWake:
			if names = s.troubledTopics(time.Now()); len(names) == 0 {
				names = s.adoptedTopics()
			}
		}
		if len(names) == 0 {
			continue
		}

		begin := time.Now()
		layout, err := s.c.kafka.Metadata(ctx, names)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			s.applyLayout(layout)
			if err := s.loadTopicConfigs(ctx); err != nil && ctx.Err() == nil {
				s.log.Debug("reading topic limits failed", "error", err)
			}
		}
		_ = retry.Sleep(ctx, max(renewEvery-time.Since(begin), 0))
	}
}

// troubledTopics returns the topics with a partition whose request takes long or has failed, or
// whose records wait for a leader.
func (s *Sink) troubledTopics(now time.Time) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, t := range s.topics {
		if slices.ContainsFunc(t.partitions, func(p *partition) bool {
			return p.tries > 0 || p.needsLeader() || p.busy && p.lane != nil && p.lane.isLateLocked(now)
		}) {
			names = append(names, name)
		}
	}
	return names
}

// applyLayout moves partitions to the lanes of their leaders. If a broker leads a partition no
// longer, its request in flight is interrupted. The same bytes go to the new leader, which
// recognizes them if it has them.
func (s *Sink) applyLayout(layout *kafkawire.Layout) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, tl := range layout.Topics {
		t := s.topics[name]
		if t == nil || len(t.partitions) == 0 {
			continue
		}
		if tl.Err != nil {
			s.detachTopicLocked(t, tl.Err, now)
			continue
		}
		if t.obstacle.kind == kindMissing || t.obstacle.kind == kindForbidden {
			t.obstacle = obstacle{}
		}

		// N9: the old partitions are drained first, because keys hash to other partitions from now on.
		if from, to := len(t.partitions), len(tl.Partitions); to > from && !t.growing {
			t.growing = true
			text := fmt.Sprintf("topic %q has grown from %d to %d partitions; waiting for its records in flight", name, from, to)
			t.setObstacle(obstacle{kindGrowing, text}, now)
			s.log.Info("topic has grown; waiting for its records in flight before its new partitions are used",
				"topic", name, "from", from, "to", to)
			wake(s.adoptWake)
		}

		for _, p := range t.partitions {
			s.setLeaderLocked(p, tl.Partitions, now)
		}
	}
}

// detachTopicLocked removes the partitions of a topic that is missing or forbidden from their lanes.
// Its records wait.
func (s *Sink) detachTopicLocked(t *topic, err error, now time.Time) {
	why := topicObstacle(t.name, err, false)
	code, _ := err.(kafkawire.Code) //nolint:errorlint // kafkawire.Layout holds the bare code
	if code == kafkawire.UnknownTopicOrPartition {
		why.text = fmt.Sprintf("topic %q was deleted, or may not be described; "+
			"create it again with at least %d partitions, or grant DESCRIBE", t.name, len(t.partitions))
	}
	if t.setObstacle(why, now) {
		s.log.Error("topic cannot be written", "topic", t.name, "reason", why.text)
	}

	for _, p := range t.partitions {
		s.unmarkReadyLocked(p)
		p.leader, p.lane, p.leaderEpoch = -1, nil, 0
		if !p.quarantine {
			p.setObstacle(why, now)
		}
	}
}

// setLeaderLocked moves p to the lane of its leader in layout. It ignores a leader epoch that is
// lower than an epoch that another broker has named: a broker that is cut off from the others
// continues to name itself.
func (s *Sink) setLeaderLocked(p *partition, layout []kafkawire.PartitionLayout, now time.Time) {
	leader := int32(-1)
	gone := int(p.tp.Partition) >= len(layout)
	if !gone {
		epoch := layout[p.tp.Partition].Epoch
		if epoch < p.leaderEpoch && now.Sub(p.epochSeen) <= epochTrustedFor {
			return
		}
		p.leaderEpoch, p.epochSeen = epoch, now
		leader = layout[p.tp.Partition].Leader
	}

	var to *lane
	if leader >= 0 {
		to = s.findOrAddLaneLocked(leader, p)
	}

	topic, id := p.tp.Topic, p.tp.Partition
	switch {
	case p.quarantine:
	case p.needsReadBack && to != nil:
		p.setObstacle(obstacle{kindQuarantined, fmt.Sprintf("a batch may be in partition %d of topic %q, "+
			"which could not be written; a take-over reads it soon", id, topic)}, now)
	case gone:
		p.setObstacle(obstacle{kindMissing, fmt.Sprintf("topic %q no longer has a partition %d; "+
			"add partitions until it has %d", topic, id, len(p.topic.partitions))}, now)
	case to == nil:
		p.setObstacle(obstacle{kindNoLeader, fmt.Sprintf("partition %d of topic %q has no leader; "+
			"check its brokers", id, topic)}, now)
	case p.lane == nil:
		p.clearObstacle()
	}

	p.leader = leader
	if p.lane != to {
		s.unmarkReadyLocked(p)
		if p.busy && p.lane != nil {
			p.lane.interruptLocked()
		}
		p.lane = to
		s.markReadyLocked(p)
		if p.ready {
			wake(to.wake)
		}
	}
	s.unparkLocked(p)
}

// chooseLaneLocked moves p to the slow lane of its broker after a request that was refused late, and
// back after a request that was not. The broker may not lead any longer, so it becomes the last
// candidate for metadata requests. p must be busy.
func (s *Sink) chooseLaneLocked(p *partition, l *lane, code kafkawire.Code) {
	p.slow = code != 0 && (p.slow || l.lastDuration > slowRequest)
	if p.slow && l.link != nil {
		s.c.kafka.MarkFailed(l.link.Addr())
	}
	if p.lane != nil {
		p.lane = s.findOrAddLaneLocked(p.leader, p)
	}
}

// unmarkReadyLocked removes p from the ready list of its lane, if it is in it.
func (s *Sink) unmarkReadyLocked(p *partition) {
	if !p.ready {
		return
	}
	p.ready = false
	if i := slices.Index(p.lane.ready, p); i >= 0 {
		p.lane.ready = slices.Delete(p.lane.ready, i, i+1)
	}
}

// findOrAddLaneLocked returns the lane of p at its leader broker. Slow partitions share one extra
// lane. Kafka responds to a request when all of its partitions are done, so a partition whose
// requests time out would delay all other partitions of the broker.
func (s *Sink) findOrAddLaneLocked(broker int32, p *partition) *lane {
	id := laneID{broker, int(p.tp.Partition) % s.c.cfg.Lanes}
	if p.slow {
		id.index = s.c.cfg.Lanes
	}

	l := s.lanes[id]
	if l == nil {
		l = &lane{id: id, wake: make(chan struct{}, 1)}
		s.lanes[id] = l
		if s.startLane != nil {
			s.startLane(l)
		}
	}
	return l
}

// loadTopicConfigs reads the limits of topics where they are unknown or were found wrong. If they may
// not be read, the responses of the brokers decide.
func (s *Sink) loadTopicConfigs(ctx context.Context) error {
	s.mu.Lock()
	var names []string
	for name, t := range s.topics {
		if t.configStale && len(t.partitions) > 0 {
			t.configStale = false
			names = append(names, name)
		}
	}
	s.mu.Unlock()

	configs, err := s.c.kafka.DescribeTopics(ctx, names)

	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.markConfigsStaleLocked(names)
	}
	for name, cfg := range configs {
		s.topics[name].setConfig(cfg, s.c.cfg.MaxBatchBytes)
	}
	return err
}

// markConfigsStaleLocked makes loadTopicConfigs read the limits of topics again after a failure.
func (s *Sink) markConfigsStaleLocked(names []string) {
	for _, name := range names {
		s.topics[name].configStale = true
	}
}

// setConfig applies the configuration of the topic. maxBatchBytes is the largest batch that the
// sink's own configuration allows.
func (t *topic) setConfig(cfg kafkawire.TopicConfig, maxBatchBytes int) {
	t.compacted = cfg.CleanupPolicy == "" || cfg.Compacted()
	t.maxBytes = cfg.MaxMessageBytes
	t.batchLimit = maxBatchBytes
	if t.maxBytes > 0 {
		t.batchLimit = min(maxBatchBytes, t.maxBytes)
	}
}
