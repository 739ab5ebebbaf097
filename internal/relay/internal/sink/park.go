package sink

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// N11: a target that cannot be written for a while is parked, so that it does not hold the stream.
// Its queued records are given back to the Holder, in order, and Send takes no more records for it
// until it can be written again.
//
// The batch at the head may be in the log although no broker has acknowledged it. Then nothing more
// is sent to its partition in this term, because neither the offsets of the records that were given
// back nor the next sequence are known. The stored offset stays before them. When the partition has
// a leader again, the sink ends with ErrReopen, and the read-back of the next sink finds the records
// that are there. That happens at most once in reopenEvery. Until then the partition waits, and all
// others flow.

// takeReopen reports whether a sink may end on purpose now, and takes that permission. The next one comes after reopenEvery.
func (o *Opener) takeReopen(now time.Time) bool {
	last := o.reopened.Load()
	if last != nil && now.Sub(*last) < o.limits.reopenEvery {
		return false
	}
	return o.reopened.CompareAndSwap(last, &now)
}

// parksPartition reports whether an obstacle parks a partition after some time: no process can write
// the partition now. A broker that cannot be reached, or that responds that it is not ready, is an
// outage, so its records wait.
func (o obstacle) parksPartition() bool {
	switch o.kind {
	case kindMissing, kindTooSmall, kindForbidden, kindNoLeader, kindQuarantined:
		return true
	}
	return false
}

// parksTopic reports whether an obstacle parks a topic that is not open. A topic whose name Kafka
// rejects counts as missing.
func (o obstacle) parksTopic() bool { return o.parksPartition() || o.kind == kindRejected }

// parker parks targets that cannot be written, and gives their records back. It works on the topics of
// the sink under the sink's lock.
type parker struct {
	sink          *Sink
	holder        record.Holder
	parkAfter     time.Duration // N11: a target is parked that cannot be written for this time
	settleTime    time.Duration // a topic that is created may hold more than maxObstructed for this time
	maxObstructed int           // the memory that the records of an obstructed target may hold
	wake          chan struct{} // one token: a target holds too much memory
}

// reservedBytes returns the memory that the records of batches have reserved.
func reservedBytes(queue []*pending) int {
	n := 0
	for _, b := range queue {
		n += b.reserved
	}
	return n
}

// obstructedBytes returns the memory that records in obstructed partitions have reserved.
func (t *topic) obstructedBytes() int {
	n := 0
	for _, p := range t.partitions {
		if !p.obstacle.none() {
			n += reservedBytes(p.queue)
		}
	}
	return n
}

// runParker parks targets that cannot be written, until ctx ends.
func (pk *parker) runParker(ctx context.Context) error {
	tick := time.NewTicker(min(max(pk.parkAfter/8, 5*time.Millisecond), time.Second))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-pk.wake:
		}
		pk.parkUnwritable(time.Now())
	}
}

// parkUnwritable parks all targets that must be parked now. It ends the sink if a partition has to
// be read back and has a leader again.
func (pk *parker) parkUnwritable(now time.Time) {
	pk.sink.mu.Lock()
	defer pk.sink.mu.Unlock()
	memory := memory(pk.stallsOthersLocked(now))
	for _, t := range pk.sink.topics {
		pk.parkPartitionsLocked(t, now, memory)
		if pk.sink.ended != nil {
			return
		}
		if !t.parked && !t.isOpen() && pk.mustParkTopicLocked(t, now) {
			pk.parkTopicLocked(t)
		}
	}
}

// parkPartitionsLocked parks the partitions of topic that must be parked now.
func (pk *parker) parkPartitionsLocked(topic *topic, now time.Time, memory memory) {
	var parked []int32
	records, why := 0, obstacle{}
	for _, p := range topic.partitions {
		if pk.sink.ended != nil {
			break
		}
		// The head of a busy partition belongs to its loop. The loop wakes the parker when it has
		// settled the request.
		if !p.busy && pk.mustParkLocked(p, now, memory) {
			if !p.parked {
				parked, why = append(parked, p.tp.Partition), p.obstacle
			}
			records += pk.parkPartitionLocked(p, now)
		}
		if p.needsReadBack && p.loop != nil && pk.sink.c.takeReopen(now) {
			pk.sink.failLocked(fmt.Errorf("%w: a batch may be in %s-%d, which could not be written",
				ErrReopen, p.tp.Topic, p.tp.Partition))
		}
	}

	// A topic that was deleted parks all of its partitions at once: one fact, one line.
	if len(parked) > 0 {
		pk.sink.log.Warn("cannot write partitions of a topic; their records are parked",
			append(why.logFields(topic.name), "partitions", parked, "records", records)...)
	}
}

// stallsOthersLocked reports whether partitions that brokers defer would soon stop all others: the
// memory or the window is nearly full, and a deferred partition holds its low end.
func (pk *parker) stallsOthersLocked(now time.Time) bool {
	low, stream, side := pk.holder.MemoryPressure()
	if !stream && !side {
		return false
	}

	holdsLowEnd := func(ticket record.Ticket) bool { return stream && ticket == low || side && ticket.IsSide() }
	for _, t := range pk.sink.topics {
		for _, p := range t.partitions {
			if pk.isDeferredLocked(p, now) && slices.ContainsFunc(p.queue[0].tickets, holdsLowEnd) {
				return true
			}
		}
	}
	return false
}

// isDeferredLocked reports whether brokers have deferred the queued records of partition for parkAfter.
func (pk *parker) isDeferredLocked(partition *partition, now time.Time) bool {
	return partition.obstacle.kind == kindRejected && now.Sub(partition.since) >= pk.parkAfter && len(partition.queue) > 0
}

// memory is the state of the memory for records.
type memory bool

const (
	hasRoom memory = false
	isFull  memory = true // deferred records would stop all others
)

// mustParkLocked reports whether the queued records of partition must be given back. Records that brokers
// only defer wait, unless the topic takes more than its share of the memory, or the memory is full.
func (pk *parker) mustParkLocked(partition *partition, now time.Time, memory memory) bool {
	if partition.parked {
		return pk.probeFailedLocked(partition, now)
	}
	if partition.obstacle.parksPartition() {
		return now.Sub(partition.unwritableSince) >= pk.parkAfter || partition.topic.obstructedBytes() > pk.maxObstructed
	}
	return pk.isDeferredLocked(partition, now) && (memory == isFull || partition.topic.obstructedBytes() > pk.maxObstructed)
}

// probeFailedLocked reports whether records that were let through to a parked partition must be
// given back: at once if they were certainly not appended.
func (pk *parker) probeFailedLocked(partition *partition, now time.Time) bool {
	switch {
	case len(partition.queue) == 0:
		return false
	case partition.quarantine || partition.needsReadBack:
		return true
	case !partition.queue[0].maybeAppended:
		// Kafka has certainly not appended the probe. If it is not frozen, no loop has tried it yet.
		return partition.queue[0].frozen || partition.loop == nil
	}

	// The probe may be in the log. Giving it back would require a takeover, so it is retried for
	// the usual time.
	return partition.obstacle.kind != kindUnreachable && now.Sub(partition.probedAt) >= pk.parkAfter
}

// mayProbeLocked reports whether a record may be let through to a parked partition. Records are
// let through one at a time, and the response shows whether the partition can be written again.
func (pk *parker) mayProbeLocked(partition *partition, now time.Time) bool {
	if !partition.probing || partition.needsReadBack || partition.quarantine || partition.loop == nil || partition.busy || len(partition.queue) > 0 {
		return false
	}
	return now.Sub(partition.probedAt) >= min(rejectedRetry, pk.parkAfter)
}

// mustParkTopicLocked reports whether a topic must be parked because it cannot be opened.
func (pk *parker) mustParkTopicLocked(topic *topic, now time.Time) bool {
	return topic.obstacle.parksTopic() && now.Sub(topic.unwritableSince) >= pk.parkAfter || pk.holdsTooMuchLocked(topic)
}

// holdsTooMuchLocked reports whether a topic that cannot be opened holds more than its share of the memory. The first records of a
// topic that is being created may do that for a moment, because through the store they would take longer.
func (pk *parker) holdsTooMuchLocked(topic *topic) bool {
	return topic.obstacle.parksTopic() && reservedBytes(topic.waiting) > pk.maxObstructed &&
		!topic.isSettling(time.Now(), pk.sink.opener.creation(), pk.settleTime)
}

// parkPartitionLocked gives back the queued records of partition, and returns their number. The head must not be in flight.
func (pk *parker) parkPartitionLocked(partition *partition, now time.Time) int {
	// Only a read-back can show which records of this batch arrived.
	if len(partition.queue) > 0 && partition.queue[0].maybeAppended {
		partition.needsReadBack = true
	}

	queue := partition.queue
	partition.queue, partition.openBatch = nil, nil
	partition.unmarkReadyLocked()
	stream, sides := pk.withdrawBatchesLocked(partition.topic, queue, record.ErrPartitionParked)
	partition.parked = true
	partition.turnAway(stream, sides)

	// Without a loop no probe is needed: a new leader shows that the partition can be written.
	partition.probing = partition.probing || partition.loop != nil && !partition.quarantine
	partition.probedAt = now
	return stream + sides
}

// parkTopicLocked gives back the records that wait for topic.
func (pk *parker) parkTopicLocked(topic *topic) {
	waiting := topic.waiting
	topic.waiting, topic.parked = nil, true
	stream, sides := pk.withdrawBatchesLocked(topic, waiting, record.ErrParked)
	topic.turnAway(stream, sides)
	pk.sink.log.Warn("cannot write a topic; its records are parked", append(topic.obstacle.logFields(topic.name), "records", stream+sides)...)
}

// withdrawBatchesLocked gives the records of batches back to the Holder. It returns how many of them belong to the
// stream and to side deliveries.
func (pk *parker) withdrawBatchesLocked(topic *topic, queue []*pending, held error) (stream, sides int) {
	var list []record.Withdrawn
	for _, b := range queue {
		err := forEachRecord(b, func(i int, rec *record.Record) {
			list = append(list, newWithdrawn(topic, rec, b, b.tickets[i], nil, held))
		})
		if err != nil {
			pk.sink.failLocked(fmt.Errorf("%w: decoding records to park of topic %q: %w", ErrBroken, topic.name, err))
			return 0, 0
		}
	}

	for _, b := range queue {
		pk.sink.batches.releaseBatchLocked(b)
	}
	pk.withdrawLocked(list)

	for i := range list {
		if !list[i].Ticket.IsSide() {
			stream++
		}
	}
	return stream, len(list) - stream
}

// newWithdrawn describes rec, which was in batch or in none, to the Holder. The result does not alias rec.
func newWithdrawn(topic *topic, rec *record.Record, batch *pending, ticket record.Ticket, why *record.Rejection, held error) record.Withdrawn {
	_, size := recordSizes(rec)
	return record.Withdrawn{
		Ticket:    ticket,
		Topic:     topic.name,
		Key:       bytes.Clone(rec.Key),
		Rejection: why,
		Held:      held,
		Bytes:     size,
		ID:        bytes.Clone(rec.DocumentID()),
		NS:        bytes.Clone(rec.Header(record.HeaderNamespace)),
		StringID:  string(rec.Header(record.HeaderIDType)) == "string",
		TimeMS:    rec.TimeMS,
		MayBeSent: batch != nil && batch.maybeAppended,
	}
}

// withdrawLocked gives records back to the Holder.
func (pk *parker) withdrawLocked(list []record.Withdrawn) {
	if len(list) == 0 {
		return
	}

	total := 0
	for i := range list {
		total += list[i].Bytes
	}
	pk.holder.Withdrawn(list)
	pk.sink.batches.changeUnresolvedLocked(-len(list), -total)
}

// checkGatesLocked returns an error if rec may not be queued to any partition: the error of
// the Holder's gate, or record.ErrParked if the topic is parked.
func (pk *parker) checkGatesLocked(topic *topic, rec *record.Record, ticket record.Ticket) error {
	err := pk.holder.CheckGate(rec, ticket.IsSide()) // N15
	if err == nil && topic.parked {
		err = record.ErrParked
	}
	if err != nil {
		pk.countTurnedAwayLocked(topic, rec, ticket)
	}
	return err
}

// countTurnedAwayLocked counts a record that is not taken, if its target is parked.
func (pk *parker) countTurnedAwayLocked(topic *topic, rec *record.Record, ticket record.Ticket) {
	if topic.parked {
		topic.turnAwayRecord(ticket)
		return
	}
	if !topic.isOpen() {
		return
	}
	if partition, rejection := topic.choosePartitionLocked(rec); rejection == nil {
		partition.turnAwayRecord(ticket)
	}
}

// unparkLocked lets a parked partition take records again, if no obstacle is left.
func (pk *parker) unparkLocked(partition *partition) {
	// Queued records are a probe whose outcome is not known yet.
	if !partition.parked || partition.quarantine || partition.needsReadBack || partition.probing || partition.loop == nil || len(partition.queue) > 0 {
		return
	}
	partition.parking = parking{}
	partition.clearObstacle()
	pk.sink.log.Info("parked partition can be written again", "topic", partition.tp.Topic, "partition", partition.tp.Partition)
	pk.holder.Ready(partition.tp.Topic)
}

// unparkTopicLocked lets a topic that was opened take records again, if it is parked.
func (pk *parker) unparkTopicLocked(topic *topic) {
	if !topic.parked {
		return
	}
	topic.parking = parking{}
	pk.holder.Ready(topic.name)
}
