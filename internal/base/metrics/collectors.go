package metrics

import (
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/outrelay/outrelay/internal/base/metrics/catalog"
)

const namespace = "outrelay"

// builder creates metrics with the prefix outrelay and registers them.
type builder struct{ registerer prometheus.Registerer }

// registerMetric registers collector and returns it.
func registerMetric[C prometheus.Collector](builder builder, collector C) C {
	builder.registerer.MustRegister(collector)
	return collector
}

// describe returns the options of a metric, and the names of its labels, with the texts of the catalog.
func describe(name string) (opts prometheus.Opts, labels []string) {
	metric := catalog.Find(prometheus.BuildFQName(namespace, "", name))
	return prometheus.Opts{Name: metric.Name, Help: metric.Help}, metric.Labels
}

func (b builder) newCounter(name string) prometheus.Counter {
	opts, _ := describe(name)
	return registerMetric(b, prometheus.NewCounter(prometheus.CounterOpts(opts)))
}

func (b builder) newCounterVec(name string) *prometheus.CounterVec {
	opts, labels := describe(name)
	return registerMetric(b, prometheus.NewCounterVec(prometheus.CounterOpts(opts), labels))
}

func (b builder) newGauge(name string) prometheus.Gauge {
	opts, _ := describe(name)
	return registerMetric(b, prometheus.NewGauge(prometheus.GaugeOpts(opts)))
}

func (b builder) newGaugeVec(name string) *prometheus.GaugeVec {
	opts, labels := describe(name)
	return registerMetric(b, prometheus.NewGaugeVec(prometheus.GaugeOpts(opts), labels))
}

func (b builder) newLive(name string) *Live {
	opts, _ := describe(name)
	return registerMetric(b, &Live{Gauge: prometheus.NewGauge(prometheus.GaugeOpts(opts))})
}

func (b builder) newAges(name string) *Ages {
	opts, labels := describe(name)
	return registerMetric(b, &Ages{GaugeVec: prometheus.NewGaugeVec(prometheus.GaugeOpts(opts), labels)})
}

func (b builder) newStates(name string) *States {
	return &States{vec: b.newGaugeVec(name)}
}

func (b builder) newHistogram(name string, bounds []time.Duration) *Histogram {
	opts, _ := describe(name)
	return registerMetric(b, newHistogram(opts.Name, opts.Help, bounds))
}

// Live is a gauge whose value can be computed at the time of the scrape. An age or a lag that only a loop sets
// would stand still, and look healthy, when the loop hangs.
type Live struct {
	prometheus.Gauge
	source atomic.Pointer[func() float64]
}

// SetSource makes source the source of the value. If source is nil, the value is the one last set. If source returns NaN, the value is
// unknown, and there is no series. source must not block.
func (l *Live) SetSource(source func() float64) {
	if source == nil {
		l.source.Store(nil)
		return
	}
	l.source.Store(&source)
}

// Collect implements [prometheus.Collector].
func (l *Live) Collect(ch chan<- prometheus.Metric) {
	if source := l.source.Load(); source != nil {
		value := (*source)()
		if math.IsNaN(value) {
			return
		}
		l.Set(value)
	}
	l.Gauge.Collect(ch)
}

// Ages has one gauge for each thing that has an age at the time of the scrape.
type Ages struct {
	*prometheus.GaugeVec
	mu     sync.Mutex
	source atomic.Pointer[func() []Age]
}

// Age is the age of a thing, with the values of its labels.
type Age struct {
	Labels []string
	Age    time.Duration
}

// SetSource makes source the source of the ages. source must not block.
func (a *Ages) SetSource(source func() []Age) { a.source.Store(&source) }

// Collect implements [prometheus.Collector].
func (a *Ages) Collect(ch chan<- prometheus.Metric) {
	// Two scrapes at the same time must not remove each other's series.
	a.mu.Lock()
	defer a.mu.Unlock()
	a.Reset()
	if source := a.source.Load(); source != nil {
		for _, one := range (*source)() {
			a.WithLabelValues(one.Labels...).Set(one.Age.Seconds())
		}
	}
	a.GaugeVec.Collect(ch)
}

// States has one gauge per state. Exactly one of them is 1.
type States struct {
	mu      sync.Mutex
	vec     *prometheus.GaugeVec
	current string
}

// SetCurrent makes state the current one.
func (s *States) SetCurrent(state string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current == state {
		return
	}

	if s.current != "" {
		s.vec.WithLabelValues(s.current).Set(0)
	}
	s.vec.WithLabelValues(state).Set(1)
	s.current = state
}

// Histogram counts durations. Unlike the library's histogram, Observe takes a count, so the records of one
// batch cost one observation. Observe needs no lock and no allocation.
type Histogram struct {
	desc      *prometheus.Desc
	bounds    []time.Duration
	counts    []atomic.Uint64                       // one per bound, and one for longer durations
	exemplars []atomic.Pointer[prometheus.Exemplar] // the last one of each bucket, if any

	// sum has the bits of a float64, in seconds. Integer nanoseconds would overflow after a backlog of days.
	sum atomic.Uint64
}

func newHistogram(name, help string, bounds []time.Duration) *Histogram {
	return &Histogram{
		desc:      prometheus.NewDesc(name, help, nil, nil),
		bounds:    bounds,
		counts:    make([]atomic.Uint64, len(bounds)+1),
		exemplars: make([]atomic.Pointer[prometheus.Exemplar], len(bounds)+1),
	}
}

// bucketIndex returns the index of the bucket of duration.
func (h *Histogram) bucketIndex(duration time.Duration) int {
	i := 0
	for i < len(h.bounds) && duration > h.bounds[i] {
		i++
	}
	return i
}

// Exemplar records the trace of one observation. Observe counts the observation. Scrapers that request
// OpenMetrics get the last exemplar of each bucket. On a nil Histogram it does nothing.
func (h *Histogram) Exemplar(duration time.Duration, traceID, spanID string) {
	if h == nil {
		return
	}

	duration = max(duration, 0)
	h.exemplars[h.bucketIndex(duration)].Store(&prometheus.Exemplar{
		Value: duration.Seconds(), Labels: prometheus.Labels{"trace_id": traceID, "span_id": spanID}, Timestamp: time.Now(),
	})
}

// Observe adds n observations of duration. A negative duration counts as 0. On a nil Histogram it does nothing.
func (h *Histogram) Observe(duration time.Duration, n int) {
	if h == nil || n <= 0 {
		return
	}

	duration = max(duration, 0)
	h.counts[h.bucketIndex(duration)].Add(uint64(n))
	// Several goroutines may add to the sum at the same time.
	for {
		old := h.sum.Load()
		if h.sum.CompareAndSwap(old, math.Float64bits(math.Float64frombits(old)+duration.Seconds()*float64(n))) {
			return
		}
	}
}

// Describe implements [prometheus.Collector].
func (h *Histogram) Describe(ch chan<- *prometheus.Desc) { ch <- h.desc }

// Collect implements [prometheus.Collector].
func (h *Histogram) Collect(ch chan<- prometheus.Metric) {
	buckets := make(map[float64]uint64, len(h.bounds))
	var total uint64
	for i, b := range h.bounds {
		// A bucket counts the values of the smaller ones too.
		total += h.counts[i].Load()
		buckets[b.Seconds()] = total
	}
	total += h.counts[len(h.bounds)].Load()

	metric := prometheus.MustNewConstHistogram(h.desc, total, math.Float64frombits(h.sum.Load()), buckets)
	var exemplars []prometheus.Exemplar
	for i := range h.exemplars {
		if exemplar := h.exemplars[i].Load(); exemplar != nil {
			exemplars = append(exemplars, *exemplar)
		}
	}

	// It returns an error if there are no exemplars, or no valid ones.
	if withExemplars, err := prometheus.NewMetricWithExemplars(metric, exemplars...); err == nil {
		metric = withExemplars
	}
	ch <- metric
}
