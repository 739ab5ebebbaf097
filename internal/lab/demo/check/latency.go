package check

import (
	"math"
	"sync"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// maxLatency is the largest value of the histogram. Larger values are counted as maxLatency.
const maxLatency = time.Hour

// Latency measures the time from an acknowledged commit to the record at a consumer. All methods
// may be called from any goroutine.
//
// An outage begins when the owner is killed, and ends with the first record of the next owner.
// Events that were committed during an outage measure the outage and not the relay, so the
// percentiles leave them out. Max includes them. If the record arrives before its commit is
// acknowledged, its latency is 0.
type Latency struct {
	mu        sync.Mutex
	histogram *hdrhistogram.Histogram // microseconds
	longest   time.Duration
	leftOut   int

	inOutage      bool
	keepOutage    bool      // the percentiles include the events of the outage
	outageFrom    time.Time // when the owner was killed
	acquiredAt    time.Time // when the next owner acquired the lease; zero before that
	firstRecord   time.Time // when the first record after acquiredAt was received
	outageSamples []sample  // all since outageFrom; whether they count is decided at the end
}

type sample struct{ committed, seen time.Time }

// NewLatency returns an empty Latency.
func NewLatency() *Latency {
	return &Latency{histogram: hdrhistogram.New(1, maxLatency.Microseconds(), 3)}
}

// Add adds one event. It must be called once per event, when both times are known.
func (l *Latency) Add(committed, seen time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()

	l.longest = max(l.longest, seen.Sub(committed))
	if !l.inOutage {
		l.recordSampleLocked(sample{committed, seen})
		return
	}
	l.outageSamples = append(l.outageSamples, sample{committed, seen})
	l.resolveOutageLocked()
}

// Samples is whether the percentiles have the events of an outage.
type Samples bool

// The percentiles keep the events, or leave them out.
const (
	KeepSamples Samples = true
	OmitSamples Samples = false
)

// Outage begins an outage at the time when the owner was made to stop. If there is an outage already, it continues.
func (l *Latency) Outage(from time.Time, samples Samples) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.inOutage {
		l.acquiredAt = time.Time{}
		l.keepOutage = l.keepOutage && samples == KeepSamples
		return
	}
	l.inOutage = true
	l.keepOutage = samples == KeepSamples
	l.outageFrom = from
	l.acquiredAt = time.Time{}
}

// Acquired records when the next owner acquired the lease. The outage ends with the first record
// received after that.
func (l *Latency) Acquired(acquiredAt time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()

	if l.inOutage && l.acquiredAt.IsZero() {
		l.acquiredAt = acquiredAt
		l.resolveOutageLocked()
	}
}

// Outside reports whether there is no outage now, and returns the time of the record that ended the
// last one.
func (l *Latency) Outside() (firstRecord time.Time, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()

	return l.firstRecord, !l.inOutage
}

// resolveOutageLocked ends the outage if its first record was received.
func (l *Latency) resolveOutageLocked() {
	if l.acquiredAt.IsZero() {
		return
	}

	var first time.Time
	for _, s := range l.outageSamples {
		// Records that were seen before the takeover come from the killed owner.
		if !s.seen.Before(l.acquiredAt) && (first.IsZero() || s.seen.Before(first)) {
			first = s.seen
		}
	}
	if first.IsZero() {
		return
	}

	for _, s := range l.outageSamples {
		l.recordAfterOutageLocked(s, first)
	}
	l.inOutage = false
	l.firstRecord = first
	l.outageSamples = nil
}

// recordAfterOutageLocked records sample unless it was committed during the outage that ended at first.
func (l *Latency) recordAfterOutageLocked(sample sample, first time.Time) {
	if !l.keepOutage && sample.committed.After(l.outageFrom) && sample.committed.Before(first) {
		l.leftOut++
		return
	}
	l.recordSampleLocked(sample)
}

// recordSampleLocked records sample unless it was committed during the last outage.
func (l *Latency) recordSampleLocked(sample sample) {
	// The record of an event of the last outage may be received after the record that ended the
	// outage.
	if !l.keepOutage && sample.committed.After(l.outageFrom) && sample.committed.Before(l.firstRecord) {
		l.leftOut++
		return
	}

	duration := min(max(sample.seen.Sub(sample.committed), 0), maxLatency)
	_ = l.histogram.RecordValue(duration.Microseconds()) // within the bounds
}

// Figures are milliseconds, rounded to the microsecond. They are 0 if no event was measured.
type Figures struct {
	P50, P99, Max float64 // Max includes the events of outages
	Measured      int     // events in the percentiles
	LeftOut       int     // events of outages
}

// Figures returns the figures of all events so far. Events of a current outage count as left out.
func (l *Latency) Figures() Figures {
	l.mu.Lock()
	defer l.mu.Unlock()

	figures := Figures{
		Max:      toMilliseconds(l.longest),
		Measured: int(l.histogram.TotalCount()),
		LeftOut:  l.leftOut + len(l.outageSamples),
	}
	if figures.Measured > 0 {
		figures.P50 = toMilliseconds(time.Duration(l.histogram.ValueAtQuantile(50)) * time.Microsecond)
		figures.P99 = toMilliseconds(time.Duration(l.histogram.ValueAtQuantile(99)) * time.Microsecond)
	}
	return figures
}

func toMilliseconds(duration time.Duration) float64 {
	return math.Round(float64(duration)/float64(time.Microsecond)) / 1000
}
