package kafkalog

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
)

const (
	// publishAttempts is the number of lookups of a missing topic.
	publishAttempts = 5
	// publishPatience is the least time for which a partition is retried. The leader of a broker that
	// died is replaced after the session of the broker, 9 s by default.
	publishPatience = 15 * time.Second
)

// Publish writes records with acks of all in-sync replicas. The records of a partition are one batch, in
// their order. If the outcome of a batch is unknown, it is sent again, so its records may be in the topic
// twice, with the same id. While brokers are away or have no leader, Publish retries for about 15 s, or
// until ctx ends, and then returns the last error. A missing topic is an error within seconds.
func (c *Client) Publish(ctx context.Context, topic string, records []transport.Record) error {
	if len(records) == 0 {
		return nil
	}
	n, err := c.countPartitions(ctx, topic)
	if err != nil {
		return fmt.Errorf("publishing to topic %s: %w", topic, err)
	}

	byPartition := map[int32][]record.Record{}
	for i := range records {
		record := &records[i]
		partition := choosePartition(record, int32(n))
		byPartition[partition] = append(byPartition[partition], newRecord(record))
	}
	for p, list := range byPartition {
		tp := record.TopicPartition{Topic: topic, Partition: p}
		if err := c.publishBatch(ctx, tp, list); err != nil {
			return fmt.Errorf("publishing to topic %s, partition %d: %w", topic, p, err)
		}
	}
	return nil
}

// choosePartition returns the partition of the key, or for a record without a key, a partition by the
// offset that it came from.
func choosePartition(record *transport.Record, partitions int32) int32 {
	if record.Key == nil {
		return int32(max(record.Offset, 0) % int64(partitions))
	}
	return kafkawire.ChoosePartition(record.Key, partitions)
}

func newRecord(source *transport.Record) record.Record {
	out := record.Record{Key: source.Key, Value: source.Value, TimeMS: time.Now().UnixMilli()}
	for _, h := range source.Headers {
		out.Headers = append(out.Headers, record.Header{Key: []byte(h.Key), Value: h.Value})
	}
	return out
}

// countPartitions returns the number of partitions of a topic. It retries while brokers are away, and
// a few times while the topic is missing.
func (c *Client) countPartitions(ctx context.Context, topic string) (int, error) {
	attempts, began := retry.Reopen.Start(), time.Now()
	for {
		layout, err := c.Wire.Metadata(ctx, []string{topic})
		if err == nil {
			topicLayout := layout.Topics[topic]
			if topicLayout.Err == nil && len(topicLayout.Partitions) > 0 {
				return len(topicLayout.Partitions), nil
			}
			if err = topicLayout.Err; err == nil {
				err = kafkawire.UnknownTopicOrPartition
			}
		}

		// A new topic reaches the brokers one after another, so it may appear within a few attempts.
		missing := errors.Is(err, kafkawire.UnknownTopicOrPartition)
		switch {
		case missing && attempts.Attempts() >= publishAttempts:
			return 0, fmt.Errorf("%w: create it", err)
		case !missing && time.Since(began) > publishPatience:
			return 0, err
		}
		if err := attempts.Wait(ctx); err != nil {
			return 0, err
		}
	}
}

// publishBatch writes records to a partition, and retries for publishPatience.
func (c *Client) publishBatch(ctx context.Context, tp record.TopicPartition, list []record.Record) error {
	attempts, began := retry.Reopen.Start(), time.Now()
	for {
		layout, err := c.Wire.Metadata(ctx, []string{tp.Topic})
		if err == nil {
			err = kafkawire.LeaderNotAvailable
			if addr := layout.LeaderAddr(tp); addr != "" {
				err = c.Wire.Publish(ctx, addr, tp, list, RequestTimeout)
			}
		}

		if err == nil {
			return nil
		}
		if !kafkawire.IsRetriable(err) || time.Since(began) > publishPatience || attempts.Wait(ctx) != nil {
			return err
		}
	}
}

// CreateTopic creates a topic with the number of partitions of another one, so that a key is in the same
// partition of both. Its records stay for the time keep, or if that is 0, for the default of the brokers, and are not compacted. The
// number of replicas and the other settings are the defaults of the brokers. It does nothing if the topic exists.
func (c *Client) CreateTopic(ctx context.Context, name, like string, keep time.Duration) error {
	n, err := c.countPartitions(ctx, like)
	if err != nil {
		return fmt.Errorf("creating topic %s: reading the partitions of %s: %w", name, like, err)
	}
	configs := map[string]string{"cleanup.policy": "delete"}
	if keep > 0 {
		configs["retention.ms"] = strconv.FormatInt(keep.Milliseconds(), 10)
	}
	if err := c.Wire.CreateTopic(ctx, name, kafkawire.TopicCreate{Partitions: n, Configs: configs}); err != nil {
		return fmt.Errorf("%w; create it with %d partitions and %v", err, n, configs)
	}
	return nil
}
