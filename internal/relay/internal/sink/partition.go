package sink

import (
	"slices"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/relay/internal/fence"
)

// partition is one partition of a topic. The sink's lock guards all fields. While busy, the head
// batch belongs to the loop instead.
type partition struct {
	topic *topic
	tp    record.TopicPartition

	queue     []*pending // in order; the head is the batch that is sent
	openBatch *pending   // the last of queue while it still takes records
	nextSeq   int32      // sequence of the next batch that is frozen
	ackedEnd  int64      // one above the last offset that was acked, or that is known to be in the log
	away      bool       // Kafka has reported since the last ack that the partition does not exist

	enqueued uint64 // number of records ever queued

	leader       int32
	leaderEpoch  int32     // the highest that a broker has named
	epochSeen    time.Time // when a broker last named that epoch
	loop         *loop     // of the leader; nil without a leader
	slow         bool      // its last request was rejected after a long wait: it uses a separate loop
	busy         bool      // a loop works on the head, or its acks are being called
	ready        bool      // it is in the ready list of its loop
	retryPending bool      // a timer will add it to the ready list

	quarantine bool // N4: nothing may be sent

	// N11: it was parked with a batch that may be in the log. Nothing may be sent until a
	// takeover has read the partition back.
	needsReadBack bool

	hits     *fence.Known // N7: the records that the takeover has found, until the reread ends
	unread   bool         // N8: its log is another one, so a record of the reread, or of a side delivery, may be a second copy
	lastUsed time.Time    // last batch or marker of our producer id, for the keep-alive
	tries    int

	obstruction
	parking

	// The partition is parked because of error responses of brokers. Only a successful response
	// shows that it can be written again, so single records are let through to probe it.
	probing  bool
	probedAt time.Time // when it was parked, or when the last probe was let through
}

// obstruction is the obstacle that keeps a partition or a topic from being written, for State.
type obstruction struct {
	obstacle        obstacle
	since           time.Time // when the first of the current obstacles appeared
	kindSince       time.Time // since when the obstacle is of its kind
	unwritableSince time.Time // since when the obstacle is one that parks
	logged          obstacle  // the obstacle that was logged last since then
}

// settleTime is how long a topic that is created may have no leader, or not exist yet, before that is logged and its records may
// not fill the memory.
const settleTime = 2 * time.Second

// creation is how a missing topic is created.
type creation bool

const (
	createdByHand        creation = false
	createdAutomatically creation = true
)

// takeLog reports whether the obstacle has to be logged now. It does so once for each obstacle.
func (o *obstruction) takeLog(now time.Time, creation creation) bool {
	if o.obstacle == o.logged || o.isSettling(now, creation, settleTime) {
		return false
	}
	o.logged = o.obstacle
	return true
}

// isSettling reports whether the obstacle may only be that the topic is being created, which takes at most limit.
func (o *obstruction) isSettling(now time.Time, creation creation, limit time.Duration) bool {
	mayBeNew := o.obstacle.kind == kindNoLeader || creation == createdAutomatically && o.obstacle.kind == kindMissing
	return mayBeNew && now.Sub(o.kindSince) < limit
}

// updateObstacle replaces the obstacle. since keeps the time of the first obstacle until the
// obstruction is cleared.
func (o *obstruction) updateObstacle(next obstacle, now time.Time, parks func(obstacle) bool) {
	if o.obstacle.none() {
		o.since, o.logged = now, obstacle{}
	}
	if next.kind != o.obstacle.kind {
		o.kindSince = now
	}
	if parks(next) && !parks(o.obstacle) {
		o.unwritableSince = now
	}

	o.obstacle = next
}

// parking is the state of a parked topic or partition (N11).
type parking struct {
	parked     bool
	turnedAway int // stream records that were given back, or not taken, since then
	sides      int // the same of side deliveries, at least: they are tried again and again
}

// turnAway counts records that a parked target gives back or does not take.
func (p *parking) turnAway(stream, sides int) {
	p.turnedAway += stream
	p.sides = max(p.sides, sides)
}

// turnAwayRecord counts the record of ticket, which is not taken, if the target is parked.
func (p *parking) turnAwayRecord(ticket record.Ticket) {
	switch {
	case !p.parked:
	case ticket.IsSide():
		p.turnAway(0, 1)
	default:
		p.turnAway(1, 0)
	}
}

// waitingRecords returns how many records wait in the store until the target can be written, at least. A side delivery may be a stream
// record that was given back before.
func (p *parking) waitingRecords() int { return max(p.turnedAway, p.sides) }

// pending is one batch, open or frozen.
type pending struct {
	builder          batch.Builder
	tickets          []record.Ticket
	wantedPartitions []int32 // the partition that each record wants, or AnyPartition; only in the waiting list of a topic
	reserved         int     // bytes that its records have reserved

	frozen        bool // a loop has it: the bytes and boundaries stay the same until the outcome is definite
	maybeAppended bool
	seq           int32
	firstSent     time.Time
	uncompressed  bool // the broker could not read it compressed
	corruptCount  int  // how often the broker found it corrupt
	closedCount   int  // how often in succession the connection was closed at a request with this batch alone
	stalledCount  int  // how often a request with this batch alone has timed out
}

func (p *partition) setObstacle(found obstacle, now time.Time) {
	p.updateObstacle(found, now, obstacle.parksPartition)
}

// clearObstacle notes that batches of p can be sent again.
func (p *partition) clearObstacle() { p.obstacle, p.tries = obstacle{}, 0 }

// countRecords counts the records of batches.
func countRecords(queue []*pending) int {
	n := 0
	for _, b := range queue {
		n += len(b.tickets)
	}
	return n
}

// needsLeader reports whether records wait for a leader.
func (p *partition) needsLeader() bool {
	return p.loop == nil && (len(p.queue) > 0 || p.parked) && !p.quarantine
}

// markReadyLocked adds p to the ready list of its loop if its head batch may be sent now.
func (p *partition) markReadyLocked() {
	if p.busy || p.ready || p.retryPending || p.quarantine || p.needsReadBack {
		return
	}
	if p.loop == nil || len(p.queue) == 0 {
		return
	}
	p.ready = true
	p.loop.ready = append(p.loop.ready, p)
}

// unmarkReadyLocked removes p from the ready list of its loop, if it is in it.
func (p *partition) unmarkReadyLocked() {
	if !p.ready {
		return
	}
	p.ready = false
	if i := slices.Index(p.loop.ready, p); i >= 0 {
		p.loop.ready = slices.Delete(p.loop.ready, i, i+1)
	}
}

// popHead removes the head batch.
func (p *partition) popHead() {
	if p.openBatch == p.queue[0] {
		p.openBatch = nil
	}
	n := copy(p.queue, p.queue[1:])
	p.queue[n] = nil
	p.queue = p.queue[:n]
}

// replaceHead puts batches in the place of the head.
func (p *partition) replaceHead(batches ...*pending) {
	if p.openBatch == p.queue[0] {
		p.openBatch = nil
	}
	rest := p.queue[1:]
	p.queue = append(append(make([]*pending, 0, len(batches)+len(rest)), batches...), rest...)
}

// topic is one target of records.
type topic struct {
	name       string
	partitions []*partition // empty until the topic is open

	waiting     []*pending // records that wait for the topic to be opened, in order
	nextAttempt time.Time  // the earliest time of the next attempt to open it
	missing     bool       // it has to be created
	newUntil    time.Time  // it was just created: until then it is tried every createdPoll, and not created again

	maxBytes    int  // max.message.bytes; 0: unknown
	batchLimit  int  // the largest batch that the sink builds
	configStale bool // maxBytes and compacted have to be read again

	compacted  bool // N10: it keeps only the newest record of a key, or its policy is unknown
	keepsTimes bool // records keep the timestamps of their producers; false: the broker sets them, or that is unknown

	earlierCount int                  // the number of partitions before the takeover: keys hashed to other partitions then
	hitsLeft     int                  // hits of the read-back that are left in all partitions
	sentKeys     map[sentKey]struct{} // N10: keys of which a record was sent in this reread
	allKeysSent  bool                 // N10: there were too many sentKeys, so every key counts as sent

	// N8: a part of the log of a partition was not read, so a record of the reread, or of a side delivery, may be a second copy. That holds in
	// all partitions: the topic may have grown since, or the envelope may name another partition now.
	unread bool

	obstruction
	parking
}

// isOpen reports whether records can be sent to the partitions of the topic.
func (t *topic) isOpen() bool { return len(t.partitions) > 0 }

func (t *topic) setObstacle(found obstacle, now time.Time) {
	t.updateObstacle(found, now, obstacle.parksTopic)
}
