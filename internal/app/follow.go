package app

import (
	"fmt"
	"log/slog"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/tracing"
)

var _ pipeline.Follower = (*tracing.Delivery)(nil)

// newExporter returns the exporter of the configured collector, or nil if no collector is
// configured.
func newExporter(cfg config.Config, version string, set *metrics.Set, log *slog.Logger) (*tracing.Exporter, error) {
	tls, err := cfg.OTel.TLS.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("otel.tls: %w", err)
	}

	m := &set.Telemetry
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
		Gatherer:        set.Registry,
		Log:             log,
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
