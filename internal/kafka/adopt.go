package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// N9: a topic or a partition that is seen for the first time gets its end offset into the watermark document, fenced,
// before its first record. Until then its records wait here, encoded and in order; other topics flow.

const (
	adoptEvery   = time.Second // a topic that cannot be adopted is looked at again
	createdWait  = 50 * time.Millisecond
	createdTries = 40
)

// adopter adopts what waits, at once and then every second.
func (s *Sink) adopter(ctx context.Context) error {
	tick := time.NewTicker(adoptEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-s.adopt:
		}
		if err := s.adoptAll(ctx); err != nil && ctx.Err() == nil {
			s.log.Warn("adopting topics; trying again", "error", err)
			_ = retry.Sleep(ctx, adoptEvery/4)
		}
	}
}

// wanted lists the topics that have records, or had some, and no partitions, and those that have grown and are drained.
func (s *Sink) wanted() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	now := time.Now()
	for name, t := range s.topics {
		if now.Before(t.next) {
			continue
		}
		if len(t.parts) == 0 && (len(t.waiting) > 0 || t.parked) || t.grows && t.idle() {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// adoptAll is one round for all topics at once: one request for metadata, one for each leader's offsets, one write.
func (s *Sink) adoptAll(ctx context.Context) error {
	names := s.wanted()
	if len(names) == 0 {
		return nil
	}
	layout, err := s.c.Metadata(ctx, names)
	if err == nil {
		layout, err = s.create(ctx, names, layout)
	}
	if err != nil {
		s.obstruct(names, err)
		return err
	}
	var (
		fresh []record.TopicPartition
		good  []string
	)
	for _, name := range names {
		tl := layout.Topics[name]
		if tl.Err != nil || len(tl.Partitions) == 0 {
			s.obstruct([]string{name}, tl.Err)
			continue
		}
		good = append(good, name)
		for id := s.partitions(name); id < len(tl.Partitions); id++ {
			fresh = append(fresh, record.TopicPartition{Topic: name, Partition: int32(id)})
		}
	}
	if len(good) == 0 {
		return nil
	}
	// Nothing is sent to a topic before all of its ends are known: a successor would read a partition without one from its start.
	ends, _ := s.c.ListOffsets(ctx, layout, fresh)
	fresh = slices.DeleteFunc(fresh, func(tp record.TopicPartition) bool {
		_, known := ends[tp]
		if at := slices.Index(good, tp.Topic); !known && at >= 0 {
			s.obstruct([]string{tp.Topic}, kafkago.LeaderNotAvailable)
			good = slices.Delete(good, at, at+1)
		}
		return !known
	})
	fresh = slices.DeleteFunc(fresh, func(tp record.TopicPartition) bool { return !slices.Contains(good, tp.Topic) })
	if len(good) == 0 {
		return nil
	}
	configs, err := s.c.DescribeTopics(ctx, good)
	if err != nil {
		s.log.Debug("reading the limits of topics", "error", err)
	}
	offsets := map[string][]int64{}
	for _, tp := range fresh {
		set(offsets, tp, ends[tp])
	}
	if len(offsets) > 0 {
		if err := s.claims.Save(ctx, nil, offsets); err != nil { // N9
			return fmt.Errorf("saving the first offsets of topics: %w", err)
		}
	}
	for _, tp := range fresh {
		s.acks.Restore(tp, ends[tp])
	}
	for _, name := range good {
		s.admit(name, layout.Topics[name], configs[name], ends)
	}
	if err != nil {
		s.mu.Lock()
		s.undescribed(good)
		s.mu.Unlock()
	}
	s.Flush()
	return nil
}

// create makes the missing topics, if that is wanted, and waits until they are there.
func (s *Sink) create(ctx context.Context, names []string, layout *Layout) (*Layout, error) {
	how := s.c.cfg.Create
	if how == nil {
		return layout, nil
	}
	var made []string
	for _, name := range names {
		if err := layout.Topics[name].Err; !errors.Is(err, kafkago.UnknownTopicOrPartition) {
			continue
		}
		if err := s.c.CreateTopic(ctx, name, *how); err != nil {
			s.obstruct([]string{name}, err)
			continue
		}
		s.log.Info("topic created", "topic", name, "partitions", how.Partitions, "replication", how.Replication)
		made = append(made, name)
	}
	for range createdTries {
		if len(made) == 0 {
			return layout, nil
		}
		var err error
		if layout, err = s.c.Metadata(ctx, names); err != nil {
			return nil, err
		}
		made = slices.DeleteFunc(made, func(name string) bool {
			t := layout.Topics[name]
			return t.Err == nil && len(t.Partitions) > 0 && !slices.ContainsFunc(t.Partitions, func(p PartitionLayout) bool { return p.Leader < 0 })
		})
		if len(made) > 0 {
			if err := retry.Sleep(ctx, createdWait); err != nil {
				return nil, err
			}
		}
	}
	return layout, nil
}

// obstruct notes why topics cannot be adopted, and says so once.
func (s *Sink) obstruct(names []string, err error) {
	if err == nil {
		err = kafkago.UnknownTopicOrPartition
	}
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		t := s.topics[name]
		t.next = now.Add(adoptEvery * 9 / 10) // the next tick finds it
		why := topicObstacle(name, err, s.c.cfg.Create != nil)
		if why.kind == kindMissing && s.c.cfg.Create != nil && t.why.kind != kindAdopting && !t.why.none() && errors.Is(err, kafkago.UnknownTopicOrPartition) {
			continue // creating it has failed for a reason that says more
		}
		if t.hold(why, now) {
			s.log.Error("records wait for a topic", "topic", name, "reason", why.text, "records", countRecords(t.waiting))
		}
	}
}

func (s *Sink) partitions(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.topics[name].parts)
}

// admit opens a topic: what has waited goes to its partitions, in order, before anything that follows.
func (s *Sink) admit(name string, tl TopicLayout, cfg TopicConfig, ends map[record.TopicPartition]int64) {
	now := time.Now()
	s.mu.Lock()
	t := s.topics[name]
	first := len(t.parts)
	t.had(first)
	t.grow(len(tl.Partitions))
	for _, p := range t.parts[first:] {
		p.end, p.used = ends[p.tp], now
	}
	t.limits(cfg, s.c.cfg.MaxBatchBytes)
	t.stale, t.grows, t.why, t.next = false, false, obstacle{}, time.Time{}
	for _, p := range t.parts {
		s.lead(p, tl.Partitions, now)
	}
	s.log.Info("topic adopted", "topic", name, "partitions", len(t.parts))
	s.distribute(t)
	s.liftTopic(t)
	s.mu.Unlock()
}

// distribute sends a topic's waiting records on to its partitions. The lock is held.
func (s *Sink) distribute(t *topic) {
	waiting := t.waiting
	t.waiting = nil
	for _, b := range waiting {
		err := each(b, func(i int, rec *record.Record) {
			rec.Topic, rec.Partition = t.name, b.parts[i]
			s.forward(t, rec, b.tickets[i])
		})
		if err != nil {
			s.end(fmt.Errorf("%w: reading records that waited for topic %q: %w", ErrBroken, t.name, err))
		}
		s.tickets.put(b.tickets)
		s.discard(b)
	}
	if !s.replay {
		t.forget()
	}
}

// forward is Send for a record that has waited. The lock is held.
func (s *Sink) forward(t *topic, rec *record.Record, k record.Ticket) {
	p, why := t.target(rec)
	if why != nil {
		s.hand([]record.Withdrawn{withdrawn(t, rec, k, why, nil)})
		return
	}
	if s.unreadBefore(p, rec) {
		s.hand([]record.Withdrawn{withdrawn(t, rec, k, nil, record.ErrParked)})
		return
	}

	need, size := sizes(rec)
	s.resolved(1, size) // enqueue counts it again
	if !p.quarantine {
		if tp, at, ok := s.known(p, rec, k.IsSide()); ok {
			s.hit(tp, at, k, size)
			return
		}
	}
	s.enqueue(p, rec, k, size, need, true)
}
