package fence

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Health reports which partitions can take a marker. It is a hint: metadata were measured to be three
// seconds late. A healthy partition may reject a marker, so only a marker that was read counts.
type Health struct {
	layout *kafkawire.Layout
	minISR map[string]int // min.insync.replicas by topic
}

// Healthy returns the partitions of list that can take a marker.
func (h *Health) Healthy(list []record.TopicPartition) []record.TopicPartition {
	var found []record.TopicPartition
	for _, tp := range list {
		if h.Reason(tp) == healthy {
			found = append(found, tp)
		}
	}
	return found
}

// healthy is the reason of a partition that can take a marker.
var healthy kafkawire.Obstacle

// Reason returns why a partition cannot take a marker, for operators. Its kind is set if the topic has to be created or needs
// more partitions. Kafka limits min.insync.replicas to the number of replicas.
func (h *Health) Reason(tp record.TopicPartition) kafkawire.Obstacle {
	layout := h.layout.Topics[tp.Topic]
	if layout.Err != nil {
		return explainMissing(tp.Topic, layout.Err)
	}
	if int(tp.Partition) >= len(layout.Partitions) {
		return kafkawire.Obstacle{Kind: kafkawire.TopicTooSmall, Cause: fmt.Sprintf("topic %q no longer has a partition %d", tp.Topic, tp.Partition)}
	}

	partitionLayout := layout.Partitions[tp.Partition]
	least := min(h.minISR[tp.Topic], partitionLayout.Replicas)
	switch {
	case partitionLayout.Leader < 0:
		return kafkawire.Obstacle{Cause: "no leader"}
	case partitionLayout.ISR < least:
		return kafkawire.Obstacle{Cause: fmt.Sprintf("%d in-sync replicas, min.insync.replicas is %d", partitionLayout.ISR, least)}
	}
	return healthy
}

func explainMissing(topic string, err error) kafkawire.Obstacle {
	switch {
	case errors.Is(err, kafkawire.UnknownTopicOrPartition):
		return kafkawire.Obstacle{Kind: kafkawire.TopicMissing, Cause: fmt.Sprintf("topic %q does not exist", topic)}
	case errors.Is(err, kafkawire.TopicAuthorizationFailed):
		return kafkawire.Obstacle{Cause: "topic " + topic + " may not be described: grant DESCRIBE, READ and WRITE on it"}
	}
	return kafkawire.Obstacle{Cause: "topic " + topic + ": " + err.Error()}
}

// Health reads the state of topics from a broker.
func (c *Client) Health(ctx context.Context, topics []string) (*Health, error) {
	layout, err := c.kafka.Metadata(ctx, topics)
	if err != nil {
		return nil, err
	}
	return &Health{layout: layout, minISR: c.readMinISRs(ctx, topics)}, nil
}

// awaitHealth is Health, retried until a broker responds.
func (c *Client) awaitHealth(ctx context.Context, topics []string, patience Patience) (health *Health, err error) {
	err = patience.retry(ctx, "reading the state of the partitions", func() error {
		health, err = c.Health(ctx, topics)
		return err
	})
	return health, err
}

// The values that are assumed if the configuration may not be read. Two in-sync replicas: a number that
// is too high makes one partition unavailable while two of three replicas are away, a number that is too
// low may hang the transactional id.
const (
	assumedMinISR    = 2
	assumedTxnExpiry = 7 * 24 * time.Hour
	assumedPIDExpiry = 24 * time.Hour
)

// readMinISRs returns min.insync.replicas of each topic.
func (c *Client) readMinISRs(ctx context.Context, topics []string) map[string]int {
	// The assumed value is for topics that may not be read.
	configs, _ := c.kafka.DescribeTopics(ctx, topics)
	out := map[string]int{}
	for _, t := range topics {
		out[t] = cmp.Or(configs[t].MinISR, assumedMinISR)
	}
	return out
}

// Expiry is how long the cluster remembers producers.
type Expiry struct {
	// TransactionalID is transactional.id.expiration.ms: without a transaction, the id is forgotten.
	TransactionalID time.Duration
	// ProducerID is producer.id.expiration.ms: without a batch of the id, a partition forgets it.
	ProducerID time.Duration
	// Assumed means that these are Kafka's defaults, because the configuration may not be read
	// (DESCRIBE_CONFIGS on the cluster).
	Assumed bool
}

// Every returns how often KeepAlive should be called: hourly, or more often if the cluster forgets sooner.
func (e Expiry) Every() time.Duration {
	return min(time.Hour, e.TransactionalID/3, e.ProducerID/4)
}

// IdleAfter returns how long a partition may be without a batch of the producer id before it needs a
// marker.
func (e Expiry) IdleAfter() time.Duration { return e.ProducerID / 2 }

// Expiry reads the two settings from the brokers. Without the permission it returns Kafka's defaults.
func (c *Client) Expiry(ctx context.Context) Expiry {
	const txnSetting, idSetting = "transactional.id.expiration.ms", "producer.id.expiration.ms"
	expiry := Expiry{TransactionalID: assumedTxnExpiry, ProducerID: assumedPIDExpiry, Assumed: true}
	layout, err := c.kafka.Metadata(ctx, nil)
	if err != nil {
		return expiry
	}

	for id := range layout.Brokers {
		// One request for each broker: a broker that is down must not hide the others.
		got, err := c.kafka.DescribeBroker(ctx, id, []string{txnSetting, idSetting})
		txn, err1 := strconv.ParseInt(got[txnSetting], 10, 64)
		producer, err2 := strconv.ParseInt(got[idSetting], 10, 64)
		if errors.Join(err, err1, err2) != nil || txn <= 0 || producer <= 0 {
			continue
		}

		// The shortest time of all brokers counts.
		ofTransactions, ofProducers := time.Duration(txn)*time.Millisecond, time.Duration(producer)*time.Millisecond
		if !expiry.Assumed {
			ofTransactions, ofProducers = min(ofTransactions, expiry.TransactionalID), min(ofProducers, expiry.ProducerID)
		}
		expiry = Expiry{TransactionalID: ofTransactions, ProducerID: ofProducers}
	}
	return expiry
}
