// Package metrics defines every metric of outrelay: the name, unit and help of each series are here.
//
// A Set has its own registry, so several relays can run in one process, and tests do not share a global
// registry. Nothing blocks. The calls of the hot path ([Set.ObservePublish], [Set.ObserveLatency]) take a
// count, so that a batch costs one call. They allocate only the first time a topic occurs, and they do nothing
// on a nil Set. The number of labels is bounded: topics beyond [maxTopics] share the label "other".
package metrics

import (
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	dto "github.com/prometheus/client_model/go"
)

// maxTopics is how many topics have their own label. Envelopes name topics, so their number is not trusted.
const maxTopics = 1000

// OtherTopics is the common label of all topics beyond [maxTopics].
const OtherTopics = "other"

// Set has all metrics of one relay. Create it with [New]. Its fields are safe for concurrent use.
type Set struct {
	// Registry has all metrics below and the metrics of the Go runtime. /metrics serves it.
	Registry *prometheus.Registry

	Stream
	Delivery
	Ownership
	Outcomes
	Process

	Figures   Figures   // of the collections and the nodes, counted at intervals
	Telemetry Telemetry // of the exports by OTLP

	topics topics
}

// Stream has the metrics of reading the change stream.
type Stream struct {
	Lag            *Live                  // seconds: now − commit time of the oldest unresolved envelope; 0 if there is none
	TokenAge       *Live                  // seconds since the change stream's token last moved
	Read           prometheus.Counter     // envelopes read from the change stream
	ReadBytes      prometheus.Counter     // bytes of those envelopes
	Batches        prometheus.Counter     // responses of the change stream that carried events
	StreamState    *States                // {state}: 1 for the state the change stream is in
	StreamRestarts *prometheus.CounterVec // {reason}
	Gaps           *prometheus.CounterVec // {reason}
}

// Delivery has the metrics of sending records to Kafka.
type Delivery struct {
	Published      *prometheus.CounterVec // {topic, result}: use ObservePublish
	PublishLatency *Histogram             // seconds from commit to Kafka's ack: use ObserveLatency
	ProduceErrors  *prometheus.CounterVec // {error}: error responses of Kafka, by name
	// ThrottledSeconds counts the time for which the loops of the sink have waited for a quota of Kafka.
	ThrottledSeconds prometheus.Counter

	InflightRecords *Live // records sent to the sink and not acked yet
	InflightBytes   *Live // bytes of those records
	BudgetUsed      *Live // bytes of the memory budget in use (N13)
	Budget          *Live // bytes of the memory budget; of a slot, its share
	TicketWindow    *Live // events between the resolved position and the newest one read (N13)
	MaxTicketWindow *Live
}

// Ownership has the metrics of the lease, of checkpoints and of takeovers.
type Ownership struct {
	CheckpointSeconds *Histogram         // duration of one checkpoint's write
	CheckpointAge     *Live              // seconds since the last checkpoint was written
	Checkpoints       prometheus.Counter // checkpoints written

	LeaseOwner     prometheus.Gauge   // 1 while this process owns the watcher
	LeaseEpoch     prometheus.Gauge   // epoch last seen
	LeaseSuspended prometheus.Gauge   // 1 while the lease is past its local deadline and not yet known to be lost (N2)
	Takeovers      prometheus.Counter // acquisitions by this process
	LeaseLost      prometheus.Counter // ownerships that ended without a release
	RenewSeconds   *Histogram         // duration of one renewal

	ReadBack     prometheus.Counter // records read in read-backs
	ReadBackHits prometheus.Counter // envelopes not sent again because a read-back found them
	Quarantined  *Live              // partitions that wait for a marker (N4)
}

// Outcomes has the metrics of envelopes that are not simply delivered: waiting, dead, scheduled and purged envelopes.
type Outcomes struct {
	UnwritableRecords *prometheus.GaugeVec   // {topic, reason}: records held, given back or not taken
	Reconciled        *prometheus.CounterVec // {class}
	DeadLetters       *prometheus.CounterVec // {class}
	Dropped           *prometheus.CounterVec // {class}: expired, or dropped by a rule
	DueError          *Histogram             // seconds from the due time of a scheduled envelope to Kafka's ack
	Purged            prometheus.Counter     // delivered envelopes removed after their retention
}

// Process has the metrics of the process, which belong to no single slot.
type Process struct {
	OplogWindow    *Live                  // seconds between the first and the last entry of the oplog
	ConfigReloads  *prometheus.CounterVec // {what, result}: use Reloaded
	LoginsRejected *prometheus.CounterVec // {reason}: requests that the operator's listener rejects
	KafkaReachable prometheus.Gauge       // 1 while the cluster responds
	MongoReachable prometheus.Gauge       // 1 while the replica set responds
	Pool           Pool
}

// Pool has the metrics of the connections to MongoDB. The label client is stream or state.
type Pool struct {
	Connections     *prometheus.GaugeVec   // {client, state}: open, in_use; and waiting calls
	Checkouts       *prometheus.CounterVec // {client}: waits for a connection that ended with one
	CheckoutSeconds *prometheus.CounterVec // {client}: time of these waits
	CheckoutsFailed *prometheus.CounterVec // {client, reason}: waits that ended without a connection
}

// Result is the outcome of a record.
type Result uint8

// The results of outrelay_published_total.
const (
	Acked    Result = iota // Kafka acknowledged it
	Skipped                // a read-back found it in the topic
	Rejected               // Kafka or the relay rejected it
	nResults = 3
)

// String returns the label of the result.
func (r Result) String() string {
	switch r {
	case Acked:
		return "acked"
	case Skipped:
		return "skipped"
	case Rejected:
		return "rejected"
	}
	return "unknown"
}

var (
	// latencyBuckets reach from half a millisecond, the usual latency, to ten seconds, a takeover.
	latencyBuckets = []time.Duration{
		500 * time.Microsecond, time.Millisecond, 2 * time.Millisecond, 3 * time.Millisecond, 5 * time.Millisecond,
		10 * time.Millisecond, 20 * time.Millisecond, 50 * time.Millisecond, 100 * time.Millisecond,
		200 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 5 * time.Second, 10 * time.Second,
	}
	writeBuckets = latencyBuckets[1:]
)

// New returns a Set. version is a label of outrelay_build_info.
func New(version string) *Set {
	registry := prometheus.NewRegistry()
	metricSet := buildSet(registry, registry, registry)
	addBuildInfo(registry, version)
	return metricSet
}

// addBuildInfo adds the metrics of the program and the Go runtime.
func addBuildInfo(registry *prometheus.Registry, version string) {
	info := builder{registry}.newGaugeVec("build_info")
	info.WithLabelValues(version, runtime.Version()).Set(1)
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
}

// NewForSlots returns a Set for the process and one for each slot of a divided watcher (N28). The registry of the
// process serves all of them. Metrics of the process have no additional label. All others are served per slot,
// with the label `slot`, so that no series occurs twice.
func NewForSlots(version string, names []string) (process *Set, slots []*Set) {
	all := prometheus.NewRegistry()
	process = buildSet(all, all, prometheus.NewRegistry())
	addBuildInfo(all, version)

	for _, name := range names {
		labeled := prometheus.WrapRegistererWith(prometheus.Labels{"slot": name}, all)
		slots = append(slots, buildSet(all, prometheus.NewRegistry(), labeled))
	}
	return process, slots
}

// buildSet creates every metric. It registers the metrics of the process and of a slot separately.
func buildSet(registry *prometheus.Registry, process, slot prometheus.Registerer) *Set {
	ofProcess, ofSlot := builder{process}, builder{slot}
	return &Set{
		Registry:  registry,
		Process:   ofProcess.newProcess(),
		Figures:   ofProcess.newFigures(),
		Telemetry: ofProcess.newTelemetry(),
		Stream:    ofSlot.newStream(),
		Delivery:  ofSlot.newDelivery(),
		Ownership: ofSlot.newOwnership(),
		Outcomes:  ofSlot.newOutcomes(),
		topics:    topics{byName: make(map[string]*[nResults]prometheus.Counter)},
	}
}

// OrNew returns metricSet, or a Set that is not served if metricSet is nil. It is for configurations without metrics.
func OrNew(metricSet *Set) *Set {
	if metricSet == nil {
		return New("")
	}
	return metricSet
}

func (b builder) newStream() Stream {
	return Stream{
		Lag:            b.newLive("lag_seconds"),
		TokenAge:       b.newLive("token_age_seconds"),
		Read:           b.newCounter("read_total"),
		ReadBytes:      b.newCounter("read_bytes_total"),
		Batches:        b.newCounter("read_batches_total"),
		StreamState:    b.newStates("stream_state"),
		StreamRestarts: b.newCounterVec("stream_restarts_total"),
		Gaps:           b.newCounterVec("gaps_total"),
	}
}

func (b builder) newDelivery() Delivery {
	return Delivery{
		Published:        b.newCounterVec("published_total"),
		PublishLatency:   b.newHistogram("publish_latency_seconds", latencyBuckets),
		ProduceErrors:    b.newCounterVec("produce_errors_total"),
		ThrottledSeconds: b.newCounter("kafka_throttled_seconds_total"),

		InflightRecords: b.newLive("inflight_records"),
		InflightBytes:   b.newLive("inflight_bytes"),

		BudgetUsed:      b.newLive("budget_used_bytes"),
		Budget:          b.newLive("budget_bytes"),
		TicketWindow:    b.newLive("ticket_window"),
		MaxTicketWindow: b.newLive("ticket_window_max"),
	}
}

func (b builder) newOwnership() Ownership {
	return Ownership{
		CheckpointSeconds: b.newHistogram("checkpoint_seconds", writeBuckets),
		CheckpointAge:     b.newLive("checkpoint_age_seconds"),
		Checkpoints:       b.newCounter("checkpoints_total"),

		LeaseOwner:     b.newGauge("lease_owner"),
		LeaseEpoch:     b.newGauge("lease_epoch"),
		LeaseSuspended: b.newGauge("lease_suspended"),
		Takeovers:      b.newCounter("takeovers_total"),
		LeaseLost:      b.newCounter("lease_lost_total"),
		RenewSeconds:   b.newHistogram("lease_renew_seconds", writeBuckets),

		ReadBack:     b.newCounter("read_back_records_total"),
		ReadBackHits: b.newCounter("read_back_hits_total"),
		Quarantined:  b.newLive("quarantined_partitions"),
	}
}

func (b builder) newOutcomes() Outcomes {
	return Outcomes{
		UnwritableRecords: b.newGaugeVec("unwritable_records"),
		Reconciled:        b.newCounterVec("reconciled_total"),
		DeadLetters:       b.newCounterVec("dead_letters_total"),
		Dropped:           b.newCounterVec("dropped_total"),
		DueError:          b.newHistogram("scheduled_due_error_seconds", latencyBuckets),
		Purged:            b.newCounter("purged_total"),
	}
}

func (b builder) newProcess() Process {
	process := Process{
		OplogWindow:    b.newLive("oplog_window_seconds"),
		ConfigReloads:  b.newCounterVec("config_reloads_total"),
		LoginsRejected: b.newCounterVec("admin_rejected_total"),
		KafkaReachable: b.newGauge("kafka_reachable"),
		MongoReachable: b.newGauge("mongodb_reachable"),
		Pool: Pool{
			Connections:     b.newGaugeVec("mongodb_connections"),
			Checkouts:       b.newCounterVec("mongodb_checkouts_total"),
			CheckoutSeconds: b.newCounterVec("mongodb_checkout_seconds_total"),
			CheckoutsFailed: b.newCounterVec("mongodb_checkouts_failed_total"),
		},
	}

	// A series that begins at 0 shows its first increase.
	for _, what := range []Reload{Settings, Certificates} {
		for _, result := range []string{reloadApplied, reloadRejected} {
			process.ConfigReloads.WithLabelValues(string(what), result)
		}
	}
	return process
}

// ObservePublish counts n records of topic with result. It allocates only the first time the topic occurs.
func (s *Set) ObservePublish(topic string, result Result, n int) {
	if s == nil || n <= 0 || result >= nResults {
		return
	}
	s.topics.countersFor(topic, s.Published)[result].Add(float64(n))
}

// ObserveLatency counts n records that took duration from commit to ack. duration can be negative, because the clocks of two
// machines differ. It then counts as 0.
func (s *Set) ObserveLatency(duration time.Duration, n int) {
	if s == nil {
		return
	}
	s.PublishLatency.Observe(duration, n)
}

// Reload is a kind of content that was reloaded at run time.
type Reload string

// The values of the label what of outrelay_config_reloads_total.
const (
	Settings     Reload = "settings"     // the configuration, by SIGHUP
	Certificates Reload = "certificates" // changed TLS files, counted for each client or listener that uses them
)

// The values of its label result.
const (
	reloadApplied  = "applied"
	reloadRejected = "rejected"
)

// Reloaded counts one reload. ok reports whether the new content could be used.
func (s *Set) Reloaded(what Reload, ok bool) {
	if s == nil {
		return
	}

	result := reloadApplied
	if !ok {
		result = reloadRejected
	}
	s.ConfigReloads.WithLabelValues(string(what), result).Inc()
}

// topics caches the counters of each topic.
type topics struct {
	mu     sync.RWMutex
	byName map[string]*[nResults]prometheus.Counter
}

// countersFor returns the counters of the named topic, or the counters of OtherTopics if there are too many topics.
func (t *topics) countersFor(name string, vec *prometheus.CounterVec) *[nResults]prometheus.Counter {
	t.mu.RLock()
	counters := t.byName[name]
	full := len(t.byName) >= maxTopics
	other := t.byName[OtherTopics]
	t.mu.RUnlock()

	if counters != nil {
		return counters
	}
	if full && other != nil {
		return other
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.byName) >= maxTopics {
		name = OtherTopics
	}

	// Another goroutine may have added the topic in the meantime.
	if counters = t.byName[name]; counters != nil {
		return counters
	}
	counters = new([nResults]prometheus.Counter)
	for r := range Result(nResults) {
		counters[r] = vec.WithLabelValues(name, r.String())
	}
	t.byName[name] = counters
	return counters
}

// Bool returns the value of a gauge: 1 for true, 0 for false.
func Bool(isTrue bool) float64 {
	if isTrue {
		return 1
	}
	return 0
}

// GatherFrom returns the metrics of the set that current returns. While it returns nil, there are none.
func GatherFrom(current func() *Set) prometheus.Gatherer {
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		if metricSet := current(); metricSet != nil {
			return metricSet.Registry.Gather()
		}
		return nil, nil
	})
}
