package kafkawire

import (
	"context"
	"errors"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/createtopics"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

// Operation is an operation that an ACL allows, by Kafka's name.
type Operation string

// The operations that the relay needs on its topics.
const (
	Write           Operation = "WRITE"            // to send
	Read            Operation = "READ"             // to read back at a takeover
	Describe        Operation = "DESCRIBE"         // to see partitions and offsets
	DescribeConfigs Operation = "DESCRIBE_CONFIGS" // to see limits and min.insync.replicas
)

// TopicOperations returns the operations that are needed on each topic.
func TopicOperations() []Operation { return []Operation{Write, Read, Describe, DescribeConfigs} }

// aclBits maps each operation to its bit in the response of a broker.
var aclBits = map[Operation]uint{Read: 3, Write: 4, Describe: 8, DescribeConfigs: 10}

// operationsUnknown is the value in a response that does not contain the operations: they were not
// requested, or the broker is too old.
const operationsUnknown = -1 << 31

// ErrOperationsUnknown means that the brokers are too old (before 2.3) to report the allowed operations.
var ErrOperationsUnknown = errors.New("the brokers do not report the allowed operations")

// Authorized returns the operations that this user may perform on topics, without performing them.
// Topics that do not exist, or that the user may not describe, are not in the result.
func (c *Client) Authorized(ctx context.Context, topics []string) (map[string][]Operation, error) {
	if len(topics) == 0 {
		return nil, nil
	}

	req := &metadata.Request{TopicNames: topics, IncludeTopicAuthorizedOperations: true}
	message, err := c.callAny(ctx, timeoutFor(adminTimeout, len(topics)), req)
	if err != nil {
		return nil, fmt.Errorf("reading the allowed operations: %w", err)
	}

	out := map[string][]Operation{}
	for _, t := range message.(*metadata.Response).Topics {
		// A topic that waits for the election of a leader exists.
		if code := kafkago.Error(t.ErrorCode); code != 0 && code != kafkago.LeaderNotAvailable {
			continue
		}
		if t.TopicAuthorizedOperations == operationsUnknown || t.TopicAuthorizedOperations == 0 {
			return nil, fmt.Errorf("reading the allowed operations: %w", ErrOperationsUnknown)
		}

		allowed := []Operation{}
		for _, op := range TopicOperations() {
			if t.TopicAuthorizedOperations&(1<<aclBits[op]) != 0 {
				allowed = append(allowed, op)
			}
		}
		out[t.Name] = allowed
	}
	return out, nil
}

// ValidateTopic returns an error if this user could not create the topic with these options. It
// creates nothing.
func (c *Client) ValidateTopic(ctx context.Context, name string, how TopicCreate) error {
	rejected, err := c.createTopics(ctx, []string{name}, how, createtopics.Request{ValidateOnly: true})
	if err == nil {
		err = rejected[name]
	}
	if err != nil {
		return fmt.Errorf("validating topic %s: %w", name, err)
	}
	return nil
}
