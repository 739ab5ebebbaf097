package kafkawire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Layout is a broker's view of the cluster.
type Layout struct {
	Cluster string           // id of the cluster; "" from brokers that have none
	Brokers map[int32]string // host:port by broker id
	Topics  map[string]TopicLayout
}

// TopicLayout is one topic in a Layout.
type TopicLayout struct {
	Err        error // a kafka.Error: the topic is missing, or may not be seen
	Partitions []PartitionLayout
}

// PartitionLayout is one partition. Its index is its number.
type PartitionLayout struct {
	Leader   int32 // −1: none
	Epoch    int32 // of the leader; 0 from brokers before Kafka 2.1
	Replicas int
	ISR      int
}

// LeaderAddr returns the address of the leader of tp, or "" if it is unknown.
func (l *Layout) LeaderAddr(tp record.TopicPartition) string {
	layout := l.Topics[tp.Topic]
	if int(tp.Partition) >= len(layout.Partitions) {
		return ""
	}
	return l.Brokers[layout.Partitions[tp.Partition].Leader]
}

// Metadata reads the layout of topics from a broker, not from a cache. With an empty list the layout
// contains only brokers. Unknown topics are in the layout with an error. Metadata never creates a
// topic.
func (c *Client) Metadata(ctx context.Context, topics []string) (*Layout, error) {
	names := slices.Clone(topics)
	if names == nil {
		// With nil, Kafka would return every topic of the cluster.
		names = []string{}
	}

	message, err := c.callAny(ctx, timeoutFor(metaTimeout, len(names)), &metadata.Request{TopicNames: names})
	if err != nil {
		err = fmt.Errorf("reading metadata: %w", err)
		// A caller that gives up shows nothing about the brokers.
		if !errors.Is(ctx.Err(), context.Canceled) {
			c.noteReached(err)
		}
		return nil, err
	}
	c.noteReached(nil)

	layout := parseLayout(message.(*metadata.Response))
	if len(layout.Brokers) == 0 {
		return nil, errors.New("reading metadata: the response names no broker")
	}
	c.layout.Store(layout)
	return layout, nil
}

func (c *Client) noteReached(err error) {
	c.outage.Store(&err)
	if c.cfg.Reached != nil {
		c.cfg.Reached(err)
	}
}

// Outage returns the error of the last metadata request, which is [ErrAway], or nil if a broker responded.
func (c *Client) Outage() error {
	if err := c.outage.Load(); err != nil {
		return *err
	}
	return nil
}

// TopicNames returns the names of all topics that this user may see.
func (c *Client) TopicNames(ctx context.Context) (map[string]bool, error) {
	message, err := c.callAny(ctx, metaTimeout, &metadata.Request{})
	if err != nil {
		return nil, fmt.Errorf("listing topics: %w", err)
	}
	names := make(map[string]bool)
	for _, t := range message.(*metadata.Response).Topics {
		names[t.Name] = true
	}
	return names, nil
}

func parseLayout(response *metadata.Response) *Layout {
	layout := &Layout{Cluster: response.ClusterID, Brokers: map[int32]string{}, Topics: map[string]TopicLayout{}}
	for _, b := range response.Brokers {
		layout.Brokers[b.NodeID] = net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
	}

	for _, t := range response.Topics {
		tl := TopicLayout{Partitions: make([]PartitionLayout, len(t.Partitions))}
		// With LEADER_NOT_AVAILABLE, the topic exists and waits for an election.
		if code := kafkago.Error(t.ErrorCode); code != 0 && code != kafkago.LeaderNotAvailable {
			tl.Err = code
		}
		// A partition that the response leaves out has no leader.
		for i := range tl.Partitions {
			tl.Partitions[i].Leader = -1
		}

		for _, p := range t.Partitions {
			// Partitions are numbered without gaps.
			if int(p.PartitionIndex) >= len(tl.Partitions) || p.PartitionIndex < 0 {
				tl.Err = kafkago.InvalidPartitionNumber
				continue
			}

			pl := PartitionLayout{
				Leader:   p.LeaderID,
				Epoch:    p.LeaderEpoch,
				Replicas: len(p.ReplicaNodes),
				ISR:      len(p.IsrNodes),
			}
			code := kafkago.Error(p.ErrorCode)
			// A replica that is down does not hinder the leader.
			if layout.Brokers[pl.Leader] == "" || code != 0 && code != kafkago.ReplicaNotAvailable {
				pl.Leader = -1
			}
			tl.Partitions[p.PartitionIndex] = pl
		}
		layout.Topics[t.Name] = tl
	}
	return layout
}
