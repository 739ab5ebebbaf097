package activity

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// Report is the activity of a slot at one moment, as its owner stores it.
type Report struct {
	At     time.Time `bson:"at"`
	Topics []Topic   `bson:"topics"`
	Others Others    `bson:"others"`
	Events []Event   `bson:"events"` // newest first
}

// Topic is the activity in one topic. Rates and latencies cover the last minute.
type Topic struct {
	Topic     string    `bson:"topic"`
	Rate      float64   `bson:"rate"`  // records per second
	Bytes     float64   `bson:"bytes"` // per second, before compression
	P50MS     float64   `bson:"p50"`   // from commit to ack, in milliseconds; 0 if nothing was measured
	P99MS     float64   `bson:"p99"`
	Records   int64     `bson:"records"` // of the last minute
	LastAt    time.Time `bson:"lastAt"`
	Partition int32     `bson:"partition"` // of the last record
	Offset    int64     `bson:"offset"`
	// Recent has the records of the last hour in parts of [RecentMinutes], oldest first; it is empty if there were none.
	Recent []int32 `bson:"recent,omitempty"`
	// RecentP50 and RecentP99 are the greatest quantiles of the last minute that were reported in each of these parts, in microseconds.
	RecentP50 []int32 `bson:"recentP50,omitempty"`
	RecentP99 []int32 `bson:"recentP99,omitempty"`
}

// AlignRecent moves the parts of the last hour from the time of their report to now.
func (t *Topic) AlignRecent(reported, now time.Time) {
	// A clock that differs does not move the parts back.
	shift := max(recentNumber(now)-recentNumber(reported), 0)
	for _, list := range []*[]int32{&t.Recent, &t.RecentP50, &t.RecentP99} {
		if len(*list) != recentParts || shift >= recentParts {
			*list = nil
			continue
		}
		*list = append(slices.Clone((*list)[shift:]), make([]int32, shift)...)
	}
}

// Others are the topics that a report does not list.
type Others struct {
	Topics int     `bson:"topics" json:"topics"` // at least so many
	Rate   float64 `bson:"rate" json:"rate"`
}

// Event is a record in Kafka, without its payload.
type Event struct {
	ID         string `bson:"id" json:"id"`
	Type       string `bson:"type" json:"type"`
	Key        string `bson:"key" json:"key"` // at most 256 bytes, as are all texts of the event
	Collection string `bson:"collection" json:"collection"`
	// A sent scheduled event is in no outbox any more, so only this report has its aggregate and its cause.
	AggregateType string    `bson:"aggregateType,omitempty" json:"aggregate_type,omitempty"`
	AggregateID   string    `bson:"aggregateId,omitempty" json:"aggregate_id,omitempty"`
	CorrelationID string    `bson:"correlationId,omitempty" json:"correlation_id,omitempty"` // of its conversation; missing if its headers have none
	CausationID   string    `bson:"causationId,omitempty" json:"causation_id,omitempty"`
	Topic         string    `bson:"topic" json:"topic"`
	Partition     int32     `bson:"partition" json:"partition"`
	Offset        int64     `bson:"offset" json:"offset"`
	CommittedAt   time.Time `bson:"committedAt,omitempty" json:"committed_at,omitzero"` // zero for a retried, scheduled or replayed event
	AckedAt       time.Time `bson:"ackedAt" json:"acked_at"`
}

// ForgetRates leaves only what stays true after the term: places and events.
func (r *Report) ForgetRates() {
	r.Others.Rate = 0
	for i := range r.Topics {
		topic := &r.Topics[i]
		topic.Rate, topic.Bytes, topic.Records, topic.P50MS, topic.P99MS = 0, 0, 0, 0, 0
	}
}

// Latency returns quantiles of the latencies of the last minute in all topics, in milliseconds, or 0 if nothing was measured.
func (l *Log) Latency() (p50MS, p99MS float64) {
	newest := partNumber(l.now())
	var sum histogram

	l.mu.Lock()
	defer l.mu.Unlock()
	addTopic := func(topic *topicLog) {
		for i := range topic.parts {
			if part := &topic.parts[i]; part.number > newest-windowParts && part.number <= newest {
				sum.merge(&part.latencies)
			}
		}
	}
	for _, topic := range l.topics {
		addTopic(topic)
	}
	if l.others != nil {
		addTopic(l.others)
	}
	return toMilliseconds(sum.quantile(0.5)), toMilliseconds(sum.quantile(0.99))
}

// Report returns the activity at this moment. It returns false if nothing was acked for longer than the window: the last
// report has shown that.
func (l *Log) Report() (Report, bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	// After the window, the owner reports zeros once or twice, so that the last rates do not stay.
	const idle = (windowParts + 2) * partLength
	if l.lastAcked.IsZero() || now.Sub(l.lastAcked) > idle {
		return Report{}, false
	}

	report := Report{At: now, Events: slices.Clone(l.events)}
	slices.Reverse(report.Events)
	for name, t := range l.topics {
		report.Topics = append(report.Topics, t.sumFigures(name, l.began, now))
	}
	slices.SortFunc(report.Topics, func(a, b Topic) int {
		return cmp.Or(cmp.Compare(b.Rate, a.Rate), b.LastAt.Compare(a.LastAt), strings.Compare(a.Topic, b.Topic))
	})
	report.Topics, report.Others = CutTopics(report.Topics, func(topic *Topic) float64 { return topic.Rate })
	if l.others != nil {
		report.Others.Topics++
		report.Others.Rate += l.others.sumFigures("", l.began, now).Rate
	}
	return report, true
}

// CutTopics returns the first 100 elements of list, and the number and the rates of the others.
func CutTopics[T any](list []T, rateOf func(*T) float64) (listed []T, others Others) {
	for i := listedTopics; i < len(list); i++ {
		others.Topics++
		others.Rate += rateOf(&list[i])
	}
	return list[:min(len(list), listedTopics)], others
}

// sumFigures returns the activity in a topic, and keeps its latency of the last minute for the last hour. began is the time at which the
// log began.
func (t *topicLog) sumFigures(name string, began, now time.Time) Topic {
	newest := partNumber(now)
	var sum part
	for i := range t.parts {
		if part := &t.parts[i]; part.number > newest-windowParts && part.number <= newest {
			sum.records += part.records
			sum.bytes += part.bytes
			sum.latencies.merge(&part.latencies)
		}
	}

	// The newest part has just begun, so the window is between 50 and 60 seconds long, and shorter in a young term.
	window := now.Sub(time.Unix((newest-windowParts+1)*int64(partLength/time.Second), 0))
	seconds := max(min(window, now.Sub(began)), time.Second).Seconds()
	p50, p99 := sum.latencies.quantile(0.5), sum.latencies.quantile(0.99)
	t.noteLatency(now, p50, p99)
	return Topic{
		Topic:     name,
		Rate:      float64(sum.records) / seconds,
		Bytes:     float64(sum.bytes) / seconds,
		Records:   sum.records,
		P50MS:     toMilliseconds(p50),
		P99MS:     toMilliseconds(p99),
		LastAt:    t.lastAcked,
		Partition: t.lastPartition,
		Offset:    t.lastOffset,
		Recent:    t.listRecent(now, func(part *recentPart) int32 { return part.records }),
		RecentP50: t.listRecent(now, func(part *recentPart) int32 { return part.p50 }),
		RecentP99: t.listRecent(now, func(part *recentPart) int32 { return part.p99 }),
	}
}

func toMilliseconds(duration time.Duration) float64 { return float64(duration.Microseconds()) / 1000 }

// NeedsPrevious reports whether Adopt was not called yet.
func (l *Log) NeedsPrevious() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.adopted
}

// Adopt adds the last places, the last hour and the events of the previous owner's report, which the log's own reports replace.
func (l *Log) Adopt(previous Report) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.adopted = true
	newest := recentNumber(previous.At)
	for i := range previous.Topics {
		p := &previous.Topics[i]
		if l.topics[p.Topic] == nil && len(l.topics) < maxTopics {
			l.topics[p.Topic] = &topicLog{lastPartition: p.Partition, lastOffset: p.Offset, lastAcked: p.LastAt}
		}
		if log := l.topics[p.Topic]; log != nil && newest > recentParts {
			log.adoptRecent(p, newest)
		}
	}

	events := slices.Clone(previous.Events)
	slices.Reverse(events)
	l.events = keepNewest(append(events, l.events...))
}

// adoptRecent adds the last hour of a previous report. newest is the number of its newest part.
func (t *topicLog) adoptRecent(previous *Topic, newest int64) {
	eachPart := func(list []int32, add func(part *recentPart, value int32)) {
		if len(list) != recentParts {
			return
		}
		for i, value := range list {
			number := newest - recentParts + 1 + int64(i)
			// A newer part may have the place of this one already.
			if part := &t.recent[number%recentParts]; value > 0 && part.number <= number {
				add(t.findRecent(number), value)
			}
		}
	}
	eachPart(previous.Recent, func(part *recentPart, records int32) { part.records += records })
	eachPart(previous.RecentP50, func(part *recentPart, p50 int32) { part.p50 = max(part.p50, p50) })
	eachPart(previous.RecentP99, func(part *recentPart, p99 int32) { part.p99 = max(part.p99, p99) })
}
