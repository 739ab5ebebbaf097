package sink

import (
	"bytes"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

const (
	// maxSentKeys bounds the keys that a topic remembers during a reread.
	maxSentKeys = 100_000
)

// redeliveredHeader marks a record that may be a second copy, because a part of its topic could not be
// read back (N8).
var redeliveredHeader = record.Header{Key: []byte(record.HeaderRedelivered), Value: []byte("true")}

func isRedeliveredHeader(header record.Header) bool {
	return bytes.Equal(header.Key, redeliveredHeader.Key)
}

// Size returns the bytes that rec reserves in the memory budget: an upper bound of its encoding.
// The acks of the sink report the same number.
func (s *Sink) Size(rec *record.Record) int {
	_, size := recordSizes(rec)
	return size
}

// recordSizes returns the bytes that rec needs in a batch, and the bytes that it has reserved in
// the memory budget. They differ if the sink added the redelivered header: the memory was
// reserved before that.
func recordSizes(rec *record.Record) (need, size int) {
	need = batch.Size(rec)
	n := len(rec.Headers)
	if n == 0 || !isRedeliveredHeader(rec.Headers[n-1]) {
		return need, need
	}

	original := *rec
	original.Headers = rec.Headers[:n-1]
	return need, batch.Size(&original)
}

// Send encodes rec into the open batch of its partition. It never blocks and does not retain rec.
//
// A nil error means that the sink will deliver the record. If its topic or leader is missing, or
// its partition is in quarantine, the record is kept and sent later, in order. If the read-back
// has found the record, it is not sent, and its ticket is acked before Send returns.
//
// Otherwise nothing was queued, and the error is one of these:
//   - a *record.Rejection: the record itself is at fault.
//   - record.ErrBlocked: the Holder has closed the gate of the key.
//   - record.ErrParked: the topic is parked.
//   - record.ErrPartitionParked: the partition is parked. For a side delivery (ticket.IsSide), and for any record
//     during the reread, also: the partition has not been read back, so the record may already be in it.
//   - the error that ended the sink.
func (s *Sink) Send(rec *record.Record, ticket record.Ticket) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return s.ended
	}

	// Consecutive records mostly share a topic, which saves the map lookup.
	top := s.lastTopic
	if top == nil || top.name != rec.Topic {
		top = s.findOrAddTopicLocked(rec.Topic)
	}
	need, size := recordSizes(rec)

	// A record that the previous owner has sent passes the gates (N7). If a gate held it back, the
	// read-back could be gone when the gate opens, and the record would be sent twice.
	if tp, offset, found := s.claimHitLocked(top, rec, ticket); found {
		s.ackHitLocked(tp, offset, ticket, size)
		return nil
	}
	if err := s.parker.checkGatesLocked(top, rec, ticket); err != nil {
		return err
	}

	if !top.isOpen() {
		s.keepUntilOpenLocked(top, rec, ticket, size, need)
		s.batches.changeUnresolvedLocked(1, size)
		return nil
	}
	partition, rejection := top.choosePartitionLocked(rec)
	if rejection != nil {
		return rejection
	}

	// The record may have been sent before. Until the partitions that can hold it are read back,
	// it must not be sent again.
	side := ticket.IsSide()
	mayBeCopy := s.rereading || side
	if side && partition.quarantine {
		partition.turnAwayRecord(ticket)
		return record.ErrPartitionParked
	}
	if mayBeCopy && partition.mayBeUnreadLocked(rec) {
		return record.ErrPartitionParked
	}

	if partition.parked {
		now := time.Now()
		if !s.parker.mayProbeLocked(partition, now) {
			partition.turnAwayRecord(ticket)
			return record.ErrPartitionParked
		}
		partition.probedAt = now
	}

	if mayBeCopy && !partition.quarantine {
		top.markKeySentLocked(rec.Key, side)
	}
	// The previous owner has sent later events to this partition, and not this one.
	if partition.hits.Len() > 0 {
		s.parker.holder.HoldOffsets()
	}
	s.enqueueLocked(partition, rec, ticket, size, need, copyRisk(mayBeCopy))
	s.batches.changeUnresolvedLocked(1, size)
	return nil
}

// claimHitLocked returns the place of rec if the read-back has found it, and removes it from the
// hits.
func (s *Sink) claimHitLocked(
	topic *topic, rec *record.Record, ticket record.Ticket,
) (tp record.TopicPartition, offset int64, found bool) {
	if topic.hitsLeft == 0 {
		return tp, 0, false
	}
	partition, rejection := topic.choosePartitionLocked(rec)
	if rejection != nil || partition.quarantine {
		return tp, 0, false
	}

	// N10: the key was sent in this reread.
	_, sent := topic.sentKeys[sentKey{ticket.IsSide(), string(rec.Key)}]
	if rec.Key != nil && (sent || topic.allKeysSent) {
		return tp, 0, false
	}

	chosen := partition
	fence.EachHit(rec, func(id fence.Identity, timeMS int64) bool {
		partition = chosen
		// The topic may have grown since, also before the last checkpoint. Then the key hashed to
		// another partition.
		if !partition.hits.Has(id, timeMS) && rec.Partition == record.AnyPartition {
			partition = topic.partitionWithHit(id, timeMS)
		}
		if partition != nil {
			offset, found = partition.hits.Take(id, timeMS)
		}
		return found
	})
	if !found {
		return tp, 0, false
	}

	topic.hitsLeft--
	return partition.tp, offset, true
}

// findOrAddTopicLocked returns the topic called name, and makes it the topic of the last call.
func (s *Sink) findOrAddTopicLocked(name string) *topic {
	topic := s.topics[name]
	if topic == nil {
		topic = s.newTopic(name)
		s.topics[topic.name] = topic
	}
	s.lastTopic = topic
	return topic
}

// keepUntilOpenLocked queues a record for a topic that is not open yet (N9). resendWaitingLocked
// sends it on.
func (s *Sink) keepUntilOpenLocked(topic *topic, rec *record.Record, ticket record.Ticket, size, need int) {
	var kept *pending
	if n := len(topic.waiting); n > 0 && topic.waiting[n-1].builder.Len()+need <= s.c.limits.batchBytes {
		kept = topic.waiting[n-1]
	} else {
		kept = s.batches.newBatchLocked()
		topic.waiting = append(topic.waiting, kept)
	}

	// The encoded record does not contain the partition that it wants.
	s.batches.appendRecordLocked(kept, rec, ticket, size)
	kept.wantedPartitions = append(kept.wantedPartitions, rec.Partition)

	if topic.obstacle.none() {
		topic.setObstacle(obstacle{kindOpening, fmt.Sprintf("topic %q is being opened", topic.name), ""}, time.Now())
		retry.Signal(s.opener.wake)
	}
	if s.parker.holdsTooMuchLocked(topic) {
		retry.Signal(s.parker.wake)
	}
}

// choosePartitionLocked returns the partition that rec names, or the partition that its key
// hashes to. It rejects rec if that partition does not exist. It does not check the size of rec:
// the limit of the topic may have been raised since it was read, so only Kafka can decide.
func (t *topic) choosePartitionLocked(rec *record.Record) (*partition, *record.Rejection) {
	n := int32(len(t.partitions))
	id := rec.Partition
	if id == record.AnyPartition {
		id = partitionByKey(rec, n)
	}

	if id < 0 || id >= n {
		return nil, &record.Rejection{
			Class:  record.PartitionOutOfRange,
			Reason: fmt.Sprintf("partition %d does not exist: topic %q has %d partitions, numbered from 0", id, t.name, n),
		}
	}
	return t.partitions[id], nil
}

// partitionByKey hashes the key as Kafka's Java client does. Without a key it hashes the id of the
// event, so that a later owner looks for the record in the same partition.
func partitionByKey(rec *record.Record, partitions int32) int32 {
	key := rec.Key
	if key == nil {
		key = rec.Header(record.HeaderID)
	}
	return kafkawire.ChoosePartition(key, partitions)
}

// newTooLargeRejection returns the rejection of a record that takes size bytes in a batch without
// other records.
func newTooLargeRejection(topic *topic, size int) *record.Rejection {
	limit := "the limit of the topic"
	if topic.maxBytes > 0 && topic.maxBytes < size {
		limit = fmt.Sprintf("max.message.bytes=%d", topic.maxBytes)
	}
	return &record.Rejection{
		Class:  record.MessageTooLarge,
		Reason: fmt.Sprintf("record needs a batch of %d bytes, which exceeds %s (topic %q)", size, limit, topic.name),
	}
}

// mayBeUnreadLocked reports whether an earlier attempt at rec may be in a partition that was not
// read back: a partition that the key hashed to before the topic grew. Such a record must not be
// sent to any partition yet.
func (p *partition) mayBeUnreadLocked(rec *record.Record) bool {
	// A named partition does not depend on the number of partitions.
	if rec.Partition != record.AnyPartition || p.topic.earlierCount == 0 {
		return false
	}
	old := p.topic.partitions[partitionByKey(rec, int32(p.topic.earlierCount))]
	return old != p && old.quarantine
}

// sentKey is a key of which a record was sent in this reread, by the stream or as a side delivery.
type sentKey struct {
	side bool
	key  string
}

// markKeySentLocked notes that a record of key is sent in this reread.
//
// N10: once a record of a key was sent in this reread, no later record of the key in that topic
// is skipped. In a compacted topic the later value must follow the earlier one, so it has to be
// sent again. In other topics no record of a key is lost, so their keys are not marked.
//
// Stream and side deliveries are marked separately, because each kind is ordered only among
// itself. Where the order between them matters, the stream event waits at a gate (N15).
//
// With too many keys it drops them and treats every key as sent. Until the reread ends, nothing is then
// skipped, and records that are sent get the redelivered header.
func (t *topic) markKeySentLocked(key []byte, side bool) {
	if !t.compacted || t.hitsLeft == 0 || key == nil {
		return
	}
	if t.sentKeys == nil {
		t.sentKeys = map[sentKey]struct{}{}
	}
	t.sentKeys[sentKey{side, string(key)}] = struct{}{}

	if len(t.sentKeys) >= maxSentKeys {
		t.sentKeys, t.allKeysSent = nil, true
	}
}

// ackHitLocked acks a record that is in its topic already.
func (s *Sink) ackHitLocked(tp record.TopicPartition, offset int64, ticket record.Ticket, size int) {
	s.c.cfg.Metrics.ReadBackHits.Inc()
	s.c.cfg.Metrics.ObservePublish(tp.Topic, metrics.Skipped, 1)
	s.acks.Acked(tp, offset, append(s.batches.tickets.get(), ticket), size)
}

// copyRisk is whether a record can be a second copy, provided that a part of its topic was not read back.
type copyRisk bool

const (
	firstCopy    copyRisk = false
	maybeAnother copyRisk = true
)

// enqueueLocked encodes rec into the open batch of partition.
//
// size is the number of bytes that rec has reserved, and need is the number that it needs in the
// batch.
func (s *Sink) enqueueLocked(partition *partition, rec *record.Record, ticket record.Ticket, size, need int, risk copyRisk) {
	unread := partition.unread || partition.topic.unread || partition.topic.allKeysSent
	if unread && risk == maybeAnother && !slices.ContainsFunc(rec.Headers, isRedeliveredHeader) {
		s.headerScratch = append(append(s.headerScratch[:0], rec.Headers...), redeliveredHeader)
		// The records of the other targets share the headers, so a copy gets the flag.
		flagged := *rec
		flagged.Headers = s.headerScratch
		rec, need = &flagged, batch.Size(&flagged)
	}

	open := partition.openBatch
	if open == nil || open.builder.Len()+need > s.c.learned.batchBytes(partition.topic.batchLimit) {
		open = s.batches.newBatchLocked()
		partition.queue = append(partition.queue, open)
		partition.openBatch = open
	}
	s.batches.appendRecordLocked(open, rec, ticket, size)
	partition.enqueued++
	partition.markReadyLocked()

	if !partition.obstacle.none() && reservedBytes(partition.queue) > s.parker.maxObstructed {
		retry.Signal(s.parker.wake)
	}
}

// Flush wakes the idle loops that have something to send.
func (s *Sink) Flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range s.loops.byID {
		if len(l.ready) > 0 {
			retry.Signal(l.wake)
		}
	}
}
