package sink

import (
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/fence"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// Errors that end a sink.
var (
	// ErrFenced means that another process has taken the transactional id. If the owner still holds
	// the lease, it takes over again (N5).
	ErrFenced = fence.ErrFenced
	// ErrBroken means that the broker has lost the producer's state, or that a batch is too old for
	// the broker to recognize it as a duplicate. Nothing more is sent. Open a new sink, whose
	// read-back finds the records that arrived.
	ErrBroken = errors.New("the idempotent session is broken")
	// ErrReopen means that a new sink has to read back the records that arrived, or has to use
	// another transactional id. It may be opened at once.
	ErrReopen = errors.New("the sink has to be opened again")
	// errClosed means that the sink's Run has ended.
	errClosed = errors.New("the sink is closed")
)

// Kinds of obstacles. They are also the values of a metric label.
const (
	kindMissing     = "missing"
	kindForbidden   = "forbidden"
	kindNoLeader    = "no_leader"
	kindQuarantined = "quarantined"
	kindRefused     = "refused"
	kindUnreachable = "unreachable"
	kindAdopting    = "adopting"
	kindThrottled   = "throttled"
)

// obstacle is the reason why records wait: a kind for programs and a text for operators.
type obstacle struct{ kind, text string }

func (o obstacle) none() bool { return o.kind == "" }

// topicObstacle explains a topic's error code in metadata or in a response, with the fix. creates
// means that missing topics are created automatically.
func topicObstacle(topic string, err error, creates bool) obstacle {
	o := explainTopic(topic, err, creates)
	// Kafka's own words are often the only reason: which name collides, or which policy rejects the topic.
	if words := kafkawire.WordsOf(err); words != "" {
		o.text += "; Kafka: " + words
	}
	return o
}

// explainTopic is topicObstacle without the words of Kafka.
func explainTopic(topic string, err error, creates bool) obstacle {
	code, ok := errors.AsType[kafkawire.Code](err)
	if !ok {
		return obstacle{kindUnreachable, fmt.Sprintf("topic %q cannot be looked up: %v", topic, err)}
	}

	switch code {
	case kafkawire.UnknownTopicOrPartition:
		if creates {
			return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist yet; it is being created", topic)}
		}
		return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist; create it, or set topics.create", topic)}

	case kafkawire.TopicAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf(
			"topic %q may not be used; grant this user WRITE, READ and DESCRIBE on it", topic)}

	case kafkawire.ClusterAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf(
			"topic %q may not be created; grant this user CREATE on it, or create it manually", topic)}

	case kafkawire.LeaderNotAvailable:
		return obstacle{kindNoLeader, fmt.Sprintf(
			"a partition of topic %q has no leader that responds; check its brokers", topic)}

	case kafkawire.InvalidTopic:
		return obstacle{kindRefused, fmt.Sprintf("Kafka does not allow the topic name %q; correct the routing", topic)}

	case kafkawire.UnsupportedCompressionType:
		return obstacle{kindRefused, fmt.Sprintf(
			"the broker of topic %q does not support this compression; change kafka.compression", topic)}

	case kafkawire.PolicyViolation:
		return obstacle{kindRefused, fmt.Sprintf(
			"a policy of the cluster rejects topic %q; contact its operators, or create the topic manually", topic)}

	case kafkawire.InvalidReplicationFactor:
		return obstacle{kindMissing, fmt.Sprintf("topic %q cannot be created with this replication factor: "+
			"there are fewer brokers; lower topics.create.replication", topic)}
	}
	return obstacle{kindRefused, fmt.Sprintf("topic %q: Kafka responds with %v", topic, err)}
}

// WaitsForBroker reports whether the records wait for brokers that another node may be able to reach. It returns
// false if no node can write the target now.
func (b Unwritable) WaitsForBroker() bool { return b.Kind == kindUnreachable || b.Kind == kindNoLeader }

// TopicRefusal returns why a topic cannot be used or created, with the fix, in the words of the status
// command. creates means that missing topics are created automatically. It returns "" for a nil error.
func TopicRefusal(topic string, err error, creates bool) string {
	if err == nil {
		return ""
	}
	return topicObstacle(topic, err, creates).text
}
