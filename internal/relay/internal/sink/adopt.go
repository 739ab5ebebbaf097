package sink

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
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
	// createAtOnce bounds the topics of one request: a controller accepts at most 10,000 changes at a time, and each
	// partition is one.
	createAtOnce = 100
)

// adopter adopts new topics, and creates missing ones. It works on the topics of the sink under the sink's lock.
type adopter struct {
	sink    *Sink
	create  *kafkawire.TopicCreate // the options of missing topics; nil: they are not created
	wake    chan struct{}          // one token: a topic waits for adoption
	missing chan struct{}          // one token: a topic has to be created
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
	if err := a.sink.claims.SaveSenders(ctx, nil, offsets); err != nil {
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

	a.sink.mu.Lock()
	topic := a.sink.topics[name]
	// The topic may have been missing until now. It has been leaderless only since it exists.
	if topic.obstacle.kind != kindNoLeader {
		topic.leaderlessSince = time.Now()
	}
	lasting := time.Since(topic.leaderlessSince) >= a.sink.parker.parkAfter
	a.sink.mu.Unlock()

	a.noteObstacle([]string{name}, kafkawire.LeaderNotAvailable)
	return known > 0 && lasting
}

// runCreator creates missing topics, if so configured, until ctx ends. It is apart from the adoption, because topics that exist
// must not wait for a slow controller.
func (a *adopter) runCreator(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.missing:
		}

		for names := a.takeMissing(); len(names) > 0 && ctx.Err() == nil; names = a.takeMissing() {
			a.createTopics(ctx, names)
		}
	}
}

// takeMissing returns some topics that were found missing since their last attempt, in random order: topics that
// cannot be created must not hold up the others for good.
func (a *adopter) takeMissing() (names []string) {
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	for name, t := range a.sink.topics {
		if t.missing && len(names) < createAtOnce {
			t.missing = false
			names = append(names, name)
		}
	}
	return names
}

// orDefault returns n for the log, or a text if the brokers choose the number.
func orDefault[N ~int | ~int16 | ~int32](n N) any {
	if n <= 0 {
		return "default of the brokers"
	}
	return n
}

// createTopics creates topics, and waits for a moment until they are adopted.
func (a *adopter) createTopics(ctx context.Context, names []string) {
	rejected, err := a.sink.c.kafka.CreateTopics(ctx, names, *a.create)
	if err != nil {
		a.noteObstacle(names, err)
		if ctx.Err() == nil {
			a.sink.log.Warn("creating topics failed; retrying", "topics", len(names), "error", err)
		}
		return
	}

	created := names[:0]
	for _, name := range names {
		if why := rejected[name]; why != nil {
			a.noteObstacle([]string{name}, why)
			continue
		}
		a.sink.log.Info("topic is created",
			"topic", name, "partitions", orDefault(a.create.Partitions), "replication", orDefault(a.create.Replication))
		created = append(created, name)
	}

	// Other brokers may not have the topic yet, and its partitions may have no leader.
	for range createdTries {
		if !a.adoptSoon(created) || retry.Sleep(ctx, createdPoll) != nil {
			return
		}
	}

	// Another client may have deleted it.
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	for _, name := range created {
		if topic := a.sink.topics[name]; !topic.isAdopted() && topic.obstacle.kind == kindAdopting {
			topic.setObstacle(topicObstacle(name, kafkawire.UnknownTopicOrPartition, true), time.Now())
		}
	}
}

// adoptSoon requests another attempt at the topics that are not adopted, and reports whether there are any.
func (a *adopter) adoptSoon(names []string) (left bool) {
	a.sink.mu.Lock()
	defer a.sink.mu.Unlock()
	for _, name := range names {
		if topic := a.sink.topics[name]; !topic.isAdopted() {
			topic.nextAttempt, left = time.Time{}, true
		}
	}
	if left {
		retry.Signal(a.wake)
	}
	return left
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
		topic := a.sink.topics[name]
		// The time is below adoptEvery, so that the next tick finds the topic.
		topic.nextAttempt = now.Add(adoptEvery * 9 / 10)

		// If creating the topic has failed before, that reason explains more than the missing topic.
		if creates && errors.Is(err, kafkawire.UnknownTopicOrPartition) {
			topic.missing = true
			retry.Signal(a.missing)
			continue
		}

		why := topicObstacle(name, err, creates)
		topic.setObstacle(why, now)
		// A request that fails for all topics is logged by its caller.
		if why.kind != kindUnreachable && topic.shouldLog(now, creates) {
			a.sink.log.Error("records wait for a topic", "topic", name, "error", why.text, "records", countRecords(topic.waiting))
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
	topic := a.sink.topics[name]
	topic.addPartitions(len(tl.Partitions))
	for _, p := range topic.partitions {
		p.ackedEnd, p.lastUsed = ends[p.tp], now
	}

	topic.setConfig(cfg, a.sink.c.limits.batchBytes)
	topic.configStale, topic.missing, topic.obstacle, topic.nextAttempt = false, false, obstacle{}, time.Time{}
	for _, p := range topic.partitions {
		if _, known := ends[p.tp]; !known {
			a.quarantineLocked(p, now)
		}
		a.sink.refresher.setLeaderLocked(p, tl.Partitions, now)
	}

	a.sink.log.Info("topic is adopted", "topic", name, "partitions", len(topic.partitions))
	// Still under the lock, so that no later Send overtakes the records that have waited.
	a.sink.resendWaitingLocked(topic)
	a.sink.parker.unparkTopicLocked(topic)
}

// quarantineLocked puts a partition into quarantine whose end is unknown. The keeper reads it when it has a
// leader, and then ends the sink, because only a takeover releases a partition.
func (a *adopter) quarantineLocked(partition *partition, now time.Time) {
	reason := fmt.Sprintf("partition %d of topic %q had no leader when the topic was adopted; check its brokers",
		partition.tp.Partition, partition.tp.Topic)
	partition.quarantine = true
	partition.setObstacle(obstacle{kindQuarantined, reason}, now)
	a.sink.keeper.session.Hold(partition.tp, reason)
	a.sink.log.Warn("partition is in quarantine; its records are sent when it can be read",
		"topic", partition.tp.Topic, "partition", partition.tp.Partition, "error", reason)
}

// resendWaitingLocked sends the records that have waited for topic to its partitions.
func (s *Sink) resendWaitingLocked(topic *topic) {
	waiting := topic.waiting
	topic.waiting = nil
	for _, b := range waiting {
		err := forEachRecord(b, func(i int, rec *record.Record) {
			rec.Topic, rec.Partition = topic.name, b.wantedPartitions[i]
			s.resendLocked(topic, rec, b.tickets[i])
		})
		if err != nil {
			s.failLocked(fmt.Errorf("%w: decoding records that waited for topic %q: %w", ErrBroken, topic.name, err))
		}
		s.batches.releaseBatchLocked(b)
	}
}

// resendLocked is Send for a record that has waited for its topic. No earlier owner has used a topic
// that had no stored offsets, so the record is not looked up. If it cannot be sent, it is given back to
// the Holder.
func (s *Sink) resendLocked(topic *topic, rec *record.Record, ticket record.Ticket) {
	partition, rejection := topic.choosePartitionLocked(rec)
	if rejection != nil {
		s.parker.withdrawLocked([]record.Withdrawn{newWithdrawn(topic, rec, nil, ticket, rejection, nil)})
		return
	}

	need, size := recordSizes(rec)
	s.enqueueLocked(partition, rec, ticket, size, need, false)
}
