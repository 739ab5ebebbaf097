package fence

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/record"
)

// State is what the metadata say of a partition.
type State struct {
	Leader   int32 // -1 if there is none
	Replicas int
	ISR      int
	Sick     string // why it cannot take a marker, for people; empty if it is healthy
}

// Health is a hint: metadata were seen three seconds behind the truth. A healthy partition may refuse a marker, so only a
// marker that was read counts.
type Health struct {
	Partitions map[record.TopicPartition]State
	Counts     map[string]int   // partitions by topic
	Missing    map[string]error // topics that do not exist or may not be described
}

// Healthy lists the partitions out of parts that can take a marker.
func (h *Health) Healthy(parts []record.TopicPartition) []record.TopicPartition {
	var ok []record.TopicPartition
	for _, tp := range parts {
		if h.Reason(tp) == "" {
			ok = append(ok, tp)
		}
	}
	return ok
}

// Reason says why a partition is not healthy; empty if it is.
func (h *Health) Reason(tp record.TopicPartition) string {
	if err := h.Missing[tp.Topic]; err != nil {
		return missingText(tp.Topic, err)
	}
	s, ok := h.Partitions[tp]
	if !ok {
		return fmt.Sprintf("topic %s has no partition %d", tp.Topic, tp.Partition)
	}
	return s.Sick
}

func missingText(topic string, err error) string {
	switch {
	case errors.Is(err, kafka.UnknownTopicOrPartition):
		return "topic " + topic + " does not exist: create it"
	case errors.Is(err, kafka.TopicAuthorizationFailed):
		return "topic " + topic + " may not be described: grant DESCRIBE, READ and WRITE on it"
	}
	return "topic " + topic + ": " + err.Error()
}

// Health asks a broker, not the cache, about topics: leader present, in-sync replicas at or above
// min.insync.replicas, which Kafka limits to the number of replicas.
func (c *Client) Health(ctx context.Context, topics []string) (*Health, error) {
	h := &Health{Partitions: map[record.TopicPartition]State{}, Counts: map[string]int{}, Missing: map[string]error{}}
	if len(topics) == 0 {
		return h, nil
	}
	m, err := c.send(ctx, -1, len(topics), &metadata.Request{TopicNames: topics})
	if err != nil {
		return nil, fmt.Errorf("asking for the leaders of topics: %w", err)
	}
	res := m.(*metadata.Response)
	alive := map[int32]bool{}
	for _, b := range res.Brokers {
		alive[b.NodeID] = true
	}
	least := c.minISRs(ctx, topics)
	for _, t := range res.Topics {
		if t.ErrorCode != 0 && kafka.Error(t.ErrorCode) != kafka.LeaderNotAvailable {
			h.Missing[t.Name] = kafka.Error(t.ErrorCode)
			continue
		}
		h.Counts[t.Name] = len(t.Partitions)
		for _, p := range t.Partitions {
			s := State{Leader: p.LeaderID, Replicas: len(p.ReplicaNodes), ISR: len(p.IsrNodes)}
			code := kafka.Error(p.ErrorCode)
			switch need := min(least[t.Name], s.Replicas); {
			case s.Leader < 0 || !alive[s.Leader] || code != 0 && code != kafka.ReplicaNotAvailable:
				s.Leader, s.Sick = -1, "no leader"
			case s.ISR < need:
				s.Sick = fmt.Sprintf("%d in-sync replicas, min.insync.replicas is %d", s.ISR, need)
			}
			h.Partitions[record.TopicPartition{Topic: t.Name, Partition: p.PartitionIndex}] = s
		}
	}
	return h, nil
}

// healthy is Health, asked until it is answered.
func (c *Client) healthy(ctx context.Context, topics []string, pat Patience) (*Health, error) {
	var h *Health
	err := pat.do(ctx, "asking for the state of the partitions", func(ctx context.Context) (err error) {
		h, err = c.Health(ctx, topics)
		return err
	}, c.refresh)
	return h, err
}

type minISR struct {
	n  int
	at time.Time
}

// What is assumed where the configuration may not be read. Two in-sync replicas: too many costs one partition its
// availability while two of three replicas are away, too few may hang the transactional id.
const (
	assumedMinISR    = 2
	assumedTxnExpiry = 7 * 24 * time.Hour
	assumedPIDExpiry = 24 * time.Hour
	minISRFresh      = 30 * time.Second
)

// minISRs is min.insync.replicas of each topic, at most 30 s old.
func (c *Client) minISRs(ctx context.Context, topics []string) map[string]int {
	c.mu.Lock()
	if c.minISR == nil {
		c.minISR = map[string]minISR{}
	}
	var ask []string
	for _, t := range topics {
		if time.Since(c.minISR[t].at) > minISRFresh {
			ask = append(ask, t)
		}
	}
	c.mu.Unlock()
	fresh := map[string]int{}
	if len(ask) > 0 {
		req := &kafka.DescribeConfigsRequest{}
		for _, t := range ask {
			req.Resources = append(req.Resources, kafka.DescribeConfigRequestResource{ResourceType: kafka.ResourceTypeTopic, ResourceName: t, ConfigNames: []string{"min.insync.replicas"}})
		}
		for name, entries := range c.configs(ctx, req) {
			if n, err := strconv.Atoi(entries["min.insync.replicas"]); err == nil {
				fresh[name] = n
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	out := map[string]int{}
	for t, n := range fresh {
		c.minISR[t] = minISR{n, time.Now()}
	}
	for _, t := range topics {
		out[t] = assumedMinISR
		if known, ok := c.minISR[t]; ok {
			out[t] = known.n
		}
	}
	return out
}

// configs answers what may be read, by resource name and configuration name; errors leave holes.
func (c *Client) configs(ctx context.Context, req *kafka.DescribeConfigsRequest) map[string]map[string]string {
	ctx, cancel := c.bounded(ctx, len(req.Resources))
	defer cancel()
	r, err := c.client().DescribeConfigs(ctx, req)
	if err != nil {
		return nil
	}
	out := map[string]map[string]string{}
	for _, res := range r.Resources {
		if res.Error != nil {
			continue
		}
		entries := map[string]string{}
		for _, e := range res.ConfigEntries {
			entries[e.ConfigName] = e.ConfigValue
		}
		out[res.ResourceName] = entries
	}
	return out
}

// Expiry is how long the cluster remembers.
type Expiry struct {
	TransactionalID time.Duration // transactional.id.expiration.ms: without a transaction the id is forgotten
	ProducerID      time.Duration // producer.id.expiration.ms: without a batch of the id in a partition, its state there is
	Assumed         bool          // the configuration could not be read (DESCRIBE_CONFIGS on the cluster): Kafka's defaults
}

// Every is how often KeepAlive should be called: hourly, or more often where the cluster forgets sooner.
func (e Expiry) Every() time.Duration {
	return min(time.Hour, e.TransactionalID/3, e.ProducerID/4)
}

// IdleAfter is how long a partition may be without a batch of the producer id before it needs a marker.
func (e Expiry) IdleAfter() time.Duration { return e.ProducerID / 2 }

// Expiry reads the two settings from a broker; where it may not, it returns Kafka's defaults.
func (c *Client) Expiry(ctx context.Context) Expiry {
	e := Expiry{TransactionalID: assumedTxnExpiry, ProducerID: assumedPIDExpiry, Assumed: true}
	m, err := c.send(ctx, -1, 1, &metadata.Request{TopicNames: []string{}})
	if err != nil {
		return e
	}
	for _, b := range m.(*metadata.Response).Brokers { // one by one: a dead one must not hide the others
		name := strconv.Itoa(int(b.NodeID))
		got := c.configs(ctx, &kafka.DescribeConfigsRequest{Resources: []kafka.DescribeConfigRequestResource{{
			ResourceType: kafka.ResourceTypeBroker, ResourceName: name,
			ConfigNames: []string{"transactional.id.expiration.ms", "producer.id.expiration.ms"},
		}}})[name]
		tx, err1 := strconv.ParseInt(got["transactional.id.expiration.ms"], 10, 64)
		id, err2 := strconv.ParseInt(got["producer.id.expiration.ms"], 10, 64)
		if err1 != nil || err2 != nil || tx <= 0 || id <= 0 {
			continue
		}
		t, p := time.Duration(tx)*time.Millisecond, time.Duration(id)*time.Millisecond
		if !e.Assumed { // the shortest of all brokers counts
			t, p = min(t, e.TransactionalID), min(p, e.ProducerID)
		}
		e = Expiry{TransactionalID: t, ProducerID: p}
	}
	return e
}
