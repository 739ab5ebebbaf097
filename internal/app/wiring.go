package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/kafka"
	"github.com/outrelay/outrelay/internal/kafka/fence"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/store"
)

// NewKafka makes the client of the configured cluster; it does no I/O.
func NewKafka(cfg config.Config, log *slog.Logger, m *metrics.Set) (*kafka.Client, error) {
	tls, err := cfg.Kafka.TLS.Source(log, func(ok bool) { m.Reloaded(metrics.Certificates, ok) })
	if err != nil {
		return nil, fmt.Errorf("kafka.tls: %w", err)
	}
	c := kafka.Config{
		Brokers: cfg.Kafka.Brokers, TLSNow: tls, Compression: cfg.Kafka.Compression, RequestTimeout: cfg.Kafka.RequestTimeout,
		Lanes: cfg.Kafka.Lanes, ParkBytes: int64(cfg.Limits.Memory), Log: log, Metrics: m,
	}
	if s := cfg.Kafka.SASL; s != nil {
		password := s.Password
		c.SASL = &kafka.SASL{Mechanism: strings.ToUpper(s.Mechanism), User: s.Username, Password: func() (string, error) { return password.Reveal(), nil }}
	}
	if t := cfg.Topics.Create; t != nil {
		c.Create = &kafka.TopicCreate{Partitions: max(t.Partitions, 0), Replication: max(t.Replication, 0), Configs: t.Configs}
	}
	return kafka.NewClient(c)
}

// recordFenceEvent notes what the fence found, for people who ask afterwards.
func (t *term) recordFenceEvent(e fence.Event) {
	if !t.fenceEvents.addEvent(e) {
		return
	}
	t.runInBackground(func(ctx context.Context) {
		t.fenceEvents.writeEach(func(e fence.Event, n int) {
			kind := store.Kind("kafka_" + strings.ReplaceAll(string(e.Kind), "-", "_"))
			t.appendEvent(ctx, kind, bson.D{{Key: "topic", Value: e.Topic}, {Key: "text", Value: e.Text}, {Key: "count", Value: n}})
		})
	})
}

// fenceEvents gathers events of the fence while others are written: a cluster that was made anew has one for each of its partitions.
type fenceEvents struct {
	mu      sync.Mutex
	waiting map[fence.EventKind]countedEvent
	writing bool // somebody is in each
}

// countedEvent is the first of several events of a kind, and their number.
type countedEvent struct {
	first fence.Event
	n     int
}

// addEvent notes an event and reports whether the caller has to see to a call of each.
func (f *fenceEvents) addEvent(e fence.Event) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.waiting == nil {
		f.waiting = map[fence.EventKind]countedEvent{}
	}
	g, more := f.waiting[e.Kind]
	if !more {
		g.first = e
	}
	g.n++
	f.waiting[e.Kind] = g
	first := !f.writing
	f.writing = true
	return first
}

// writeEach calls write for each kind of events that waits, until none is left.
func (f *fenceEvents) writeEach(write func(first fence.Event, n int)) {
	for {
		f.mu.Lock()
		list := f.waiting
		f.waiting = nil
		f.writing = len(list) > 0
		f.mu.Unlock()
		if len(list) == 0 {
			return
		}
		for _, g := range list {
			write(g.first, g.n)
		}
	}
}

// registerGauges gives the metrics that are read when they are scraped their sources.
func (r *runner) registerGauges() {
	m := r.metrics
	with := func(f func(t *term) float64) func() float64 {
		return func() float64 {
			if t := r.current.get(); t != nil {
				return f(t)
			}
			return 0
		}
	}
	limits := func() (bytes, tickets int64) { // a standby has what it would have if all slots ran here
		if t := r.current.get(); t != nil {
			return t.dispatcher.Limits()
		}
		return int64(r.cfg.Limits.Memory), int64(r.cfg.Limits.Tickets)
	}
	m.Budget.From(func() float64 { bytes, _ := limits(); return float64(bytes) })
	m.MaxTicketWindow.From(func() float64 { _, tickets := limits(); return float64(tickets) })
	m.Lag.From(with(func(t *term) float64 { return t.dispatcher.Lag(t.clock.now()).Seconds() }))
	m.TokenAge.From(with(func(t *term) float64 { return t.tokenAge().Seconds() }))
	m.TicketWindow.From(with(func(t *term) float64 { n, _ := t.dispatcher.Unresolved(); return float64(n) }))
	m.BudgetUsed.From(with(func(t *term) float64 { _, b := t.dispatcher.Unresolved(); return float64(b) }))
}

// tokenAge is the server's time minus that of the watermark.
func (t *term) tokenAge() time.Duration {
	pos, ok := t.dispatcher.Reached()
	if !ok {
		return 0
	}
	ts, ok := pos.Time()
	if !ok {
		return 0
	}
	return max(t.clock.now().Sub(time.Unix(int64(ts.T), 0)), 0)
}

// nodeAlive tells the lease whether a node that it is pinned to lives.
func (r *Relay) nodeAlive(ctx context.Context, node string) bool {
	ok, err := r.nodes.Alive(ctx, node, staleAfter)
	if err != nil && !errors.Is(err, context.Canceled) {
		r.log.Debug("the node that the watcher is pinned to cannot be looked up", "node", node, "reason", err)
		return true // what cannot be known keeps the pin
	}
	return ok
}
