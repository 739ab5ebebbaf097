// Package consumermetrics provides Prometheus metrics of a consumer. Pass an Observer to the consumer with
// consumer.WithObserver. Create one Observer for each consumer group and registry.
//
// No method waits for I/O, and each attempt of a handler costs a few atomic additions. Labels are
// bounded: handlers, the actions of policies, topics and partitions of the group, and the reasons
// of a suspension.
package consumermetrics

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrelay/outrelay/pkg/consumer"
)

// buckets are the upper bounds of the handle time in seconds, from half a millisecond to ten seconds.
var buckets = []float64{.0005, .001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10}

// Observer has the metrics of one consumer group. Create it with [New].
type Observer struct {
	handled    *prometheus.CounterVec
	duplicates *prometheus.CounterVec
	dropped    *prometheus.CounterVec
	failed     *prometheus.CounterVec
	took       *prometheus.HistogramVec
	lag        *prometheus.GaugeVec
	oldest     *prometheus.GaugeVec
	messages   prometheus.Gauge
	bytes      prometheus.Gauge
	running    prometheus.Gauge
	partitions prometheus.Gauge
	rebalances prometheus.Counter
	commits    *prometheus.CounterVec
	suspended  *prometheus.GaugeVec

	mu     sync.Mutex
	series map[place]bool // partitions that have a series
}

type place struct {
	topic     string
	partition int32
}

var _ consumer.Observer = (*Observer)(nil)

// New registers the metrics of group. Each of them has the label group. New returns an error if the
// registry has them already.
func New(registry prometheus.Registerer, group string) (*Observer, error) {
	in := prometheus.WrapRegistererWith(prometheus.Labels{"group": group}, registry)
	counter := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Namespace: "outrelay", Subsystem: "consumer", Name: name, Help: help}
	}
	gauge := func(name, help string) prometheus.GaugeOpts {
		return prometheus.GaugeOpts{Namespace: "outrelay", Subsystem: "consumer", Name: name, Help: help}
	}

	o := &Observer{
		handled:    prometheus.NewCounterVec(counter("handled_total", "Messages handled."), []string{"handler"}),
		duplicates: prometheus.NewCounterVec(counter("duplicates_total", "Messages that the inbox knew."), []string{"handler"}),
		dropped:    prometheus.NewCounterVec(counter("dropped_total", "Messages dropped by their handler, or let pass unhandled."), []string{"handler"}),
		failed:     prometheus.NewCounterVec(counter("failures_total", "Attempts that failed, by what follows."), []string{"handler", "action"}),
		took: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Namespace: "outrelay", Subsystem: "consumer", Name: "handle_seconds", Help: "Time of one successful attempt with its commit.", Buckets: buckets,
		}, []string{"handler"}),
		lag: prometheus.NewGaugeVec(gauge("lag_messages", "Offsets of the partition beyond those that are finished."), []string{"topic", "partition"}),
		oldest: prometheus.NewGaugeVec(gauge("oldest_unfinished_seconds", "Age of the oldest message of the partition that was read and is not finished."),
			[]string{"topic", "partition"}),
		messages:   prometheus.NewGauge(gauge("held_messages", "Messages held in memory.")),
		bytes:      prometheus.NewGauge(gauge("held_bytes", "Bytes of the messages held in memory.")),
		running:    prometheus.NewGauge(gauge("running_lanes", "Lanes that run a handler.")),
		partitions: prometheus.NewGauge(gauge("assigned_partitions", "Partitions that this member has.")),
		rebalances: prometheus.NewCounter(counter("generations_total", "Generations of the group that this member took part in.")),
		commits:    prometheus.NewCounterVec(counter("commits_total", "Commits of offsets by what became of them."), []string{"result"}),
		suspended:  prometheus.NewGaugeVec(gauge("suspended", "1 while nothing is fetched, by reason."), []string{"reason"}),
		series:     map[place]bool{},
	}

	for _, c := range []prometheus.Collector{
		o.handled, o.duplicates, o.dropped, o.failed, o.took, o.lag, o.oldest, o.messages, o.bytes, o.running, o.partitions,
		o.rebalances, o.commits, o.suspended,
	} {
		if err := in.Register(c); err != nil {
			return nil, fmt.Errorf("registering the metrics of group %s: %w", group, err)
		}
	}
	return o, nil
}

// Handled implements [consumer.Observer].
func (o *Observer) Handled(handler string, n int, took time.Duration) {
	o.handled.WithLabelValues(handler).Add(float64(n))
	o.took.WithLabelValues(handler).Observe(took.Seconds())
}

// Duplicates implements [consumer.Observer].
func (o *Observer) Duplicates(handler string, n int) {
	o.duplicates.WithLabelValues(handler).Add(float64(n))
}

// Dropped implements [consumer.Observer].
func (o *Observer) Dropped(handler string, n int) {
	o.dropped.WithLabelValues(handler).Add(float64(n))
}

// Failed implements [consumer.Observer].
func (o *Observer) Failed(handler, next string) {
	o.failed.WithLabelValues(handler, next).Inc()
}

// Lag implements [consumer.Observer].
func (o *Observer) Lag(topic string, partition int32, n int64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.series[place{topic, partition}] = true
	o.lag.WithLabelValues(topic, strconv.Itoa(int(partition))).Set(float64(n))
}

// Oldest implements [consumer.Observer].
func (o *Observer) Oldest(topic string, partition int32, age time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.series[place{topic, partition}] = true
	o.oldest.WithLabelValues(topic, strconv.Itoa(int(partition))).Set(age.Seconds())
}

// Held implements [consumer.Observer].
func (o *Observer) Held(messages, bytes int64) {
	o.messages.Set(float64(messages))
	o.bytes.Set(float64(bytes))
}

// Running implements [consumer.Observer].
func (o *Observer) Running(n int) { o.running.Set(float64(n)) }

// Assigned implements [consumer.Observer]. It removes the series of all partitions. Otherwise the
// lag of a partition that moved to another member would keep its last value.
func (o *Observer) Assigned(partitions int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.partitions.Set(float64(partitions))
	o.rebalances.Inc()
	for p := range o.series {
		o.lag.DeleteLabelValues(p.topic, strconv.Itoa(int(p.partition)))
		o.oldest.DeleteLabelValues(p.topic, strconv.Itoa(int(p.partition)))
	}
	clear(o.series)
}

// Committed implements [consumer.Observer].
func (o *Observer) Committed(err error) {
	result := "ok"
	if err != nil {
		result = "failed"
	}
	o.commits.WithLabelValues(result).Inc()
}

// Suspended implements [consumer.Observer].
func (o *Observer) Suspended(reason string, on bool) {
	v := 0.0
	if on {
		v = 1
	}
	o.suspended.WithLabelValues(reason).Set(v)
}
