package connect

import (
	"context"
	"log/slog"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Cluster makes the calls of operators to the configured Kafka cluster, with the login of the relay. Each call opens a connection, so
// that none can delay a send.
type Cluster struct {
	cfg  config.Config
	host KafkaHost
}

// NewCluster returns the cluster of cfg and of the program in which the relay is embedded. It does no I/O.
func NewCluster(cfg config.Config, host KafkaHost) Cluster { return Cluster{cfg, host} }

// open returns a client for one call. The caller must close it.
func (c Cluster) open() (*kafkawire.Client, error) {
	return NewKafka(c.cfg, c.host, slog.New(slog.DiscardHandler), nil)
}

// Check connects and logs in. It returns nil if a broker responds, and otherwise a [*kafkawire.Diagnosis], or several of them
// joined.
func (c Cluster) Check(ctx context.Context) error {
	client, err := c.open()
	if err != nil {
		return err
	}
	defer client.Close()
	return client.Diagnose(ctx)
}

// CompactedTopics returns the compacted ones of topics, which keep only the newest record of each key, in the same order. It leaves out
// topics that do not exist or may not be described.
func (c Cluster) CompactedTopics(ctx context.Context, topics []string) ([]string, error) {
	client, err := c.open()
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
