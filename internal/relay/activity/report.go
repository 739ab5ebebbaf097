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
}

// AlignRecent returns Recent as it is now, after the time of its report.
func (t *Topic) AlignRecent(reported, now time.Time) []int32 {
	if len(t.Recent) != recentParts {
		return nil
	}

	shift := recentNumber(now) - recentNumber(reported)
	if shift >= recentParts {
		return nil
	}
	// A clock that differs does not move the parts back.
	shift = max(shift, 0)
	return append(slices.Clone(t.Recent[shift:]), make([]int32, shift)...)
}

// Others are the topics that a report does not list.
type Others struct {
	Topics int     `bson:"topics" json:"topics"` // at least so many
	Rate   float64 `bson:"rate" json:"rate"`
}

// Event is a record in Kafka, without its payload.
type Event struct {
	ID          string    `bson:"id" json:"id"`
	Type        string    `bson:"type" json:"type"`
	Key         string    `bson:"key" json:"key"` // at most 256 bytes, as are ID and Type
	Collection  string    `bson:"collection" json:"collection"`
	Topic       string    `bson:"topic" json:"topic"`
	Partition   int32     `bson:"partition" json:"partition"`
	Offset      int64     `bson:"offset" json:"offset"`
	CommittedAt time.Time `bson:"committedAt,omitempty" json:"committed_at,omitzero"` // zero for a retried, scheduled or replayed event
	AckedAt     time.Time `bson:"ackedAt" json:"acked_at"`
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

// sumFigures returns the activity in a topic. began is the time at which the log began.
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
	return Topic{
		Topic:     name,
		Rate:      float64(sum.records) / seconds,
		Bytes:     float64(sum.bytes) / seconds,
		Records:   sum.records,
		P50MS:     toMilliseconds(sum.latencies.quantile(0.5)),
		P99MS:     toMilliseconds(sum.latencies.quantile(0.99)),
		LastAt:    t.lastAcked,
		Partition: t.lastPartition,
		Offset:    t.lastOffset,
		Recent:    t.listRecent(now),
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
		log := l.topics[p.Topic]
		if log == nil || len(p.Recent) != recentParts {
			continue
		}
		for part, records := range p.Recent {
			if records > 0 && newest > recentParts {
				log.addRecent(newest-recentParts+1+int64(part), records)
			}
		}
	}

	events := slices.Clone(previous.Events)
	slices.Reverse(events)
	l.events = keepNewest(append(events, l.events...))
}
