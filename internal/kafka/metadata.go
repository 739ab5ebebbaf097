package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

// Layout is what a broker said of the cluster.
type Layout struct {
	Brokers map[int32]string // host:port by broker id
	Topics  map[string]TopicLayout
}

// TopicLayout is one topic in a Layout.
type TopicLayout struct {
	Err        error // a kafka.Error: the topic is missing, or may not be seen
	Partitions []PartitionLayout
}

// PartitionLayout is one partition; its index is its number.
type PartitionLayout struct {
	Leader   int32 // −1: none
	Epoch    int32 // of the leader; 0 from brokers before Kafka 2.1
	Replicas int
	ISR      int
}

// Metadata asks a broker, not a cache, about topics. An empty list asks about brokers alone. Unknown topics are in the
// answer with an error; nothing is ever created.
func (c *Client) Metadata(ctx context.Context, topics []string) (*Layout, error) {
	names := slices.Clone(topics)
	if names == nil {
		names = []string{} // nil would be every topic of the cluster
	}
	m, err := c.any(ctx, sized(metaTimeout, len(names)), func() protocol.Message { return &metadata.Request{TopicNames: names} })
	if err != nil {
		c.cfg.Metrics.KafkaReachable.Set(0)
		return nil, fmt.Errorf("asking for metadata: %w", err)
	}
	c.cfg.Metrics.KafkaReachable.Set(1)
	l := layoutOf(m.(*metadata.Response))
	if len(l.Brokers) == 0 {
		return nil, errors.New("asking for metadata: the answer names no broker")
	}
	c.layout.Store(l)
	return l, nil
}

// TopicNames asks a broker for the names of all topics that this user may see.
func (c *Client) TopicNames(ctx context.Context) (map[string]bool, error) {
	m, err := c.any(ctx, metaTimeout, func() protocol.Message { return &metadata.Request{} })
	if err != nil {
		return nil, fmt.Errorf("listing topics: %w", err)
	}
	names := make(map[string]bool)
	for _, t := range m.(*metadata.Response).Topics {
		names[t.Name] = true
	}
	return names, nil
}

func layoutOf(r *metadata.Response) *Layout {
	l := &Layout{Brokers: map[int32]string{}, Topics: map[string]TopicLayout{}}
	for _, b := range r.Brokers {
		l.Brokers[b.NodeID] = net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
	}
	for _, t := range r.Topics {
		tl := TopicLayout{Partitions: make([]PartitionLayout, len(t.Partitions))}
		if code := kafkago.Error(t.ErrorCode); code != 0 && code != kafkago.LeaderNotAvailable {
			tl.Err = code
		}
		for i := range tl.Partitions {
			tl.Partitions[i].Leader = -1
		}
		for _, p := range t.Partitions {
			if int(p.PartitionIndex) >= len(tl.Partitions) || p.PartitionIndex < 0 {
				tl.Err = kafkago.InvalidPartitionNumber // partitions are numbered without gaps
				continue
			}
			x := PartitionLayout{Leader: p.LeaderID, Epoch: p.LeaderEpoch, Replicas: len(p.ReplicaNodes), ISR: len(p.IsrNodes)}
			if l.Brokers[x.Leader] == "" {
				x.Leader = -1
			}
			tl.Partitions[p.PartitionIndex] = x
		}
		l.Topics[t.Name] = tl
	}
	return l
}

// Health reports whether the cluster answers, and how many brokers it has.
func (c *Client) Health(ctx context.Context) (brokers int, err error) {
	l, err := c.Metadata(ctx, nil)
	if err != nil {
		return 0, err
	}
	return len(l.Brokers), nil
}
