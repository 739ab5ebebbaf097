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
	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/sink"
)

// NewKafka returns the client of the configured cluster. It does no I/O.
func NewKafka(cfg config.Config, log *slog.Logger, m *metrics.Set) (*kafkawire.Client, error) {
	m = metrics.OrNew(m)
	tls, err := cfg.Kafka.TLS.Source(log, func(ok bool) { m.Reloaded(metrics.Certificates, ok) })
	if err != nil {
		return nil, fmt.Errorf("kafka.tls: %w", err)
	}

	c := kafkawire.Config{
		Brokers:    cfg.Kafka.Brokers,
		CurrentTLS: tls,
		Reachable:  func(ok bool) { m.KafkaReachable.Set(boolGauge(ok)) },
	}
	if s := cfg.Kafka.SASL; s != nil {
		password := s.Password
		c.SASL = &kafkawire.SASL{
			Mechanism: strings.ToUpper(s.Mechanism),
			User:      s.Username,
			Password:  func() (string, error) { return password.Reveal(), nil },
		}
	}
	return kafkawire.NewClient(c)
}

// newSinks returns the opener of the relay's sinks. It does no I/O.
func newSinks(cfg config.Config, client *kafkawire.Client, log *slog.Logger, m *metrics.Set) (*sink.Opener, error) {
	c := sink.Config{
		Compression:    cfg.Kafka.Compression,
		RequestTimeout: cfg.Kafka.RequestTimeout,
		Lanes:          cfg.Kafka.Lanes,
		ParkBytes:      int64(cfg.Limits.Memory),
		Log:            log,
		Metrics:        m,
	}
	if t := cfg.Topics.Create; t != nil {
		c.Create = &kafkawire.TopicCreate{
			Partitions:  max(t.Partitions, 0),
			Replication: max(t.Replication, 0),
			Configs:     t.Configs,
		}
	}
	return sink.NewOpener(c, client)
}

// recordFenceEvent appends an event of the fence to the events log, in the background.
func (t *term) recordFenceEvent(e fence.Event) {
	if !t.fenceEvents.addEvent(e) {
		return
	}
	t.runInBackground(func(ctx context.Context) {
		t.fenceEvents.writeEach(func(e fence.Event, n int) {
			kind := nodes.Kind("kafka_" + strings.ReplaceAll(string(e.Kind), "-", "_"))
			t.appendEvent(ctx, kind, bson.D{
				{Key: "topic", Value: e.Topic},
				{Key: "text", Value: e.Text},
				{Key: "count", Value: n},
			})
		})
	})
}

// fenceEvents collects events of the fence while earlier events are written. A cluster that was
// recreated causes one event for each of its partitions.
type fenceEvents struct {
	mu      sync.Mutex
	waiting map[fence.EventKind]countedEvent
	writing bool // writeEach runs
}

// countedEvent is the first of several events of a kind, and their number.
type countedEvent struct {
	first fence.Event
	n     int
}

// addEvent adds an event. It reports whether the caller has to call writeEach.
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

// writeEach calls write once for each kind of waiting events. It repeats that until no events wait.
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

// registerGauges sets the sources of the metrics that are computed at each scrape.
func (r *runner) registerGauges() {
	m := r.metrics
	ofTerm := func(f func(t *term) float64) func() float64 {
		return func() float64 {
			if t := r.current.get(); t != nil {
				return f(t)
			}
			return 0
		}
	}

	// A standby reports the limits that it would have if all slots ran in this process.
	limits := func() (bytes, tickets int64) {
		if t := r.current.get(); t != nil {
			return t.dispatcher.Limits()
		}
		return int64(r.cfg.Limits.Memory), int64(r.cfg.Limits.Tickets)
	}
	m.Budget.SetSource(func() float64 {
		bytes, _ := limits()
		return float64(bytes)
	})
	m.MaxTicketWindow.SetSource(func() float64 {
		_, tickets := limits()
		return float64(tickets)
	})

	m.Lag.SetSource(ofTerm(func(t *term) float64 { return t.dispatcher.Lag(t.slot.relay.clock.now()).Seconds() }))
	m.TokenAge.SetSource(ofTerm(func(t *term) float64 { return t.tokenAge().Seconds() }))
	m.TicketWindow.SetSource(ofTerm(func(t *term) float64 {
		n, _ := t.dispatcher.Unresolved()
		return float64(n)
	}))
	m.BudgetUsed.SetSource(ofTerm(func(t *term) float64 {
		_, b := t.dispatcher.Unresolved()
		return float64(b)
	}))
}

// tokenAge returns the age of the watermark, by the server's clock. It returns 0 if the watermark
// has no time.
func (t *term) tokenAge() time.Duration {
	pos, ok := t.dispatcher.Reached()
	if !ok {
		return 0
	}
	ts, ok := pos.Time()
	if !ok {
		return 0
	}
	return max(t.slot.relay.clock.now().Sub(time.Unix(int64(ts.T), 0)), 0)
}

// nodeAlive reports whether a node that the lease is pinned to is alive. If the node cannot be
// looked up, it returns true, so that the pin stays.
func (r *Relay) nodeAlive(ctx context.Context, node string) bool {
	ok, err := r.nodes.Alive(ctx, node, staleAfter)
	if err != nil && !errors.Is(err, context.Canceled) {
		r.log.Debug("cannot look up the pinned node", "node", node, "reason", err)
		return true
	}
	return ok
}
