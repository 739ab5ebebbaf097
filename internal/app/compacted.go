package app

import (
	"context"
	"log/slog"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/metrics"
)

// CompactedTopics returns the compacted ones of topics, which keep only the newest record of each
// key, in the same order. It connects to Kafka for the call. It leaves out topics that do not exist
// or may not be described.
func CompactedTopics(ctx context.Context, cfg config.Config, topics []string) ([]string, error) {
	client, err := NewKafka(cfg, slog.New(slog.DiscardHandler), metrics.New(""))
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
