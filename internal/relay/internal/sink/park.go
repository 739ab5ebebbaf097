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

// mayReopen reports whether a sink may end on purpose now. If so, it counts the end.
func (o *Opener) mayReopen(now time.Time) bool {
	last := o.reopened.Load()
	return now.Sub(time.Unix(0, last)) >= o.limits.reopenEvery && o.reopened.CompareAndSwap(last, now.UnixNano())
}

// parksPartition reports whether an obstacle parks a partition after some time: no process can write
// the partition now. A broker that cannot be reached, or that responds that it is not ready, is an
// outage, so its records wait.
func (o obstacle) parksPartition() bool {
	switch o.kind {
	case kindMissing, kindForbidden, kindNoLeader, kindQuarantined:
		return true
	}
	return false
}

// parksTopic reports whether an obstacle parks a topic that is not adopted. A topic whose name Kafka
// rejects counts as missing.
func (o obstacle) parksTopic() bool { return o.parksPartition() || o.kind == kindRefused }

// parker parks targets that cannot be written, and gives their records back. It works on the topics of
// the sink under the sink's lock.
type parker struct {
	sink          *Sink
	holder        record.Holder
	parkAfter     time.Duration // N11: a target is parked that cannot be written for this time
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
	full := pk.stallsOthersLocked(now)
	for _, t := range pk.sink.topics {
		for _, p := range t.partitions {
			if pk.sink.ended != nil {
				return
			}
			// The head of a busy partition belongs to its lane. The lane wakes the parker when it has
			// settled the request.
			if !p.busy && pk.mustParkLocked(p, now, full) {
				pk.parkPartitionLocked(p, now)
			}
			if p.needsReadBack && p.lane != nil && pk.sink.c.mayReopen(now) {
				pk.sink.failLocked(fmt.Errorf("%w: a batch may be in %s-%d, which could not be written",
					ErrReopen, p.tp.Topic, p.tp.Partition))
			}
		}

		if !t.parked && !t.isAdopted() && pk.sink.ended == nil && pk.mustParkTopicLocked(t, now) {
			pk.parkTopicLocked(t)
		}
	}
}

// stallsOthersLocked reports whether partitions that brokers defer would soon stop all others: the
// memory or the window is nearly full, and a deferred partition holds its low end.
func (pk *parker) stallsOthersLocked(now time.Time) bool {
	low, stream, side := pk.holder.MemoryPressure()
	if !stream && !side {
		return false
	}

	holdsLowEnd := func(k record.Ticket) bool { return stream && k == low || side && k.IsSide() }
	for _, t := range pk.sink.topics {
		for _, p := range t.partitions {
			if pk.isDeferredLocked(p, now) && slices.ContainsFunc(p.queue[0].tickets, holdsLowEnd) {
				return true
			}
		}
	}
	return false
}

// isDeferredLocked reports whether brokers have deferred the queued records of p for parkAfter.
func (pk *parker) isDeferredLocked(p *partition, now time.Time) bool {
	return p.obstacle.kind == kindRefused && now.Sub(p.since) >= pk.parkAfter && len(p.queue) > 0
}

// mustParkLocked reports whether the queued records of p must be given back. Records that brokers
// only defer wait, unless the topic takes more than its share of the memory. full means that they
// would stop all others, so they are given back.
func (pk *parker) mustParkLocked(p *partition, now time.Time, full bool) bool {
	if p.parked {
		return pk.probeFailedLocked(p, now)
	}
	if p.obstacle.parksPartition() {
		return now.Sub(p.unwritableSince) >= pk.parkAfter || p.topic.obstructedBytes() > pk.maxObstructed
	}
	return pk.isDeferredLocked(p, now) && (full || p.topic.obstructedBytes() > pk.maxObstructed)
}

// probeFailedLocked reports whether records that were let through to a parked partition must be
// given back: at once if they were certainly not appended.
func (pk *parker) probeFailedLocked(p *partition, now time.Time) bool {
	switch {
	case len(p.queue) == 0:
		return false
	case p.quarantine || p.needsReadBack:
		return true
	case !p.queue[0].maybeAppended:
		// Kafka has certainly not appended the probe. If it is not frozen, no lane has tried it yet.
		return p.queue[0].frozen || p.lane == nil
	}

	// The probe may be in the log. Giving it back would require a takeover, so it is retried for
	// the usual time.
	return p.obstacle.kind != kindUnreachable && now.Sub(p.probedAt) >= pk.parkAfter
}

// mayProbeLocked reports whether a record may be let through to the parked partition p. Records are
// let through one at a time, and the response shows whether the partition can be written again.
func (pk *parker) mayProbeLocked(p *partition, now time.Time) bool {
	if !p.probing || p.needsReadBack || p.quarantine || p.lane == nil || p.busy || len(p.queue) > 0 {
		return false
	}
	if now.Sub(p.probedAt) < min(refusedRetry, pk.parkAfter) {
		return false
	}
	p.probedAt = now
	return true
}

// mustParkTopicLocked reports whether a topic must be parked because it cannot be adopted.
func (pk *parker) mustParkTopicLocked(t *topic, now time.Time) bool {
	return t.obstacle.parksTopic() &&
		(now.Sub(t.unwritableSince) >= pk.parkAfter || reservedBytes(t.waiting) > pk.maxObstructed)
}

// parkPartitionLocked gives back the queued records of p. The head must not be in flight.
func (pk *parker) parkPartitionLocked(p *partition, now time.Time) {
	// Only a read-back can show which records of this batch arrived.
	if len(p.queue) > 0 && p.queue[0].maybeAppended {
		p.needsReadBack = true
	}

	queue := p.queue
	p.queue, p.openBatch = nil, nil
	p.unmarkReadyLocked()
	n, stream := pk.withdrawBatchesLocked(p.topic, queue, record.ErrPartitionParked)
	if !p.parked {
		p.parked = true
		pk.sink.log.Warn("partition is parked; its records are sent when it can be written again",
			"topic", p.tp.Topic, "partition", p.tp.Partition, "error", p.obstacle.text, "records", n)
	}

	// Without a lane no probe is needed: a new leader shows that the partition can be written.
	p.probing = p.probing || p.lane != nil && !p.quarantine
	p.probedAt = now
	p.turnedAway += stream
}

// parkTopicLocked gives back the records that wait for t.
func (pk *parker) parkTopicLocked(t *topic) {
	waiting := t.waiting
	t.waiting, t.parked = nil, true
	n, stream := pk.withdrawBatchesLocked(t, waiting, record.ErrParked)
	pk.sink.log.Warn("topic is parked; its records are sent when it can be written again",
		"topic", t.name, "error", t.obstacle.text, "records", n)
	t.turnedAway = stream
}

// withdrawBatchesLocked gives the records of batches back to the Holder. It returns the number of
// records, and how many of them belong to the stream.
func (pk *parker) withdrawBatchesLocked(t *topic, queue []*pending, held error) (n, stream int) {
	var list []record.Withdrawn
	for _, b := range queue {
		err := forEachRecord(b, func(i int, rec *record.Record) {
			list = append(list, newWithdrawn(t, rec, b.tickets[i], nil, held))
		})
		if err != nil {
			pk.sink.failLocked(fmt.Errorf("%w: decoding records to park of topic %q: %w", ErrBroken, t.name, err))
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
	return len(list), stream
}

// newWithdrawn describes rec to the Holder. The result does not alias rec.
func newWithdrawn(t *topic, rec *record.Record, k record.Ticket, why *record.Refusal, held error) record.Withdrawn {
	_, size := recordSizes(rec)
	return record.Withdrawn{
		Ticket:   k,
		Topic:    t.name,
		Key:      bytes.Clone(rec.Key),
		Refusal:  why,
		Held:     held,
		Bytes:    size,
		ID:       bytes.Clone(rec.DocumentID()),
		NS:       bytes.Clone(rec.Header(record.HeaderNamespace)),
		StringID: string(rec.Header(record.HeaderIDType)) == "string",
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
func (pk *parker) checkGatesLocked(t *topic, rec *record.Record, k record.Ticket) error {
	err := pk.holder.CheckGate(rec, k.IsSide()) // N15
	if err == nil && t.parked {
		err = record.ErrParked
	}
	if err != nil && !k.IsSide() {
		pk.countTurnedAwayLocked(t, rec)
	}
	return err
}

// countTurnedAwayLocked counts a stream record that is not taken, if its target is parked.
func (pk *parker) countTurnedAwayLocked(t *topic, rec *record.Record) {
	if t.parked {
		t.turnedAway++
		return
	}
	if !t.isAdopted() {
		return
	}
	if p, refusal := t.choosePartitionLocked(rec); refusal == nil && p.parked {
		p.turnedAway++
	}
}

// unparkLocked lets a parked partition take records again, if no obstacle is left.
func (pk *parker) unparkLocked(p *partition) {
	// Queued records are a probe whose outcome is not known yet.
	if !p.parked || p.quarantine || p.needsReadBack || p.probing || p.lane == nil || len(p.queue) > 0 {
		return
	}
	p.parking = parking{}
	p.clearObstacle()
	pk.sink.log.Info("parked partition can be written again", "topic", p.tp.Topic, "partition", p.tp.Partition)
	pk.holder.Ready(p.tp.Topic)
}

// unparkTopicLocked lets a topic that was adopted take records again, if it is parked.
func (pk *parker) unparkTopicLocked(t *topic) {
	if !t.parked {
		return
	}
	t.parking = parking{}
	pk.holder.Ready(t.name)
}
