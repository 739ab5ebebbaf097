package kafka

import (
	"context"
	"fmt"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/retry"
)

const (
	metadataEvery = 5 * time.Second
	// renewEvery bounds how often answers can force fresh metadata: one request per that time, whoever asks.
	renewEvery = 20 * time.Millisecond
	// slowRequest is when a request that has no answer makes us look whether the leader has moved.
	slowRequest = time.Second
	lookEvery   = slowRequest / 2
	// staleFor is how long a lower leader epoch is taken for an old view of the cluster. After that the topic must have been
	// deleted and created again.
	staleFor = 6 * metadataEvery
)

// refresh keeps the layout up to date: of all topics regularly, and of those in trouble twice a second, and at once when an
// answer says that it is old. So leaders that move while a request hangs at the old one are found, and those that come back.
func (s *Sink) refresh(ctx context.Context) error {
	regular := time.NewTicker(metadataEvery)
	defer regular.Stop()
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for {
		var names []string
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
			names = s.troubled(time.Now())
		case <-regular.C:
			names = s.names()
		case <-s.renew:
			if names = s.troubled(time.Now()); len(names) == 0 {
				names = s.names()
			}
		}
		if len(names) == 0 {
			continue
		}

		begin := time.Now()
		layout, err := s.c.Metadata(ctx, names)
		if ctx.Err() != nil {
			return nil
		}
		if err == nil {
			s.place(layout)
			if err := s.describe(ctx); err != nil && ctx.Err() == nil {
				s.log.Debug("reading the limits of topics", "error", err)
			}
		}
		_ = retry.Sleep(ctx, max(renewEvery-time.Since(begin), 0))
	}
}

// troubled lists the topics with partitions whose request has been in flight for long or has failed, or whose records wait for a
// leader.
func (s *Sink) troubled(now time.Time) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for name, t := range s.topics {
		if slices.ContainsFunc(t.parts, func(p *part) bool {
			return p.tries > 0 || p.stranded() || p.busy && p.lane != nil && p.lane.late(now)
		}) {
			names = append(names, name)
		}
	}
	return names
}

// place moves partitions to the lanes of their leaders. A request that is in flight to a broker which leads one of its
// partitions no more is cut: the same bytes go to the new leader, which recognises them if it has them.
func (s *Sink) place(layout *Layout) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, tl := range layout.Topics {
		t := s.topics[name]
		if t == nil || len(t.parts) == 0 {
			continue
		}
		if tl.Err != nil {
			s.away(t, tl.Err, now)
			continue
		}
		if t.why.kind == kindMissing || t.why.kind == kindForbidden {
			t.why = obstacle{}
		}
		if len(tl.Partitions) > len(t.parts) && !t.grows {
			t.grows = true // N9: drained first, because keys go to other partitions from now on
			t.hold(obstacle{kindGrowing, fmt.Sprintf("topic %q grew from %d to %d partitions; its records in flight are awaited", name, len(t.parts), len(tl.Partitions))}, now)
			s.log.Info("a topic has grown; what is in flight to it is awaited before the new partitions are used", "topic", name, "from", len(t.parts), "to", len(tl.Partitions))
			wake(s.adopt)
		}
		for _, p := range t.parts {
			s.lead(p, tl.Partitions, now)
		}
	}
}

// away takes a topic that is gone, or forbidden, out of its lanes. Records wait; nothing crashes.
func (s *Sink) away(t *topic, err error, now time.Time) {
	why := topicObstacle(t.name, err, false)
	if code, _ := err.(kafkago.Error); code == kafkago.UnknownTopicOrPartition { //nolint:errorlint // Layout holds the bare code
		why.text = fmt.Sprintf("topic %q was deleted, or may not be described; create it again with at least %d partitions, or grant DESCRIBE", t.name, len(t.parts))
	}
	if t.hold(why, now) {
		s.log.Error("a topic cannot be written", "topic", t.name, "reason", why.text)
	}
	for _, p := range t.parts {
		s.unlist(p)
		p.leader, p.lane, p.epoch = -1, nil, 0
		if !p.quarantine {
			p.hold(why, now)
		}
	}
}

// lead moves one partition. It ignores a broker that names an earlier leader than another broker has named: one that is cut
// off from the others goes on naming itself.
func (s *Sink) lead(p *part, now []PartitionLayout, at time.Time) {
	leader := int32(-1)
	gone := int(p.tp.Partition) >= len(now)
	if !gone {
		if epoch := now[p.tp.Partition].Epoch; epoch >= p.epoch || at.Sub(p.named) > staleFor {
			p.epoch, p.named = epoch, at
		} else {
			return
		}
		leader = now[p.tp.Partition].Leader
	}
	var to *lane
	if leader >= 0 {
		to = s.lane(leader, p)
	}
	switch {
	case p.quarantine:
	case p.unread && to != nil:
		p.hold(obstacle{kindQuarantined, fmt.Sprintf("a batch may be in partition %d of topic %q, which could not be written; a take-over reads it soon", p.tp.Partition, p.tp.Topic)}, at)
	case gone:
		p.hold(obstacle{kindMissing, fmt.Sprintf("topic %q has no partition %d any more; add partitions until it has %d", p.tp.Topic, p.tp.Partition, len(p.t.parts))}, at)
	case to == nil:
		p.hold(obstacle{kindNoLeader, fmt.Sprintf("partition %d of topic %q has no leader; look at its brokers", p.tp.Partition, p.tp.Topic)}, at)
	case p.lane == nil:
		p.moves()
	}
	p.leader = leader
	if p.lane != to {
		s.unlist(p)
		if p.busy && p.lane != nil {
			p.lane.interrupt()
		}
		p.lane = to
		s.list(p)
		if p.listed {
			wake(to.wake)
		}
	}
	s.lift(p)
}

// pace moves a partition to the lane of slow ones of its broker after a request that was refused late, and back after one that was
// not. The broker may not lead any more: it comes last when metadata are asked for. The lock is held, and the partition is busy.
func (s *Sink) pace(p *part, l *lane, code kafkago.Error) {
	p.slow = code != 0 && (p.slow || l.took > slowRequest)
	if p.slow && l.link != nil {
		s.c.links.doubt(l.link.addr)
	}
	if p.lane != nil {
		p.lane = s.lane(p.leader, p)
	}
}

func (s *Sink) unlist(p *part) {
	if !p.listed {
		return
	}
	p.listed = false
	if i := slices.Index(p.lane.ready, p); i >= 0 {
		p.lane.ready = slices.Delete(p.lane.ready, i, i+1)
	}
}

// lane finds or begins the lane of a partition. Slow partitions share one beside the others: Kafka replies to a request when all
// of its partitions are done, so a partition that waits out the time of each request would hold back all others of its broker.
func (s *Sink) lane(broker int32, p *part) *lane {
	id := laneID{broker, int(p.tp.Partition) % s.c.cfg.Lanes}
	if p.slow {
		id.index = s.c.cfg.Lanes
	}
	l := s.lanes[id]
	if l == nil {
		l = &lane{id: id, wake: make(chan struct{}, 1)}
		s.lanes[id] = l
		if s.start != nil {
			s.start(l)
		}
	}
	return l
}

// describe reads max.message.bytes of topics where it is unknown or was found wrong. Where it may not be read, the broker's
// answers decide.
func (s *Sink) describe(ctx context.Context) error {
	s.mu.Lock()
	var names []string
	for name, t := range s.topics {
		if t.stale && len(t.parts) > 0 {
			t.stale = false
			names = append(names, name)
		}
	}
	s.mu.Unlock()
	got, err := s.c.DescribeTopics(ctx, names)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.undescribed(names)
	}
	for name, cfg := range got {
		s.topics[name].limits(cfg, s.c.cfg.MaxBatchBytes)
	}
	return err
}

// undescribed has the limits of topics read again after an attempt that failed. The lock is held.
func (s *Sink) undescribed(names []string) {
	for _, name := range names {
		s.topics[name].stale = true
	}
}

func (t *topic) limits(cfg TopicConfig, most int) {
	t.compacted = cfg.CleanupPolicy == "" || cfg.Compacted()
	t.max = cfg.MaxMessageBytes
	t.limit = most
	if t.max > 0 {
		t.limit = min(most, t.max)
	}
}
