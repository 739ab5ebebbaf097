package activity

import (
	"cmp"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// The bounds of a log and of its reports.
const (
	// sampledPerSecond is the largest number of envelopes of one second that are sampled: the first ones.
	sampledPerSecond = 10
	// keptEvents is the number of sampled records that are kept: the newest.
	keptEvents = 50
	// listedTopics is the number of topics that a report, and a list of all owners' topics, contains: the busiest.
	listedTopics = 100

	maxTopics = 1000
	maxText   = 256 // bytes of each text of a sampled event

	// The window of rates and latencies has six parts. The oldest part is forgotten as a whole.
	partLength  = 10 * time.Second
	windowParts = 6

	// RecentMinutes is the length of the parts in [Topic.Recent].
	RecentMinutes = 3
	recentParts   = 20
)

// Log has the activity of one term of ownership. It is safe for concurrent use.
type Log struct {
	now   func() time.Time
	began time.Time

	mu        sync.Mutex
	topics    map[string]*topicLog
	others    *topicLog // of the topics above maxTopics; nil if there are none
	lastAcked time.Time

	events       []Event // newest last
	sampleSecond int64   // Unix seconds
	sampled      int     // envelopes in sampleSecond
	adopted      bool

	fullSecond atomic.Int64 // the second in which no more envelopes are sampled
}

// topicLog has the activity in one topic.
type topicLog struct {
	lastPartition int32 // place of the last record
	lastOffset    int64
	lastAcked     time.Time
	parts         [windowParts]part
	recent        [recentParts]recentPart
}

// recentPart has the number of records of three minutes, and the greatest quantiles of their latencies that were reported.
type recentPart struct {
	number   int64 // of the three minutes, since 1970
	records  int32
	p50, p99 int32 // microseconds
}

// findRecent returns the three minutes with this number, in which the caller counts.
func (t *topicLog) findRecent(number int64) *recentPart {
	part := &t.recent[number%recentParts]
	if part.number != number {
		*part = recentPart{number: number}
	}
	return part
}

// noteLatency keeps quantiles of the last minute if they are the greatest of these three minutes. The reports call it: a histogram for each
// part would be another count for each record.
func (t *topicLog) noteLatency(now time.Time, p50, p99 time.Duration) {
	if p99 == 0 {
		return
	}
	part := t.findRecent(recentNumber(now))
	part.p50, part.p99 = max(part.p50, toMicroseconds(p50)), max(part.p99, toMicroseconds(p99))
}

// toMicroseconds returns at most 35 minutes.
func toMicroseconds(duration time.Duration) int32 {
	return int32(min(duration.Microseconds(), math.MaxInt32))
}

// listRecent returns a value of each part of the last hour, or nil if all are zero.
func (t *topicLog) listRecent(now time.Time, valueOf func(*recentPart) int32) (list []int32) {
	newest := recentNumber(now)
	for i := range int64(recentParts) {
		number := newest - recentParts + 1 + i
		if part := &t.recent[number%recentParts]; part.number == number && valueOf(part) > 0 {
			if list == nil {
				list = make([]int32, recentParts)
			}
			list[i] = valueOf(part)
		}
	}
	return list
}

// recentNumber returns the number of the three minutes that contain moment.
func recentNumber(moment time.Time) int64 { return moment.Unix() / (RecentMinutes * 60) }

// part has the counts of ten seconds.
type part struct {
	number         int64 // of the ten seconds, since 1970
	records, bytes int64
	latencies      histogram
}

// New returns a log that begins now. now is the clock of commit times.
func New(now func() time.Time) *Log {
	return &Log{now: now, began: now(), topics: map[string]*topicLog{}}
}

// partNumber returns the number of the ten seconds that contain moment.
func partNumber(moment time.Time) int64 { return moment.Unix() / int64(partLength/time.Second) }

// Observe adds an acked batch.
func (l *Log) Observe(batch *record.AckedBatch) {
	l.mu.Lock()
	defer l.mu.Unlock()

	log := l.topicLocked(batch.TP.Topic)
	log.lastPartition, log.lastOffset, log.lastAcked = batch.TP.Partition, batch.Base+int64(batch.Records)-1, batch.At
	l.lastAcked = batch.At

	number := partNumber(batch.At)
	window := &log.parts[number%windowParts]
	if window.number != number {
		*window = part{number: number}
	}
	window.records += int64(batch.Records)
	window.bytes += int64(batch.Bytes)
	batch.EachLatency(window.latencies.add)
	log.findRecent(recentNumber(batch.At)).records += int32(batch.Records)
}

// topicLocked returns the entry of a topic, or that of all further topics if there are too many.
func (l *Log) topicLocked(name string) *topicLog {
	if log := l.topics[name]; log != nil {
		return log
	}
	if len(l.topics) < maxTopics {
		log := &topicLog{}
		l.topics[name] = log
		return log
	}
	if l.others == nil {
		l.others = &topicLog{}
	}
	return l.others
}

// Sample is one envelope whose records are kept when they are acked.
type Sample struct {
	log   *Log
	event Event
}

// Sample returns a sample of the envelope in view if there is room for another one in the second of now, and nil otherwise. recs are
// its records, and commitMS its commit time, or 0 if its delivery has nothing to do with its commit. Sample does not retain
// its arguments.
func (l *Log) Sample(now time.Time, recs []record.Record, view *envelope.View, db, coll []byte, commitMS int64) *Sample {
	if l == nil || len(recs) == 0 || !l.reserveSample(now.Unix()) {
		return nil
	}

	text := func(bytes []byte) string { return record.Shorten(string(bytes), maxText) }
	sample := &Sample{log: l, event: Event{
		ID:            text(recs[0].DocumentID()),
		Type:          text(view.Type),
		Key:           text(recs[0].Key),
		AggregateType: text(view.AggregateType),
		AggregateID:   text(view.AggregateID),
		Collection:    string(db) + "." + string(coll),
	}}
	for headers := view.Headers.Iter(); headers.Next(); {
		switch string(headers.Key) {
		case record.HeaderCorrelationID:
			sample.event.CorrelationID = cmp.Or(sample.event.CorrelationID, text(headers.Value))
		case record.HeaderCausationID:
			sample.event.CausationID = cmp.Or(sample.event.CausationID, text(headers.Value))
		}
	}
	if commitMS > 0 {
		sample.event.CommittedAt = time.UnixMilli(commitMS)
	}
	return sample
}

// reserveSample reports whether another envelope may be sampled in a second, and counts it.
func (l *Log) reserveSample(second int64) bool {
	// Nearly all envelopes of a busy watcher end here, without the lock.
	if l.fullSecond.Load() == second {
		return false
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	if second != l.sampleSecond {
		l.sampleSecond, l.sampled = second, 0
	}
	l.sampled++
	if l.sampled >= sampledPerSecond {
		l.fullSecond.Store(second)
	}
	return l.sampled <= sampledPerSecond
}

// Acked keeps the record for the topic of tp.
func (s *Sample) Acked(tp record.TopicPartition, offset int64) {
	event := s.event
	event.Topic, event.Partition, event.Offset, event.AckedAt = tp.Topic, tp.Partition, offset, s.log.now()

	log := s.log
	log.mu.Lock()
	defer log.mu.Unlock()
	log.events = keepNewest(append(log.events, event))
}

// NotSent does nothing: only records in Kafka are kept.
func (s *Sample) NotSent(topic, state string) {}

// Rejected does nothing either.
func (s *Sample) Rejected(topic, class string) {}

// keepNewest removes the oldest events above the limit, in place.
func keepNewest(events []Event) []Event {
	if excess := len(events) - keptEvents; excess > 0 {
		n := copy(events, events[excess:])
		clear(events[n:])
		events = events[:n]
	}
	return events
}
