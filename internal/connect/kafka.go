package connect

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"strings"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/metrics"
)

// NewKafka returns the client of the configured cluster. It connects at the first use. secured replaces
// kafka.tls, unless it is nil.
func NewKafka(cfg config.Config, secured *tls.Config, log *slog.Logger, m *metrics.Set) (*kafkawire.Client, error) {
	m = metrics.OrNew(m)
	current, err := cfg.Kafka.TLS.Source(log, func(ok bool) { m.Reloaded(metrics.Certificates, ok) })
	if err != nil {
		return nil, fmt.Errorf("kafka.tls: %w", err)
	}

	c := kafkawire.Config{
		Brokers:    cfg.Kafka.Brokers,
		TLS:        secured,
		CurrentTLS: current,
		Reachable:  func(ok bool) { m.KafkaReachable.Set(metrics.Bool(ok)) },
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

// CompactedTopics returns the compacted ones of topics, which keep only the newest record of each
// key, in the same order. It connects to Kafka for the call. It leaves out topics that do not exist
// or may not be described.
func CompactedTopics(ctx context.Context, cfg config.Config, topics []string) ([]string, error) {
	client, err := NewKafka(cfg, nil, slog.New(slog.DiscardHandler), metrics.New(""))
	if err != nil {
		return nil, err
	}
	defer client.Close()

	found, err := client.DescribeTopics(ctx, topics)
	if err != nil {
		return nil, err
	}

	var out []string
	for _, t := range topics {
		if found[t].Compacted() {
			out = append(out, t)
		}
	}
	return out, nil
}
