package telemetry

import "strconv"

// definition describes how OTel and Prometheus export a metric. Some metrics have several.
type definition struct {
	metric Metric
	kind   kind
	name   string // without the suffix of counters
	help   string
	labels []string
}

type kind uint8

const (
	counter   kind = iota // adds N
	occasions             // counts measurements
	gauge                 // N
	age                   // a gauge of Took, in seconds
	histogram             // of Took, in seconds
)

var definitions = []definition{
	{Handled, counter, "outrelay_consumer_handled", "Messages handled.", []string{"group", "handler"}},
	{Handled, histogram, "outrelay_consumer_handle_seconds", "Time of one successful attempt with its commit.", []string{"group", "handler"}},
	{Duplicates, counter, "outrelay_consumer_duplicates", "Messages that the inbox knew.", []string{"group", "handler"}},
	{Unknown, counter, "outrelay_consumer_unknown", "Messages that no handler takes.", []string{"group"}},
	{Failed, counter, "outrelay_consumer_failures", "Attempts that failed, by the action that follows.", []string{"group", "handler", "action"}},
	{Discarded, counter, "outrelay_consumer_dropped", "Messages that passed without being handled.", []string{"group", "handler"}},
	{DeadLetters, counter, "outrelay_consumer_dead_letters", "Messages that became dead letters.", []string{"group", "handler", "class"}},
	{Waiting, gauge, "outrelay_consumer_waiting_messages", "Messages set aside for a retry, in the whole group.", []string{"group", "handler"}},
	{OldestWaiting, age, "outrelay_consumer_oldest_waiting_seconds", "Time since the first failure of the oldest message set aside.", []string{"group", "handler"}},
	{Stray, gauge, "outrelay_consumer_stray_messages", "Messages set aside for a topic, a partition or a handler that is gone.", []string{"group", "handler", "topic", "reason"}},
	{Lag, gauge, "outrelay_consumer_lag_messages", "Unfinished offsets of the partition.", []string{"group", "topic", "partition"}},
	{Oldest, age, "outrelay_consumer_oldest_unfinished_seconds", "Age of the oldest message of the partition that was read and is not finished.", []string{"group", "topic", "partition"}},
	{Held, gauge, "outrelay_consumer_held_messages", "Messages held in memory.", []string{"group"}},
	{HeldBytes, gauge, "outrelay_consumer_held_bytes", "Bytes of the messages held in memory.", []string{"group"}},
	{Running, gauge, "outrelay_consumer_running_lanes", "Lanes that run a handler.", []string{"group"}},
	{Assigned, gauge, "outrelay_consumer_assigned_partitions", "Partitions that this member has.", []string{"group"}},
	{Assigned, occasions, "outrelay_consumer_generations", "Generations of the group that this member took part in.", []string{"group"}},
	{Committed, counter, "outrelay_consumer_commits", "Commits of offsets by their result.", []string{"group", "result"}},
	{Suspended, gauge, "outrelay_consumer_suspended", "1 while nothing is fetched, or a handler takes nothing, by reason.", []string{"group", "handler", "reason"}},
	{Appended, counter, "outrelay_outbox_appended", "Events appended, also by transactions that are rolled back later.", nil},
}

// buckets are the upper bounds of histograms in seconds, from half a millisecond to ten seconds.
var buckets = []float64{.0005, .001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10}

// label returns the value of a label.
func (m *Measurement) label(name string) string {
	switch name {
	case "group":
		return m.Group
	case "handler":
		return m.Handler
	case "topic":
		return m.Topic
	case "partition":
		return strconv.Itoa(int(m.Partition))
	default:
		return m.Reason
	}
}
