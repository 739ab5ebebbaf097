package telemetry

import (
	"strconv"

	"github.com/outrelay/outrelay/internal/base/metrics/catalog"
)

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

// definitions are filled with the texts of the catalog.
var definitions = describe([]definition{
	{metric: Handled, kind: counter, name: "outrelay_consumer_handled"},
	{metric: Handled, kind: histogram, name: "outrelay_consumer_handle_seconds"},
	{metric: Duplicates, kind: counter, name: "outrelay_consumer_duplicates"},
	{metric: Unknown, kind: counter, name: "outrelay_consumer_unknown"},
	{metric: Failed, kind: counter, name: "outrelay_consumer_failures"},
	{metric: Discarded, kind: counter, name: "outrelay_consumer_dropped"},
	{metric: DeadLetters, kind: counter, name: "outrelay_consumer_dead_letters"},
	{metric: Waiting, kind: gauge, name: "outrelay_consumer_waiting_messages"},
	{metric: OldestWaiting, kind: age, name: "outrelay_consumer_oldest_waiting_seconds"},
	{metric: Stray, kind: gauge, name: "outrelay_consumer_stray_messages"},
	{metric: Lag, kind: gauge, name: "outrelay_consumer_lag_messages"},
	{metric: Oldest, kind: age, name: "outrelay_consumer_oldest_unfinished_seconds"},
	{metric: Held, kind: gauge, name: "outrelay_consumer_held_messages"},
	{metric: HeldBytes, kind: gauge, name: "outrelay_consumer_held_bytes"},
	{metric: Running, kind: gauge, name: "outrelay_consumer_running_lanes"},
	{metric: Assigned, kind: gauge, name: "outrelay_consumer_assigned_partitions"},
	{metric: Assigned, kind: occasions, name: "outrelay_consumer_generations"},
	{metric: Committed, kind: counter, name: "outrelay_consumer_commits"},
	{metric: Suspended, kind: gauge, name: "outrelay_consumer_suspended"},
	{metric: Connections, kind: gauge, name: "outrelay_service_connections"},
	{metric: Checkout, kind: histogram, name: "outrelay_service_checkout_seconds"},
	{metric: CheckoutFailed, kind: counter, name: "outrelay_service_checkouts_failed"},
	{metric: RateWaiting, kind: gauge, name: "outrelay_consumer_rate_waiting_lanes"},
	{metric: Appended, kind: counter, name: "outrelay_outbox_appended"},
})

// describe returns list with help and labels.
func describe(list []definition) []definition {
	for i := range list {
		name, _ := list[i].exposed()
		text := catalog.Find(name)
		list[i].help, list[i].labels = text.Help, text.Labels
	}
	return list
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
