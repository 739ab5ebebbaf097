package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/listoffsets"

	"github.com/outrelay/outrelay/internal/record"
)

// TopicConfig is what matters of a topic's configuration; zero values mean that it may not be read.
type TopicConfig struct {
	MaxMessageBytes int    // max.message.bytes: of a batch, after compression
	MinISR          int    // min.insync.replicas
	CleanupPolicy   string // cleanup.policy
	UncleanElection bool   // unclean.leader.election.enable
}

const (
	resourceTopic = 2
	adminTimeout  = 5 * time.Second
)

var topicConfigs = []string{"max.message.bytes", "min.insync.replicas", "cleanup.policy", "unclean.leader.election.enable"}

// DescribeTopics reads the configuration of topics. A topic that is missing from the answer may not be described
// (DESCRIBE_CONFIGS), or does not exist; that is no error.
func (c *Client) DescribeTopics(ctx context.Context, topics []string) (map[string]TopicConfig, error) {
	if len(topics) == 0 {
		return nil, nil
	}
	m, err := c.callAny(ctx, timeoutFor(adminTimeout, len(topics)), func() protocol.Message {
		req := &describeconfigs.Request{}
		for _, t := range topics {
			req.Resources = append(req.Resources, describeconfigs.RequestResource{ResourceType: resourceTopic, ResourceName: t, ConfigNames: topicConfigs})
		}
		return req
	})
	if err != nil {
		return nil, fmt.Errorf("describing topics: %w", err)
	}
	out := map[string]TopicConfig{}
	for _, r := range m.(*describeconfigs.Response).Resources {
		if r.ErrorCode != 0 {
			continue
		}
		var t TopicConfig
		for _, e := range r.ConfigEntries {
			switch e.ConfigName {
			case "max.message.bytes":
				t.MaxMessageBytes, _ = strconv.Atoi(e.ConfigValue)
			case "min.insync.replicas":
				t.MinISR, _ = strconv.Atoi(e.ConfigValue)
			case "cleanup.policy":
				t.CleanupPolicy = e.ConfigValue
			case "unclean.leader.election.enable":
				t.UncleanElection = e.ConfigValue == "true"
			}
		}
		out[r.ResourceName] = t
	}
	return out, nil
}

// Compacted reports whether the topic keeps the newest record of each key only, alone or beside a retention.
func (c TopicConfig) Compacted() bool { return strings.Contains(c.CleanupPolicy, "compact") }

// CreateTopic creates a topic. One that exists already is no error.
func (c *Client) CreateTopic(ctx context.Context, name string, how TopicCreate) error {
	if err := c.createTopic(ctx, name, how, false); err != nil {
		return fmt.Errorf("creating topic %s: %w", name, err)
	}
	return nil
}

// createTopic asks for a topic, or only whether it could be created.
func (c *Client) createTopic(ctx context.Context, name string, how TopicCreate, validateOnly bool) error {
	t := createtopics.RequestTopic{Name: name, NumPartitions: -1, ReplicationFactor: -1}
	if how.Partitions > 0 {
		t.NumPartitions = int32(how.Partitions)
	}
	if how.Replication > 0 {
		t.ReplicationFactor = int16(how.Replication)
	}
	for _, k := range slices.Sorted(maps.Keys(how.Configs)) {
		t.Configs = append(t.Configs, createtopics.RequestConfig{Name: k, Value: how.Configs[k]})
	}
	m, err := c.callAny(ctx, adminTimeout, func() protocol.Message {
		return &createtopics.Request{Topics: []createtopics.RequestTopic{t}, TimeoutMs: int32(adminTimeout.Milliseconds()), ValidateOnly: validateOnly}
	})
	if err != nil {
		return err
	}
	for _, r := range m.(*createtopics.Response).Topics {
		if code := kafkago.Error(r.ErrorCode); code != 0 && code != kafkago.TopicAlreadyExists {
			if r.ErrorMessage != "" {
				return fmt.Errorf("%w (%s)", code, r.ErrorMessage)
			}
			return code
		}
	}
	return nil
}

// ListOffsets asks the leaders for the end of partitions: the offset that the next record will get at the earliest. Only
// the partitions that were answered are in the result; the error is the first of the others'.
func (c *Client) ListOffsets(ctx context.Context, layout *Layout, parts []record.TopicPartition) (map[record.TopicPartition]int64, error) {
	byLeader := map[int32][]record.TopicPartition{}
	var missing error
	for _, tp := range parts {
		t, ok := layout.Topics[tp.Topic]
		if !ok || int(tp.Partition) >= len(t.Partitions) || t.Partitions[tp.Partition].Leader < 0 {
			missing = fmt.Errorf("listing offsets: %s-%d: %w", tp.Topic, tp.Partition, kafkago.LeaderNotAvailable)
			continue
		}
		leader := t.Partitions[tp.Partition].Leader
		byLeader[leader] = append(byLeader[leader], tp)
	}
	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		errs = []error{missing}
		out  = make(map[record.TopicPartition]int64, len(parts))
	)
	for leader, list := range byLeader {
		wg.Go(func() {
			got, err := c.listLeaderOffsets(ctx, layout.Brokers[leader], list)
			mu.Lock()
			defer mu.Unlock()
			maps.Copy(out, got)
			errs = append(errs, err)
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

func (c *Client) listLeaderOffsets(ctx context.Context, addr string, parts []record.TopicPartition) (map[record.TopicPartition]int64, error) {
	req := &listoffsets.Request{ReplicaID: -1}
	at := map[string]int{}
	for _, tp := range parts {
		i, ok := at[tp.Topic]
		if !ok {
			i = len(req.Topics)
			at[tp.Topic] = i
			req.Topics = append(req.Topics, listoffsets.RequestTopic{Topic: tp.Topic})
		}
		req.Topics[i].Partitions = append(req.Topics[i].Partitions, listoffsets.RequestPartition{Partition: tp.Partition, CurrentLeaderEpoch: -1, Timestamp: -1})
	}
	m, err := c.callBroker(ctx, addr, timeoutFor(adminTimeout, len(parts)), req)
	if err != nil {
		return nil, fmt.Errorf("listing offsets: %w", err)
	}
	out := make(map[record.TopicPartition]int64, len(parts))
	for _, t := range m.(*listoffsets.Response).Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				err = errors.Join(err, fmt.Errorf("listing offsets: %s-%d: %w", t.Topic, p.Partition, kafkago.Error(p.ErrorCode)))
				continue
			}
			out[record.TopicPartition{Topic: t.Topic, Partition: p.Partition}] = p.Offset
		}
	}
	return out, err
}
