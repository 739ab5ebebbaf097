package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxCollections is how many collections have their own label. The figures of the others are added up under
// "other".
const maxCollections = 100

// Figures are counts of the documents in collections, and of the nodes. One owner of a watcher counts at intervals, with bounded queries. At
// a takeover two owners may count for a moment, so dashboards must use the maximum, not the sum.
type Figures struct {
	Pending     *prometheus.GaugeVec // {collection}: envelopes after the checkpoint
	OldestAge   *prometheus.GaugeVec // {collection}: seconds since the oldest of them was written
	Waiting     *prometheus.GaugeVec // {reason}
	Scheduled   *prometheus.GaugeVec // {collection}
	Overdue     *prometheus.GaugeVec // {collection}: seconds since the first overdue envelope was due; 0 if none is
	DeadLetters *prometheus.GaugeVec // {collection}
	Inbox       *prometheus.GaugeVec // {collection}: marks of handled messages, and claims
	Handlers    *prometheus.GaugeVec // {group, handler, class}: dead letters of handlers that were not requeued
	Indexes     *prometheus.GaugeVec // {collection}: missing declared indexes
	Nodes       *prometheus.GaugeVec // {state}: alive or stale
	Age         *Live                // seconds since the last count
	Limit       prometheus.Gauge     // number at which counting stops
	Watcher     *prometheus.GaugeVec // {watcher, node}: always 1
	Problems    *Ages                // {kind, object, severity}: seconds since each problem began
	Ready       *Live                // 1 while /readyz reports ready
}

// Telemetry counts the exports by OTLP.
type Telemetry struct {
	Exports *prometheus.CounterVec // {signal, result}
	Limited prometheus.Counter     // deliveries without a span because of the rate limit
}

func (b builder) newFigures() Figures {
	return Figures{
		Pending:   b.newGaugeVec("pending_envelopes"),
		OldestAge: b.newGaugeVec("oldest_pending_seconds"),

		Waiting:   b.newGaugeVec("waiting_envelopes"),
		Scheduled: b.newGaugeVec("scheduled_envelopes"),
		Overdue:   b.newGaugeVec("scheduled_overdue_seconds"),

		DeadLetters: b.newGaugeVec("dead_letters_stored"),
		Inbox:       b.newGaugeVec("inbox_entries"),
		Handlers:    b.newGaugeVec("handler_dead_letters"),
		Indexes:     b.newGaugeVec("missing_indexes"),

		Nodes:   b.newGaugeVec("nodes"),
		Watcher: b.newGaugeVec("watcher_info"),
		Ready:   b.newLive("ready"),

		Problems: b.newAges("problem_seconds"),

		Age:   b.newLive("figures_age_seconds"),
		Limit: b.newGauge("figures_limit"),
	}
}

func (b builder) newTelemetry() Telemetry {
	return Telemetry{
		Exports: b.newCounterVec("otlp_exports_total"),
		Limited: b.newCounter("spans_limited_total"),
	}
}

// Collection has the counts of one outbox.
type Collection struct {
	Name                                        string
	Pending, Scheduled, DeadLetters, Inbox      int64
	OldestAge, Overdue                          time.Duration
	HasPending, HasScheduled, HasDead, HasInbox bool // whether the count succeeded
	MissingIndexes                              int
	HasIndexes                                  bool
}

// showMu serializes Show.
var showMu sync.Mutex

// Clear removes the figures of a process that does not count any more.
func (f *Figures) Clear() { f.Show(nil, nil, nil) }

// Show replaces the figures of all collections, of the letters of handlers, and of the waiting envelopes by reason. It adds up those beyond
// [maxCollections] and [maxSeries]. Of the ages beyond them it shows the highest.
func (f *Figures) Show(list []Collection, handlers []HandlerLetters, waiting map[string]int64) {
	showMu.Lock()
	defer showMu.Unlock()
	f.Waiting.Reset()
	for reason, n := range waiting {
		f.Waiting.WithLabelValues(reason).Set(float64(n))
	}
	f.showHandlers(handlers)
	f.showCollections(list)
}

func (f *Figures) showCollections(list []Collection) {
	for _, v := range []*prometheus.GaugeVec{
		f.Pending, f.OldestAge, f.Scheduled, f.Overdue, f.DeadLetters, f.Inbox, f.Indexes,
	} {
		// A collection that no longer exists must not keep its last figures.
		v.Reset()
	}

	var oldestAge, overdue time.Duration
	for i, c := range list {
		name := c.Name
		if i >= maxCollections {
			name = OtherTopics
			oldestAge, overdue = max(oldestAge, c.OldestAge), max(overdue, c.Overdue)
			c.OldestAge, c.Overdue = oldestAge, overdue
		}

		if c.HasPending {
			f.Pending.WithLabelValues(name).Add(float64(c.Pending))
			f.OldestAge.WithLabelValues(name).Set(c.OldestAge.Seconds())
		}
		if c.HasScheduled {
			f.Scheduled.WithLabelValues(name).Add(float64(c.Scheduled))
			f.Overdue.WithLabelValues(name).Set(c.Overdue.Seconds())
		}
		if c.HasDead {
			f.DeadLetters.WithLabelValues(name).Add(float64(c.DeadLetters))
		}
		if c.HasIndexes {
			f.Indexes.WithLabelValues(name).Add(float64(c.MissingIndexes))
		}
		if c.HasInbox {
			f.Inbox.WithLabelValues(name).Add(float64(c.Inbox))
		}
	}
}

// maxSeries is how many handlers and classes have series of their own.
const maxSeries = 100

// HandlerLetters counts the dead letters of a handler with the same class.
type HandlerLetters struct {
	Group, Handler, Class string
	Dead                  int64
}

func (f *Figures) showHandlers(list []HandlerLetters) {
	f.Handlers.Reset()
	for i, h := range list {
		if i >= maxSeries {
			h.Group, h.Handler, h.Class = OtherTopics, OtherTopics, OtherTopics
		}
		f.Handlers.WithLabelValues(h.Group, h.Handler, h.Class).Add(float64(h.Dead))
	}
}
