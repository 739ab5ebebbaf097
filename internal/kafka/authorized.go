package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"

	"github.com/outrelay/outrelay/internal/kafka/fence"
)

// Operation is what an ACL allows, by Kafka's name.
type Operation string

// The operations that the relay needs on its topics.
const (
	Write           Operation = "WRITE"            // to send
	Read            Operation = "READ"             // to read back at a take-over
	Describe        Operation = "DESCRIBE"         // to see partitions and offsets
	DescribeConfigs Operation = "DESCRIBE_CONFIGS" // to see limits and min.insync.replicas
)

// TopicOperations are the operations needed on each topic.
func TopicOperations() []Operation { return []Operation{Write, Read, Describe, DescribeConfigs} }

// aclBits are the places of the operations in the brokers' answer.
var aclBits = map[Operation]uint{Read: 3, Write: 4, Describe: 8, DescribeConfigs: 10}

// notTold is the answer of a broker that was not asked, or is too old to tell.
const notTold = -1 << 31

// ErrNotTold says that the brokers are too old (before 2.3) to tell what a user may do.
var ErrNotTold = errors.New("the brokers do not tell")

// Authorized asks what this user may do with topics, without doing it. Topics that do not exist, or that the user may not
// even describe, are not in the answer.
func (c *Client) Authorized(ctx context.Context, topics []string) (map[string][]Operation, error) {
	if len(topics) == 0 {
		return nil, nil
	}
	m, err := c.any(ctx, sized(adminTimeout, len(topics)), func() protocol.Message {
		return &metadata.Request{TopicNames: slices.Clone(topics), IncludeTopicAuthorizedOperations: true}
	})
	if err != nil {
		return nil, fmt.Errorf("asking what is allowed: %w", err)
	}
	out := map[string][]Operation{}
	for _, t := range m.(*metadata.Response).Topics {
		switch {
		case t.ErrorCode != 0 && kafkago.Error(t.ErrorCode) != kafkago.LeaderNotAvailable:
			continue
		case t.TopicAuthorizedOperations == notTold || t.TopicAuthorizedOperations == 0:
			return nil, fmt.Errorf("asking what is allowed: %w", ErrNotTold)
		}
		ops := []Operation{}
		for _, op := range TopicOperations() {
			if t.TopicAuthorizedOperations&(1<<aclBits[op]) != 0 {
				ops = append(ops, op)
			}
		}
		out[t.Name] = ops
	}
	return out, nil
}

// TopicRefusal is why a topic cannot be used or created, with what to do, in the words that status uses. creates says
// that missing topics are created. It is "" for a nil error.
func TopicRefusal(topic string, err error, creates bool) string {
	if err == nil {
		return ""
	}
	return topicObstacle(topic, err, creates).text
}

// IsMissing reports whether a topic's error says that there is none.
func IsMissing(err error) bool { return errors.Is(err, kafkago.UnknownTopicOrPartition) }

// IsForbidden reports whether a topic's error says that this user may not see it.
func IsForbidden(err error) bool { return errors.Is(err, kafkago.TopicAuthorizationFailed) }

// ValidateTopic asks whether a topic could be created, by this user and in this way; none is.
func (c *Client) ValidateTopic(ctx context.Context, name string, how TopicCreate) error {
	if err := c.createTopic(ctx, name, how, true); err != nil {
		return fmt.Errorf("validating topic %s: %w", name, err)
	}
	return nil
}

// ErrIDForbidden says that an ACL keeps this user from a transactional id.
var ErrIDForbidden = errors.New("the transactional id may not be used")

// TryTransactionalID initialises id, which must be nobody's in use: whoever else holds it is fenced. It needs WRITE and
// DESCRIBE on the id and touches no partition; the brokers forget the id after transactional.id.expiration.ms. The first id
// ever makes the topic of the coordinators, which is waited for.
func (c *Client) TryTransactionalID(ctx context.Context, id string) error {
	_, err := c.fence.Init(ctx, id, fence.Anew, fence.Patience{Total: max(adminTimeout, c.patience)})
	switch {
	case errors.Is(err, fence.ErrStuck): // its coordinator knows it, and is busy with it
		return nil
	case errors.Is(err, kafkago.TransactionalIDAuthorizationFailed), errors.Is(err, kafkago.ClusterAuthorizationFailed):
		return fmt.Errorf("%w: %w", ErrIDForbidden, err)
	}
	return err
}
