package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/segmentio/kafka-go"
)

// CreateTopic makes a topic with as many partitions as another one has, so that a key is in the same one of both, and with
// the brokers' own number of replicas and settings. One that is there is left as it is.
func (k *Kafka) CreateTopic(ctx context.Context, name, like string) error {
	cl := &kafka.Client{Addr: k.addr, Transport: k.produce, Timeout: requestTimeout}
	n, err := k.partitions(ctx, cl, like)
	if err != nil {
		return fmt.Errorf("creating topic %s: asking for the partitions of %s: %w", name, like, err)
	}
	res, err := cl.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: name, NumPartitions: n, ReplicationFactor: -1}}})
	if err == nil {
		err = res.Errors[name]
	}
	if err != nil && !errors.Is(err, kafka.TopicAlreadyExists) {
		return fmt.Errorf("creating topic %s: %w", name, err)
	}
	return nil
}
