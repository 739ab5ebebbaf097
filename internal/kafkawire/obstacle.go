package kafkawire

import (
	"errors"
	"fmt"
)

// Kinds of obstacles of a topic. They are also the values of a metric label.
const (
	TopicMissing     = "missing"
	TopicTooSmall    = "too_small" // it has fewer partitions than records were written to
	TopicForbidden   = "forbidden"
	TopicNoLeader    = "no_leader"
	TopicRejected    = "rejected"
	TopicUnreachable = "unreachable"
)

// Obstacle is the reason why a topic cannot be written: a kind for programs and a text with the fix for operators. The zero value is no
// obstacle.
type Obstacle struct{ Kind, Text string }

// ExplainTopic explains a topic's error code in metadata or in a response, with the fix. It returns no obstacle for a nil error.
func ExplainTopic(topic string, err error) Obstacle {
	if err == nil {
		return Obstacle{}
	}

	obstacle := explainTopic(topic, err)
	// Kafka's own words are often the only reason: which name collides, or which policy rejects the topic.
	if words := wordsOf(err); words != "" {
		obstacle.Text += "; Kafka: " + words
	}
	return obstacle
}

// explainTopic is ExplainTopic without the words of Kafka.
func explainTopic(topic string, err error) Obstacle {
	code, ok := errors.AsType[Code](err)
	if !ok {
		return Obstacle{TopicUnreachable, fmt.Sprintf("topic %q cannot be looked up: %v", topic, err)}
	}

	switch code {
	case UnknownTopicOrPartition:
		return Obstacle{TopicMissing, fmt.Sprintf("topic %q does not exist; create it, or set topics.create", topic)}

	case TopicAuthorizationFailed:
		return Obstacle{TopicForbidden, fmt.Sprintf(
			"topic %q may not be used; grant this user WRITE, READ and DESCRIBE on it", topic)}

	case ClusterAuthorizationFailed:
		return Obstacle{TopicForbidden, fmt.Sprintf(
			"topic %q may not be created; grant this user CREATE on it, or create it manually", topic)}

	case LeaderNotAvailable:
		return Obstacle{TopicNoLeader, fmt.Sprintf(
			"a partition of topic %q has no leader that responds; check its brokers", topic)}

	case InvalidTopic:
		return Obstacle{TopicRejected, fmt.Sprintf("Kafka does not allow the topic name %q; correct the routing", topic)}

	case unsupportedCompressionType:
		return Obstacle{TopicRejected, fmt.Sprintf(
			"the broker of topic %q does not support this compression; change kafka.compression", topic)}

	case policyViolation:
		return Obstacle{TopicRejected, fmt.Sprintf(
			"a policy of the cluster rejects topic %q; contact its operators, or create the topic manually", topic)}

	case invalidReplicationFactor:
		return Obstacle{TopicMissing, fmt.Sprintf("topic %q cannot be created with this replication factor: "+
			"there are fewer brokers; lower topics.create.replication", topic)}
	}
	return Obstacle{TopicRejected, fmt.Sprintf("topic %q: Kafka responds with %v", topic, err)}
}
