package process

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/outrelay/outrelay/internal/changestream"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/connect"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/metrics"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/internal/pipeline"
	"github.com/outrelay/outrelay/internal/readiness"
	"github.com/outrelay/outrelay/internal/routing"
	"github.com/outrelay/outrelay/internal/sink"
	"github.com/outrelay/outrelay/internal/slots"
	termpkg "github.com/outrelay/outrelay/internal/term"
	"github.com/outrelay/outrelay/internal/tracing"
)

// newShared returns what the slots share, except for the balancer.
func newShared(cfg config.Config, version string, log *slog.Logger, m *metrics.Set) (s *termpkg.Shared, err error) {
	s = &termpkg.Shared{
		Config:  cfg,
		Log:     log,
		Version: version,
		Steps:   migrate.Steps(),
		State:   readiness.NewState(cfg.HTTP.Readiness, time.Now, log),
		Pool:    pipeline.NewPool(int64(cfg.Limits.Memory), cfg.Limits.Tickets),
		Pace:    termpkg.DefaultPace,
	}
	if s.Scope, err = changestream.ParseScope(cfg.Watch, connect.StateCollections(cfg)...); err != nil {
		return nil, fmt.Errorf("watch: %w", err)
	}
	if s.Router, err = connect.Router(cfg); err != nil {
		return nil, err
	}
	if s.Preset, err = routing.NewPreset(cfg.Preset()); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}

	if s.Mongo, err = connect.NewClients(cfg.MongoDB, cfg.Node, cfg.Slots, log, m); err != nil {
		return nil, err
	}
	if s.Kafka, err = connect.NewKafka(cfg, log, m); err != nil {
		return nil, err
	}
	if s.Sinks, err = newSinks(cfg, s.Kafka, log, m); err != nil {
		return nil, err
	}
	if s.Exporter, err = newExporter(cfg, version, m, log); err != nil {
		return nil, err
	}

	db := s.Mongo.State.Database(cfg.MongoDB.State)
	s.Nodes = nodes.NewNodes(db.Collection("nodes"))
	s.Registry = outboxes.NewRegistry(db.Collection("collections"))
	s.Divisions = slots.NewDivisions(db)
	return s, nil
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
