package kafkawire

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
	"github.com/segmentio/kafka-go/protocol/createpartitions"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/describeconfigs"
	"github.com/segmentio/kafka-go/protocol/listoffsets"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// TopicConfig has the settings of a topic that matter to the relay. It is the zero value if this user
// may not read them.
type TopicConfig struct {
	MaxMessageBytes int    // max.message.bytes: of a batch, after compression
	MinISR          int    // min.insync.replicas
	CleanupPolicy   string // cleanup.policy
	UncleanElection bool   // unclean.leader.election.enable
	TimestampType   string // message.timestamp.type
}

const (
	resourceTopic  = 2
	resourceBroker = 4
	adminTimeout   = 5 * time.Second
)

var topicConfigs = []string{
	"max.message.bytes",
	"min.insync.replicas",
	"cleanup.policy",
	"unclean.leader.election.enable",
	"message.timestamp.type",
}

// DescribeTopics reads the configuration of topics. A topic is missing from the result if it does not
// exist, or if this user may not describe it (DESCRIBE_CONFIGS). That is not an error.
func (c *Client) DescribeTopics(ctx context.Context, topics []string) (map[string]TopicConfig, error) {
	if len(topics) == 0 {
		return nil, nil
	}

	message, err := c.callAny(ctx, timeoutFor(adminTimeout, len(topics)), describeRequest(resourceTopic, topics, topicConfigs))
	if err != nil {
		return nil, fmt.Errorf("describing topics: %w", err)
	}

	out := map[string]TopicConfig{}
	for topic, entries := range parseConfigs(message) {
		cfg := TopicConfig{
			CleanupPolicy:   entries["cleanup.policy"],
			UncleanElection: entries["unclean.leader.election.enable"] == "true",
			TimestampType:   entries["message.timestamp.type"],
		}
		// A setting that may not be read stays 0, which means unknown.
		cfg.MaxMessageBytes, _ = strconv.Atoi(entries["max.message.bytes"])
		cfg.MinISR, _ = strconv.Atoi(entries["min.insync.replicas"])
		out[topic] = cfg
	}
	return out, nil
}

// DescribeBroker returns settings of the broker with that id, from the broker itself. A setting is
// missing from the result if this user may not read it (DESCRIBE_CONFIGS on the cluster).
func (c *Client) DescribeBroker(ctx context.Context, id int32, settings []string) (map[string]string, error) {
	name := strconv.Itoa(int(id))
	req := describeRequest(resourceBroker, []string{name}, settings)
	message, err := c.callBroker(ctx, c.Layout().Brokers[id], timeoutFor(adminTimeout, 1), req)
	if err != nil {
		return nil, fmt.Errorf("describing broker %d: %w", id, err)
	}
	return parseConfigs(message)[name], nil
}

func describeRequest(resource int8, names, settings []string) *describeconfigs.Request {
	req := &describeconfigs.Request{}
	for _, name := range names {
		requestResource := describeconfigs.RequestResource{ResourceType: resource, ResourceName: name, ConfigNames: settings}
		req.Resources = append(req.Resources, requestResource)
	}
	return req
}

// parseConfigs returns the settings of the resources that could be read, by resource and setting.
func parseConfigs(message protocol.Message) map[string]map[string]string {
	out := map[string]map[string]string{}
	for _, r := range message.(*describeconfigs.Response).Resources {
		if r.ErrorCode != 0 {
			continue
		}
		entries := map[string]string{}
		for _, e := range r.ConfigEntries {
			entries[e.ConfigName] = e.ConfigValue
		}
		out[r.ResourceName] = entries
	}
	return out
}

// Compacted reports whether the topic keeps only the newest record of each key, with or without a
// retention.
func (c TopicConfig) Compacted() bool { return strings.Contains(c.CleanupPolicy, "compact") }

// CreateTopic creates a topic. It returns nil if the topic exists already.
func (c *Client) CreateTopic(ctx context.Context, name string, how TopicCreate) error {
	rejected, err := c.CreateTopics(ctx, []string{name}, how)
	return errors.Join(err, rejected[name])
}

// CreateTopics creates topics with one request. The result has the error of each topic that cannot be created. A topic that
// exists already is no error.
func (c *Client) CreateTopics(ctx context.Context, names []string, how TopicCreate) (map[string]error, error) {
	rejected, err := c.createTopics(ctx, names, how, createtopics.Request{})
	if err != nil {
		return nil, fmt.Errorf("creating topics: %w", err)
	}
	for name, why := range rejected {
		rejected[name] = fmt.Errorf("creating topic %s: %w", name, why)
	}
	return rejected, nil
}

// createTopics creates topics with req, to which it adds them.
func (c *Client) createTopics(
	ctx context.Context, names []string, how TopicCreate, req createtopics.Request,
) (rejected map[string]error, err error) {
	timeout := timeoutFor(adminTimeout, len(names))
	req.TimeoutMs = int32(timeout.Milliseconds())
	for _, name := range names {
		// With -1, the broker's defaults apply.
		topic := createtopics.RequestTopic{Name: name, NumPartitions: -1, ReplicationFactor: -1}
		if how.Partitions > 0 {
			topic.NumPartitions = int32(how.Partitions)
		}
		if how.Replication > 0 {
			topic.ReplicationFactor = int16(how.Replication)
		}
		for _, k := range slices.Sorted(maps.Keys(how.Configs)) {
			topic.Configs = append(topic.Configs, createtopics.RequestConfig{Name: k, Value: how.Configs[k]})
		}
		req.Topics = append(req.Topics, topic)
	}

	message, err := c.callAny(ctx, timeout, &req)
	if err != nil {
		return nil, err
	}

	rejected = map[string]error{}
	for _, r := range message.(*createtopics.Response).Topics {
		code := kafkago.Error(r.ErrorCode)
		// Another process may have created the topic at the same time.
		if code == 0 || code == kafkago.TopicAlreadyExists {
			continue
		}
		rejected[r.Name] = newRejection(code, r.ErrorMessage)
	}
	return rejected, nil
}

// ExtendTopic adds partitions to a topic until it has the given number. With validateOnly a broker only checks whether that is possible.
func (c *Client) ExtendTopic(ctx context.Context, topic string, partitions int, validateOnly bool) error {
	message, err := c.callAny(ctx, adminTimeout, &createpartitions.Request{
		Topics: []createpartitions.RequestTopic{{Name: topic, Count: int32(partitions)}}, TimeoutMs: int32(adminTimeout.Milliseconds()), ValidateOnly: validateOnly,
	})
	if err != nil {
		return fmt.Errorf("adding partitions to topic %s: %w", topic, err)
	}
	for _, r := range message.(*createpartitions.Response).Results {
		if why := newRejection(kafkago.Error(r.ErrorCode), r.ErrorMessage); why != nil {
			return fmt.Errorf("adding partitions to topic %s: %w", topic, why)
		}
	}
	return nil
}

// ListOffsets returns the end offsets of partitions, given the broker that leads each of them: the least
// offset that the next record can get. The result contains only the partitions whose leader has responded.
// The error is the first error of the others.
func (c *Client) ListOffsets(
	ctx context.Context, leaders map[record.TopicPartition]int32,
) (map[record.TopicPartition]int64, error) {
	byLeader := map[int32][]record.TopicPartition{}
	for tp, leader := range leaders {
		byLeader[leader] = append(byLeader[leader], tp)
	}

	var (
		mu   sync.Mutex
		wg   sync.WaitGroup
		errs []error
		out  = make(map[record.TopicPartition]int64, len(leaders))
	)
	for leader, list := range byLeader {
		wg.Go(func() {
			ends, err := c.LeaderOffsets(ctx, c.Layout().Brokers[leader], list, LogEnd)
			mu.Lock()
			defer mu.Unlock()
			for tp, end := range ends {
				out[tp] = end.Offset
			}
			errs = append(errs, err)
		})
	}
	wg.Wait()

	// The offsets that were found are returned together with the first error.
	for _, err := range errs {
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// LogEdge selects one end of a partition's log.
type LogEdge int64

// The ends of a log.
const (
	LogStart LogEdge = -2
	LogEnd   LogEdge = -1 // the high watermark
)

// LogOffset is an offset, and the epoch of the leader that has returned it.
type LogOffset struct {
	Offset      int64
	LeaderEpoch int32
}

// LeaderOffsets returns the offsets of one end of partitions from the broker at addr, which leads them.
// The error joins the errors of partitions, which are not in the result.
func (c *Client) LeaderOffsets(
	ctx context.Context, addr string, partitions []record.TopicPartition, edge LogEdge,
) (map[record.TopicPartition]LogOffset, error) {
	req := &listoffsets.Request{ReplicaID: -1}
	for topic, ids := range groupByTopic(partitions) {
		requestTopic := listoffsets.RequestTopic{Topic: topic}
		for _, id := range ids {
			// An epoch of -1 disables the broker's check of the leader epoch.
			requestTopic.Partitions = append(requestTopic.Partitions, listoffsets.RequestPartition{Partition: id, CurrentLeaderEpoch: -1, Timestamp: int64(edge)})
		}
		req.Topics = append(req.Topics, requestTopic)
	}

	message, err := c.callBroker(ctx, addr, timeoutFor(adminTimeout, len(partitions)), req)
	if err != nil {
		return nil, fmt.Errorf("listing offsets: %w", err)
	}

	out := make(map[record.TopicPartition]LogOffset, len(partitions))
	for _, t := range message.(*listoffsets.Response).Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				code := kafkago.Error(p.ErrorCode)
				err = errors.Join(err, fmt.Errorf("listing offsets: %s-%d: %w", t.Topic, p.Partition, code))
				continue
			}
			out[record.TopicPartition{Topic: t.Topic, Partition: p.Partition}] = LogOffset{p.Offset, p.LeaderEpoch}
		}
	}
	return out, err
}

// groupByTopic returns the numbers of partitions by topic.
func groupByTopic(partitions []record.TopicPartition) map[string][]int32 {
	byTopic := map[string][]int32{}
	for _, tp := range partitions {
		byTopic[tp.Topic] = append(byTopic[tp.Topic], tp.Partition)
	}
	return byTopic
}

// LeaderOffset is LeaderOffsets for one partition.
func (c *Client) LeaderOffset(
	ctx context.Context, addr string, tp record.TopicPartition, edge LogEdge,
) (LogOffset, error) {
	got, err := c.LeaderOffsets(ctx, addr, []record.TopicPartition{tp}, edge)
	at, ok := got[tp]
	if err == nil && !ok {
		err = errors.New("listing offsets: the response leaves the partition out")
	}
	return at, err
}
