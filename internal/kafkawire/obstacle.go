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

// Obstacle is the reason why a topic cannot be written: a kind for programs, and the cause and the fix for operators. The zero value is no
// obstacle.
type Obstacle struct{ Kind, Cause, Fix string }

// Text returns the cause and the fix as one text.
func (o Obstacle) Text() string { return JoinFix(o.Cause, o.Fix) }

// JoinFix returns a cause and its fix as one text. The fix may be empty.
func JoinFix(cause, fix string) string {
	if fix == "" {
		return cause
	}
	return cause + "; " + fix
}

// TopicFix returns the fix of a topic that outrelay topics create can repair, or "". The command adds partitions to a topic that exists.
// partitions is the number that a topic needs to which records were written, or 0.
func TopicFix(kind, topic string, partitions int) string {
	create := "outrelay topics create " + topic
	switch {
	case kind == TopicTooSmall:
		return fmt.Sprintf("%s --partitions %d, which adds the missing partitions", create, partitions)
	case kind != TopicMissing:
		return ""
	case partitions > 0:
		return fmt.Sprintf("%s --partitions %d, or grant DESCRIBE if the topic exists", create, partitions)
	}
	return create + ", or let the relay create missing topics with topics.create"
}

// ExplainTopic explains a topic's error code in metadata or in a response, with the fix. It returns no obstacle for a nil error.
func ExplainTopic(topic string, err error) Obstacle {
	if err == nil {
		return Obstacle{}
	}

	obstacle := explainTopic(topic, err)
	// Kafka's own words are often the only reason: which name collides, or which policy rejects the topic.
	if words := wordsOf(err); words != "" {
		obstacle.Cause += " (Kafka: " + words + ")"
	}
	return obstacle
}

// explainTopic is ExplainTopic without the words of Kafka.
func explainTopic(topic string, err error) Obstacle {
	code, ok := errors.AsType[Code](err)
	if !ok {
		return Obstacle{TopicUnreachable, fmt.Sprintf("topic %q cannot be looked up: %v", topic, err), ""}
	}

	switch code {
	case UnknownTopicOrPartition:
		return Obstacle{TopicMissing, fmt.Sprintf("topic %q does not exist", topic), TopicFix(TopicMissing, topic, 0)}

	case TopicAuthorizationFailed:
		return Obstacle{TopicForbidden, fmt.Sprintf("topic %q may not be used", topic), "grant this user WRITE, READ and DESCRIBE on it"}

	case ClusterAuthorizationFailed:
		return Obstacle{TopicForbidden, fmt.Sprintf("topic %q may not be created", topic), "grant this user CREATE on it, or create it manually"}

	case LeaderNotAvailable:
		return Obstacle{TopicNoLeader, fmt.Sprintf("a partition of topic %q has no leader that responds", topic), "check its brokers"}

	case InvalidTopic:
		return Obstacle{TopicRejected, fmt.Sprintf("Kafka does not allow the topic name %q", topic), "correct the routing"}

	case unsupportedCompressionType:
		return Obstacle{TopicRejected, fmt.Sprintf("the broker of topic %q does not support this compression", topic), "change kafka.compression"}

	case PolicyViolation:
		return Obstacle{
			TopicRejected, fmt.Sprintf("a policy of the cluster rejects topic %q", topic),
			"contact its operators, or create the topic manually",
		}

	case invalidReplicationFactor:
		return Obstacle{
			TopicMissing, fmt.Sprintf("topic %q cannot be created with this replication factor: there are fewer brokers", topic),
			"lower topics.create.replication",
		}
	}
	return Obstacle{TopicRejected, fmt.Sprintf("topic %q: Kafka responds with %v", topic, err), ""}
}
