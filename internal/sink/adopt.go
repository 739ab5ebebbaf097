package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/retry"
)

// N9: before the first record is sent to a new topic, the end offsets of its partitions are stored in
// the watcher document, in a fenced write. Until then its records wait here, encoded and in order. Other
// topics flow.
//
// The end of a partition without a leader is unknown. If that lasts, the topic is adopted without it: the
// stored offset of the partition is 0, and the partition is in quarantine until a takeover has read it.

const (
	adoptEvery   = time.Second // between two attempts to adopt a topic
	createdPoll  = 50 * time.Millisecond
	createdTries = 40
)

// adopter adopts new topics. It works on the topics of the sink under the sink's lock.
type adopter struct {
	sink   *Sink
	create *kafkawire.TopicCreate // the options of missing topics; nil: they are not created
	wake   chan struct{}          // one token: a topic waits for adoption
}

// runAdopter adopts topics whose records wait, when it is woken and every second, until ctx ends.
func (a *adopter) runAdopter(ctx context.Context) error {
	tick := time.NewTicker(adoptEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-a.wake:
		}

		if err := a.adoptTopics(ctx); err != nil && ctx.Err() == nil {
			a.sink.log.Warn("adopting topics failed; retrying", "error", err)
			// Each new topic wakes the adopter. This pause keeps a series of new topics from becoming a
			// series of failing requests.
			_ = retry.Sleep(ctx, adoptEvery/4)
		}
	}
}

// topicsToAdopt returns the topics without partitions that have or had records.
func (a *adopter) topicsToAdopt() []string {
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	var names []string
	now := time.Now()
	for name, t := range a.sink.topics {
		if now.Before(t.nextAttempt) {
			continue
		}

		// Send keeps no more records for a parked topic, and only its adoption shows that it can be
		// written again.
		if !t.isAdopted() && (len(t.waiting) > 0 || t.parked) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// adoptTopics adopts all topics that wait for it, together: one metadata request, one request for
// offsets to each leader, one write. Topics that cannot be adopted get an obstacle. The error is that
// of a request that all topics need.
func (a *adopter) adoptTopics(ctx context.Context) error {
	names := a.topicsToAdopt()
	if len(names) == 0 {
		return nil
	}

	layout, err := a.sink.c.kafka.Metadata(ctx, names)
	if err == nil {
		layout, err = a.createMissing(ctx, names, layout)
	}
	if err != nil {
		a.noteObstacle(names, err)
		return err
	}

	var good []string
	leaders := map[record.TopicPartition]int32{}
	for _, name := range names {
		tl := layout.Topics[name]
		if tl.Err != nil || len(tl.Partitions) == 0 {
			a.noteObstacle([]string{name}, tl.Err)
			continue
		}
		good = append(good, name)
		for id, p := range tl.Partitions {
			if p.Leader >= 0 {
				leaders[record.TopicPartition{Topic: name, Partition: int32(id)}] = p.Leader
			}
		}
	}
	if len(good) == 0 {
		return nil
	}

	ends, _ := a.sink.c.kafka.ListOffsets(ctx, leaders)
	good = slices.DeleteFunc(good, func(name string) bool {
		return !a.mayOpen(name, len(layout.Topics[name].Partitions), ends)
	})
	if len(good) == 0 {
		return nil
	}

	// Without its configuration, a topic counts as compacted (N10), and the responses of the brokers
	// show the largest batch.
	configs, configErr := a.sink.c.kafka.DescribeTopics(ctx, good)
	if configErr != nil {
		a.sink.log.Debug("reading topic limits failed", "error", configErr)
	}

	// N9: the offsets are stored before the first record is sent. An unknown end is stored as 0, so that a
	// later owner reads the whole partition.
	offsets := map[string][]int64{}
	for _, name := range good {
		for id := range layout.Topics[name].Partitions {
			tp := record.TopicPartition{Topic: name, Partition: int32(id)}
			setOffset(offsets, tp, ends[tp])
		}
	}
	if err := a.sink.claims.Save(ctx, nil, offsets); err != nil {
		return fmt.Errorf("saving the first offsets of topics: %w", err)
	}

	for _, name := range good {
		for id, end := range offsets[name] {
			a.sink.acks.Restore(record.TopicPartition{Topic: name, Partition: int32(id)}, end)
		}
		a.openTopic(name, layout.Topics[name], configs[name], ends)
	}
	// openTopic has cleared the mark.
	if configErr != nil {
		a.sink.mu.Lock()
		a.sink.refresher.markConfigsStaleLocked(good)
		a.sink.mu.Unlock()
	}
	a.sink.Flush()
	return nil
}

// mayOpen reports whether the topic can be adopted with the known ends of its partitions. Otherwise it notes
// the obstacle. Most partitions that have no leader get one within seconds, and then need no takeover.
func (a *adopter) mayOpen(name string, partitions int, ends map[record.TopicPartition]int64) bool {
	known := 0
	for id := range partitions {
		if _, ok := ends[record.TopicPartition{Topic: name, Partition: int32(id)}]; ok {
			known++
		}
	}
	if known == partitions {
		return true
	}

	a.noteObstacle([]string{name}, kafkawire.LeaderNotAvailable)
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	t := a.sink.topics[name]
	return known > 0 && time.Since(t.unwritableSince) >= a.sink.parker.parkAfter
}

// createMissing creates the missing topics, if so configured, and waits until all of their partitions
// have leaders. It returns the new layout.
func (a *adopter) createMissing(
	ctx context.Context, names []string, layout *kafkawire.Layout,
) (*kafkawire.Layout, error) {
	options := a.create
	if options == nil {
		return layout, nil
	}

	var created []string
	for _, name := range names {
		if err := layout.Topics[name].Err; !errors.Is(err, kafkawire.UnknownTopicOrPartition) {
			continue
		}
		if err := a.sink.c.kafka.CreateTopic(ctx, name, *options); err != nil {
			a.noteObstacle([]string{name}, err)
			continue
		}
		a.sink.log.Info("topic is created",
			"topic", name, "partitions", options.Partitions, "replication", options.Replication)
		created = append(created, name)
	}

	// After the response to CreateTopics, other brokers may not have the topic yet, and its partitions
	// may have no leader.
	for range createdTries {
		if len(created) == 0 {
			return layout, nil
		}

		var err error
		if layout, err = a.sink.c.kafka.Metadata(ctx, names); err != nil {
			return nil, err
		}
		hasNoLeader := func(p kafkawire.PartitionLayout) bool { return p.Leader < 0 }
		created = slices.DeleteFunc(created, func(name string) bool {
			t := layout.Topics[name]
			return t.Err == nil && len(t.Partitions) > 0 && !slices.ContainsFunc(t.Partitions, hasNoLeader)
		})

		if len(created) > 0 {
			if err := retry.Sleep(ctx, createdPoll); err != nil {
				return nil, err
			}
		}
	}
	return layout, nil
}

// noteObstacle notes why topics cannot be adopted, and logs the reason when it changes. A nil err
// means that the topics do not exist.
func (a *adopter) noteObstacle(names []string, err error) {
	if err == nil {
		err = kafkawire.UnknownTopicOrPartition
	}

	now := time.Now()
	creates := a.create != nil
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	for _, name := range names {
		t := a.sink.topics[name]
		// The time is below adoptEvery, so that the next tick finds the topic.
		t.nextAttempt = now.Add(adoptEvery * 9 / 10)

		// If creating the topic has failed, that reason explains more than the missing topic.
		why := topicObstacle(name, err, creates)
		creationFailed := creates && t.obstacle.kind != kindAdopting && !t.obstacle.none()
		if creationFailed && why.kind == kindMissing && errors.Is(err, kafkawire.UnknownTopicOrPartition) {
			continue
		}

		t.setObstacle(why, now)
		// A request that fails for all topics is logged by its caller.
		if why.kind != kindUnreachable && t.shouldLog(now, creates) {
			a.sink.log.Error("records wait for a topic", "topic", name, "reason", why.text, "records", countRecords(t.waiting))
		}
	}
}

// openTopic opens a topic. The records that have waited go to its partitions, in order, before any
// record that follows.
func (a *adopter) openTopic(
	name string, tl kafkawire.TopicLayout, cfg kafkawire.TopicConfig, ends map[record.TopicPartition]int64,
) {
	now := time.Now()
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	t := a.sink.topics[name]
	t.addPartitions(len(tl.Partitions))
	for _, p := range t.partitions {
		p.ackedEnd, p.lastUsed = ends[p.tp], now
	}

	t.setConfig(cfg, a.sink.c.limits.batchBytes)
	t.configStale, t.obstacle, t.nextAttempt = false, obstacle{}, time.Time{}
	for _, p := range t.partitions {
		if _, known := ends[p.tp]; !known {
			a.quarantineLocked(p, now)
		}
		a.sink.refresher.setLeaderLocked(p, tl.Partitions, now)
	}

	a.sink.log.Info("topic is adopted", "topic", name, "partitions", len(t.partitions))
	// Still under the lock, so that no later Send overtakes the records that have waited.
	a.sink.resendWaitingLocked(t)
	a.sink.parker.unparkTopicLocked(t)
}

// quarantineLocked puts a partition into quarantine whose end is unknown. The keeper reads it when it has a
// leader, and then ends the sink, because only a takeover releases a partition.
func (a *adopter) quarantineLocked(p *partition, now time.Time) {
	reason := fmt.Sprintf("partition %d of topic %q had no leader when the topic was adopted; check its brokers",
		p.tp.Partition, p.tp.Topic)
	p.quarantine = true
	p.setObstacle(obstacle{kindQuarantined, reason}, now)
	a.sink.keeper.session.Hold(p.tp, reason)
	a.sink.log.Warn("partition is in quarantine; its records are sent when it can be read",
		"topic", p.tp.Topic, "partition", p.tp.Partition, "reason", reason)
}

// resendWaitingLocked sends the records that have waited for t to its partitions.
func (s *Sink) resendWaitingLocked(t *topic) {
	waiting := t.waiting
	t.waiting = nil
	for _, b := range waiting {
		err := forEachRecord(b, func(i int, rec *record.Record) {
			rec.Topic, rec.Partition = t.name, b.wantedPartitions[i]
			s.resendLocked(t, rec, b.tickets[i])
		})
		if err != nil {
			s.failLocked(fmt.Errorf("%w: decoding records that waited for topic %q: %w", ErrBroken, t.name, err))
		}
		s.batches.releaseBatchLocked(b)
	}
}

// resendLocked is Send for a record that has waited for its topic. No earlier owner has used a topic
// that had no stored offsets, so the record is not looked up. If it cannot be sent, it is given back to
// the Holder.
func (s *Sink) resendLocked(t *topic, rec *record.Record, k record.Ticket) {
	p, refusal := t.choosePartitionLocked(rec)
	if refusal != nil {
		s.parker.withdrawLocked([]record.Withdrawn{newWithdrawn(t, rec, k, refusal, nil)})
		return
	}

	need, size := recordSizes(rec)
	s.enqueueLocked(p, rec, k, size, need, false)
}
