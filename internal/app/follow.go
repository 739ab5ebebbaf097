package app

import (
	"fmt"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/tracing"
)

var _ pipeline.Follower = (*tracing.Delivery)(nil)

// newExporter returns the exporter of the configured collector, or nil if no collector is
// configured.
func newExporter(cfg config.Config, version string, r *Relay) (*tracing.Exporter, error) {
	tls, err := cfg.OTel.TLS.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("otel.tls: %w", err)
	}

	m := &r.metrics.Telemetry
	e, err := tracing.New(tracing.Config{
		Endpoint:        cfg.OTel.Endpoint.Reveal(),
		Token:           cfg.OTel.Token.Reveal(),
		TLS:             tls,
		SamplePercent:   cfg.OTel.SamplePercent,
		SpansPerSecond:  cfg.OTel.SpansPerSecond,
		MetricsInterval: cfg.OTel.MetricsInterval,
		Version:         version,
		Node:            cfg.Node,
		Watcher:         cfg.Watcher,
		Gatherer:        r.metrics.Registry,
		Log:             r.log,
		OnLimited:       m.Limited.Inc,
		OnExport: func(signal string, err error) {
			result := "ok"
			if err != nil {
				result = "failed"
			}
			m.Exports.WithLabelValues(signal, result).Inc()
		},
	})
	if err != nil {
		return nil, fmt.Errorf("otel: %w", err)
	}
	return e, nil
}

// newTap returns a tap that follows deliveries for exemplars and, if e is not nil, for spans.
func newTap(e *tracing.Exporter, m *metrics.Set, clock *serverClock) *tracing.Tap {
	return tracing.NewTap(e, m.PublishLatency.Exemplar, clock.now)
}

// traceDelivery attaches a trace to item if the delivery of p.ev is sampled.
func (p *pump) traceDelivery(item *pipeline.Item) {
	if d := p.tap.Begin(item.Records, p.ev.DB, p.ev.Coll, item.CommitMS); d != nil {
		item.Follow = d
	}
}

// traceAnswers returns answer. If the delivery of e is sampled, the returned function also reports
// the answers to the trace.
func (o *outlet) traceAnswers(e *outboxes.Envelope, recs []record.Record,
	answer func(record.Published),
) func(record.Published) {
	d := o.t.tap.Begin(recs, e.DB, e.Coll, 0)
	if d == nil {
		return answer
	}

	return func(p record.Published) {
		for _, a := range p.Answers {
			switch {
			case a.Refusal != nil:
				d.NotSent(a.Topic, string(a.Refusal.Class), true)
			case a.Held != nil:
				d.NotSent(a.Topic, "held", false)
			default:
				d.Acked(record.TopicPartition{Topic: a.Topic, Partition: a.Partition}, a.Offset)
			}
		}
		answer(p)
	}
}
