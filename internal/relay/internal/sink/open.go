package sink

import (
	"cmp"
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
// The end of a partition without a leader is unknown. If that lasts, the topic is opened without it: the
// stored offset of the partition is 0, and the partition is in quarantine until a takeover has read it.

const (
	openEvery   = time.Second // between two attempts to open a topic
	createdPoll = 50 * time.Millisecond
	createdFor  = 2 * time.Second
	// createAtOnce bounds the topics of one request: a controller accepts at most 10,000 changes at a time, and each
	// partition is one.
	createAtOnce = 100
)

// opener opens new topics, and creates missing ones. It works on the topics of the sink under the sink's lock.
type opener struct {
	sink       *Sink
	create     *kafkawire.TopicCreate // the options of missing topics; nil: they are not created
	createdFor time.Duration          // a topic that was created is tried every createdPoll for this time
	pollUntil  time.Time              // the end of that time for the last topic
	wake       chan struct{}          // one token: a topic waits to be opened
	missing    chan struct{}          // one token: a topic has to be created
}

// creation returns how missing topics are created.
func (o *opener) creation() creation { return creation(o.create != nil) }

// runOpener opens topics whose records wait, when it is woken and every pollInterval, until ctx ends.
func (o *opener) runOpener(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(o.pollInterval()):
		case <-o.wake:
		}

		if err := o.openTopics(ctx); err != nil && ctx.Err() == nil {
			o.sink.log.Warn("cannot open topics; trying again", "error", err)
			// Each new topic wakes the opener. This pause keeps a series of new topics from becoming a
			// series of failing requests.
			_ = retry.Sleep(ctx, openEvery/4)
		}
	}
}

// pollInterval returns the time between two rounds of attempts. Topics that were just created may be ready at any moment.
func (o *opener) pollInterval() time.Duration {
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	if time.Now().Before(o.pollUntil) {
		return createdPoll
	}
	return openEvery
}

// topicsToOpen returns the topics without partitions that have or had records.
func (o *opener) topicsToOpen() []string {
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	var names []string
	now := time.Now()
	for name, t := range o.sink.topics {
		if now.Before(t.nextAttempt) {
			continue
		}

		// Send keeps no more records for a parked topic, and only its opening shows that it can be
		// written again.
		if !t.isOpen() && (len(t.waiting) > 0 || t.parked) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// openTopics opens all topics that wait for it, together: one metadata request, one request for
// offsets to each leader, one write. Topics that cannot be opened get an obstacle. The error is that
// of a request that all topics need.
func (o *opener) openTopics(ctx context.Context) error {
	names := o.topicsToOpen()
	if len(names) == 0 {
		return nil
	}

	layout, err := o.sink.c.kafka.Metadata(ctx, names)
	if err != nil {
		o.noteObstacle(names, err)
		return err
	}

	var good []string
	leaders := map[record.TopicPartition]int32{}
	for _, name := range names {
		tl := layout.Topics[name]
		if tl.Err != nil || len(tl.Partitions) == 0 {
			o.noteObstacle([]string{name}, cmp.Or[error](tl.Err, kafkawire.UnknownTopicOrPartition))
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

	ends, _ := o.sink.c.kafka.ListOffsets(ctx, leaders)
	good = slices.DeleteFunc(good, func(name string) bool {
		return !o.mayOpen(name, len(layout.Topics[name].Partitions), ends)
	})
	if len(good) == 0 {
		return nil
	}

	// Without its configuration, a topic counts as compacted (N10), and the responses of the brokers
	// show the largest batch.
	configs, configErr := o.sink.c.kafka.DescribeTopics(ctx, good)
	if configErr != nil {
		o.sink.log.Debug("reading topic limits failed", "error", configErr)
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
	if err := o.sink.claims.SaveSenders(ctx, nil, offsets); err != nil {
		return fmt.Errorf("saving the first offsets of topics: %w", err)
	}

	for _, name := range good {
		for id, end := range offsets[name] {
			o.sink.acks.Restore(record.TopicPartition{Topic: name, Partition: int32(id)}, end)
		}
		o.openTopic(name, layout.Topics[name], configs[name], ends)
	}
	// openTopic has cleared the mark.
	if configErr != nil {
		o.sink.mu.Lock()
		o.sink.refresher.markConfigsStaleLocked(good)
		o.sink.mu.Unlock()
	}
	o.sink.Flush()
	return nil
}

// mayOpen reports whether the topic can be opened with the known ends of its partitions. Otherwise it notes
// the obstacle. Most partitions that have no leader get one within seconds, and then need no takeover.
func (o *opener) mayOpen(name string, partitions int, ends map[record.TopicPartition]int64) bool {
	known := 0
	for id := range partitions {
		if _, ok := ends[record.TopicPartition{Topic: name, Partition: int32(id)}]; ok {
			known++
		}
	}
	if known == partitions {
		return true
	}

	o.sink.mu.Lock()
	topic := o.sink.topics[name]
	// The topic may have been missing until now. It has been leaderless only since it exists.
	lasting := topic.obstacle.kind == kindNoLeader && time.Since(topic.kindSince) >= o.sink.parker.parkAfter
	o.sink.mu.Unlock()

	o.noteObstacle([]string{name}, kafkawire.LeaderNotAvailable)
	return known > 0 && lasting
}

// runCreator creates missing topics, if so configured, until ctx ends. It is apart from the opening of topics, because topics that exist
// must not wait for a slow controller.
func (o *opener) runCreator(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-o.missing:
		}

		for names := o.takeMissing(); len(names) > 0 && ctx.Err() == nil; names = o.takeMissing() {
			o.createTopics(ctx, names)
		}
	}
}

// takeMissing returns some topics that were found missing since their last attempt, in random order: topics that
// cannot be created must not hold up the others for good.
func (o *opener) takeMissing() (names []string) {
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	for name, t := range o.sink.topics {
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

// createTopics creates topics. It does not wait until they are open, so that the next ones are created at the same time.
func (o *opener) createTopics(ctx context.Context, names []string) {
	rejected, err := o.sink.c.kafka.CreateTopics(ctx, names, *o.create)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		o.sink.log.Warn("cannot create topics; trying again", "topics", len(names), "error", err)
	}

	now := time.Now()
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	for _, name := range names {
		topic := o.sink.topics[name]
		why := rejected[name]
		switch {
		case topic.isOpen():
			// Another process has created the topic.

		case err != nil && topic.obstacle.kind == kindMissing:
			// The topic is still missing, which parks it. The opener finds that out again.
			reason := fmt.Sprintf("topic %q does not exist, and Kafka does not create it: %v", name, err)
			topic.setObstacle(obstacle{kindMissing, reason, "check the controller of the cluster"}, now)

		case why != nil:
			o.setObstacleLocked(topic, topicObstacle(name, why), now)

		case err == nil:
			o.sink.log.Info("topic is created",
				"topic", name, "partitions", orDefault(o.create.Partitions), "replication", orDefault(o.create.Replication))
			o.openSoonLocked(topic, now)
		}
	}
}

// openSoonLocked makes the opener try a topic that was just created, again and again for a moment: other brokers may not have it yet, and
// its partitions may have no leader.
func (o *opener) openSoonLocked(topic *topic, now time.Time) {
	o.pollUntil = now.Add(o.createdFor)
	topic.missing, topic.newUntil, topic.nextAttempt = false, o.pollUntil, time.Time{}
	topic.setObstacle(beingCreated(topic.name), now)
	retry.Signal(o.wake)
}

// beingCreated is the obstacle of a missing topic until Kafka has responded why it is not created.
func beingCreated(topic string) obstacle {
	return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist yet; it is being created", topic), ""}
}

// noteObstacle notes why topics cannot be opened, and when they are tried again. Missing topics are created, if so configured.
func (o *opener) noteObstacle(names []string, err error) {
	now := time.Now()
	mustCreate := o.creation() == createdAutomatically && errors.Is(err, kafkawire.UnknownTopicOrPartition)
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	for _, name := range names {
		topic := o.sink.topics[name]
		interval, isNew := openEvery, now.Before(topic.newUntil)
		if isNew {
			interval = createdPoll
		}
		// The time is below the interval, so that the next round finds the topic.
		topic.nextAttempt = now.Add(interval * 9 / 10)

		if !mustCreate {
			o.setObstacleLocked(topic, topicObstacle(name, err), now)
			continue
		}

		// If creating the topic has failed before, that reason explains more than the missing topic.
		if !topic.obstacle.parksTopic() {
			topic.setObstacle(beingCreated(name), now)
		}
		if !isNew {
			topic.missing = true
			retry.Signal(o.missing)
		}
	}
}

// setObstacleLocked sets the reason why a topic cannot be opened, and logs it when it changes.
func (o *opener) setObstacleLocked(topic *topic, why obstacle, now time.Time) {
	topic.setObstacle(why, now)
	// A request that fails for all topics is logged by its caller.
	if why.kind != kindUnreachable && topic.takeLog(now, o.creation()) {
		o.sink.log.Error("cannot write a topic; its records wait",
			append(why.logFields(topic.name), "records", countRecords(topic.waiting)+topic.waitingRecords())...)
	}
}

// openTopic opens a topic. The records that have waited go to its partitions, in order, before any
// record that follows.
func (o *opener) openTopic(
	name string, tl kafkawire.TopicLayout, cfg kafkawire.TopicConfig, ends map[record.TopicPartition]int64,
) {
	now := time.Now()
	o.sink.mu.Lock()
	defer o.sink.mu.Unlock()
	topic := o.sink.topics[name]
	topic.addPartitions(len(tl.Partitions))
	for _, p := range topic.partitions {
		p.ackedEnd, p.lastUsed = ends[p.tp], now
	}

	topic.setConfig(cfg, o.sink.c.limits.batchBytes)
	topic.configStale, topic.missing, topic.obstacle, topic.nextAttempt = false, false, obstacle{}, time.Time{}
	for _, p := range topic.partitions {
		if _, known := ends[p.tp]; !known {
			o.quarantineLocked(p, now)
		}
		o.sink.refresher.setLeaderLocked(p, tl.Partitions, now)
	}

	o.sink.log.Info("topic is open", "topic", name, "partitions", len(topic.partitions))
	// Still under the lock, so that no later Send overtakes the records that have waited.
	o.sink.resendWaitingLocked(topic)
	o.sink.parker.unparkTopicLocked(topic)
}

// quarantineLocked puts a partition into quarantine whose end is unknown. The keeper reads it when it has a
// leader, and then ends the sink, because only a takeover releases a partition.
func (o *opener) quarantineLocked(partition *partition, now time.Time) {
	reason := fmt.Sprintf("partition %d of topic %q had no leader when the topic was opened; check its brokers",
		partition.tp.Partition, partition.tp.Topic)
	partition.quarantine = true
	partition.setObstacle(obstacle{kindQuarantined, reason, ""}, now)
	o.sink.keeper.session.Hold(partition.tp, reason)
	o.sink.log.Warn("partition is in quarantine; its records are sent when it can be read",
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
	s.enqueueLocked(partition, rec, ticket, size, need, firstCopy)
}
