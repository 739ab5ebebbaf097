package admin

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/service/inventory"
	"github.com/outrelay/outrelay/internal/service/lettercount"
)

// maxTopicLetters bounds the letters of one collection that are counted by topic.
const maxTopicLetters = 10_000

// Activity is the topics of a watcher and their latest deliveries, by the reports of its owners.
type Activity struct{ op Operator }

// Activity returns the activity of the watcher.
func (o Operator) Activity() Activity { return Activity{o} }

func (a Activity) openHistory() *nodes.History {
	return nodes.NewHistory(mongodb.Majority(a.op.State.Collection("history")))
}

// Minute is one minute of a watcher.
type Minute = nodes.Sample

// AllMinutes selects all minutes of the last day.
const AllMinutes = nodes.HistoryKept

// Minutes returns throughput and lag of a watcher of the state database in the newest minutes of the last day, one point a minute, oldest first. Minutes
// without an owner are missing. It reads about 35 bytes for each minute of each slot.
func (a Activity) Minutes(ctx context.Context, watcher string, newest int) ([]Minute, error) {
	return a.openHistory().Read(ctx, watcher, newest)
}

// TopicList has the topics of a watcher.
type TopicList struct {
	At     *time.Time      `json:"at,omitempty"` // when an owner reported last; nil if none did yet
	Topics []TopicFigures  `json:"topics"`
	Others activity.Others `json:"others"` // the topics that the list leaves out
	// LettersMore reports that a collection has more dead letters than are counted by topic: 10,000.
	LettersMore bool `json:"letters_more"`
}

// TopicFigures are the figures of one topic. Rates and latencies cover the last minute, as the owners report them
// every five seconds. They are 0 if nothing was acked.
type TopicFigures struct {
	Topic         string           `json:"topic"`          // "" for waiting events and letters of no topic
	Rate          float64          `json:"rate"`           // acked records per second
	BytesRate     float64          `json:"bytes_rate"`     // bytes per second of these records, before compression
	P50MS         float64          `json:"p50_ms"`         // from the commit to the ack, in milliseconds, to about a quarter; of several slots, the mean
	P99MS         float64          `json:"p99_ms"`         // of several slots, the greatest
	LastAt        *time.Time       `json:"last_at"`        // when the last record was acked
	LastPartition int32            `json:"last_partition"` // place of that record
	LastOffset    int64            `json:"last_offset"`
	Waiting       int64            `json:"waiting"` // events that are parked, blocked, or before a retry
	OldestS       float64          `json:"oldest_s"`
	Target        *UnwritableTopic `json:"target,omitempty"` // the owner's report if the topic cannot be written now
	Dead          int64            `json:"dead"`             // letters of the relay that are not requeued
	HandlerDead   int64            `json:"handler_dead"`     // letters of handlers that are not requeued
	Recent        []int32          `json:"recent"`           // acked records of the last hour in 20 parts of three minutes, oldest first; empty if there were none
	// RecentP50MS and RecentP99MS are the greatest latencies of a minute in each of these parts, also of several slots; empty if nothing was
	// measured.
	RecentP50MS []float64 `json:"recent_p50_ms"`
	RecentP99MS []float64 `json:"recent_p99_ms"`

	records int64 // of the last minute
}

// Topics returns the activity, the waiting events and the dead letters by topic. It reads one document for each slot, the
// figures of the overview, and the topics of at most 10,000 letters of each collection.
func (a Activity) Topics(ctx context.Context) (TopicList, error) {
	list := TopicList{Topics: []TopicFigures{}}
	reports, err := a.openHistory().ReadActivity(ctx, a.op.Watcher)
	if err != nil {
		return list, err
	}
	pending, err := a.op.Waiting().Topics(ctx)
	if err != nil {
		return list, err
	}

	rows := topicRows{}
	for i := range reports {
		list.addReport(rows, &reports[i])
	}
	for _, p := range pending {
		figures := rows.find(p.Topic)
		figures.Waiting, figures.OldestS, figures.Target = p.Retry+p.Blocked+p.Parked, p.OldestAgeS, p.Target
	}
	if list.LettersMore, err = a.countLetters(ctx, rows); err != nil {
		return list, err
	}

	list.addRows(rows)
	return list, nil
}

// topicRows has the figures by topic.
type topicRows map[string]*TopicFigures

// find returns the figures of a topic, which it adds if they are missing.
func (r topicRows) find(topic string) *TopicFigures {
	figures := r[topic]
	if figures == nil {
		figures = &TopicFigures{Topic: topic, Recent: []int32{}, RecentP50MS: []float64{}, RecentP99MS: []float64{}}
		r[topic] = figures
	}
	return figures
}

// addReport adds the report of a slot.
func (l *TopicList) addReport(rows topicRows, report *activity.Report) {
	if l.At == nil || report.At.After(*l.At) {
		at := report.At.UTC()
		l.At = &at
	}
	l.Others.Topics += report.Others.Topics
	l.Others.Rate += report.Others.Rate

	for i := range report.Topics {
		from := &report.Topics[i]
		figures := rows.find(from.Topic)
		figures.Rate += from.Rate
		figures.BytesRate += from.Bytes
		// Medians cannot be added, so the records of each slot are their weight.
		if sum := figures.records + from.Records; sum > 0 {
			figures.P50MS = (figures.P50MS*float64(figures.records) + from.P50MS*float64(from.Records)) / float64(sum)
			figures.records = sum
		}
		// The greatest of the slots is an upper bound of the common percentile.
		figures.P99MS = max(figures.P99MS, from.P99MS)
		figures.addRecent(from.Recent)
		figures.RecentP50MS = mergeLatencies(figures.RecentP50MS, from.RecentP50)
		figures.RecentP99MS = mergeLatencies(figures.RecentP99MS, from.RecentP99)
		if figures.LastAt == nil || from.LastAt.After(*figures.LastAt) {
			at := from.LastAt.UTC()
			figures.LastAt, figures.LastPartition, figures.LastOffset = &at, from.Partition, from.Offset
		}
	}
}

// addRecent adds the records of another slot in each part of the last hour.
func (t *TopicFigures) addRecent(recent []int32) {
	if len(t.Recent) < len(recent) {
		t.Recent = make([]int32, len(recent))
	}
	for i, n := range recent {
		t.Recent[i] += n
	}
}

// mergeLatencies returns the greatest of the milliseconds in list and the microseconds of another slot in each part of the last hour.
func mergeLatencies(list []float64, recent []int32) []float64 {
	if len(list) < len(recent) {
		list = make([]float64, len(recent))
	}
	for i, us := range recent {
		list[i] = max(list[i], float64(us)/1000)
	}
	return list
}

// countLetters adds the dead letters of the relay and of handlers. more reports that a collection has more letters than
// are counted.
func (a Activity) countLetters(ctx context.Context, rows topicRows) (more bool, err error) {
	// The page counts every two seconds, so only a bounded number of databases is searched.
	names, err := a.op.collectionNames(ctx)
	if err != nil {
		return false, err
	}
	databases := inventory.ChooseDatabases(consumerDatabases(a.op), outboxes.DatabasesOf(names))
	counts, more, err := letters.CountTopics(ctx, a.op.letters(), a.op.Watcher, maxTopicLetters)
	if err != nil {
		return more, err
	}
	for topic, n := range counts {
		rows.find(topic).Dead += n
	}

	err = a.op.forEachService(ctx, databases, func(db string, found inventory.Inventory) error {
		for _, coll := range found.Letters {
			letters := mongodb.Majority(a.op.database(db).Collection(coll))
			counts, err := mongodb.CountValues(ctx, letters, lettercount.Open(), "_id.topic", maxTopicLetters)
			if err != nil {
				return err
			}
			var read int64
			for topic, n := range counts {
				rows.find(topic).HandlerDead += n
				read += n
			}
			more = more || read == maxTopicLetters
		}
		return nil
	})
	return more, err
}

// urgency is the place of a topic in the list: 0 if it cannot be written, 1 if events wait or are dead, 2 otherwise.
func (t *TopicFigures) urgency() int {
	switch {
	case t.Target != nil:
		return 0
	case t.Waiting > 0 || t.Dead > 0 || t.HandlerDead > 0:
		return 1
	}
	return 2
}

// addRows adds the rows to the list: topics that need attention, then the busiest ones.
func (l *TopicList) addRows(rows topicRows) {
	for _, t := range rows {
		l.Topics = append(l.Topics, *t)
	}
	// A quiet topic with waiting events must not be cut off.
	slices.SortFunc(l.Topics, func(a, b TopicFigures) int {
		return cmp.Or(cmp.Compare(a.urgency(), b.urgency()), cmp.Compare(b.Rate, a.Rate), compareTimes(b.LastAt, a.LastAt), strings.Compare(a.Topic, b.Topic))
	})

	topics, others := activity.CutTopics(l.Topics, func(figures *TopicFigures) float64 { return figures.Rate })
	l.Topics = topics
	l.Others.Topics += others.Topics
	l.Others.Rate += others.Rate
}

// RecentEvents are some of the last records that the watcher has delivered.
type RecentEvents struct {
	At     *time.Time    `json:"at,omitempty"` // when an owner reported last; nil if none did yet
	Events []RecentEvent `json:"events"`       // newest first
}

// RecentEvent is one record in Kafka, without its payload.
type RecentEvent struct {
	activity.Event
	LatencyMS *float64 `json:"latency_ms,omitempty"` // from the commit to the ack
}

// Recent returns the last records that owners have sampled, at most 50 for each slot, of one topic or of all if topic is "".
// An owner samples the first ten events of each second. So the list is complete for a quiet watcher, and a sample of a
// busy one. It reads one document for each slot, and nothing from Kafka.
func (a Activity) Recent(ctx context.Context, topic string) (RecentEvents, error) {
	out := RecentEvents{Events: []RecentEvent{}}
	reports, err := a.openHistory().ReadActivity(ctx, a.op.Watcher)
	if err != nil {
		return out, err
	}

	for i := range reports {
		at := reports[i].At.UTC()
		if out.At == nil || at.After(*out.At) {
			out.At = &at
		}
		for _, e := range reports[i].Events {
			if topic == "" || e.Topic == topic {
				out.Events = append(out.Events, newRecentEvent(e))
			}
		}
	}
	slices.SortStableFunc(out.Events, func(a, b RecentEvent) int { return b.AckedAt.Compare(a.AckedAt) })
	return out, nil
}

func newRecentEvent(event activity.Event) RecentEvent {
	event.AckedAt = event.AckedAt.UTC()
	recentEvent := RecentEvent{Event: event}
	if !event.CommittedAt.IsZero() {
		recentEvent.CommittedAt = event.CommittedAt.UTC()
		// The clocks of two machines differ.
		latency := max(float64(event.AckedAt.Sub(event.CommittedAt).Microseconds())/1000, 0)
		recentEvent.LatencyMS = &latency
	}
	return recentEvent
}
