package kafka

import (
	"errors"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/kafka/fence"
)

// Errors that end a sink.
var (
	// ErrFenced: somebody else has taken the transactional id. Who still holds the lease takes over again (N5).
	ErrFenced = fence.ErrFenced
	// ErrBroken: the broker has lost the producer's state, or a batch is too old for the broker to recognise it as one it
	// has. Nothing more is sent; open a new sink, whose read-back finds out what arrived.
	ErrBroken = errors.New("the idempotent session is broken")
	// ErrClosed: the sink's Run has ended.
	ErrClosed = errors.New("the sink is closed")
)

// verdict is what an answer of a broker means for a batch.
type verdict uint8

const (
	acked   verdict = iota
	again           // unknown, or not now: the same bytes again, soon
	split           // too large: nothing was appended
	records         // some records are at fault themselves: nothing was appended
	corrupt         // the broker read other bytes than we sent
	refused         // a definite no for now: nothing was appended, the same bytes again each second
	fenced
	broken
)

// classify reads an answer by its code, never by its text. A code that is not listed holds the partition: nothing is ever
// skipped, and an operator sees the reason.
func classify(code kafkago.Error) verdict {
	switch code {
	case 0, kafkago.DuplicateSequenceNumber:
		return acked
	case kafkago.LeaderNotAvailable, kafkago.NotLeaderForPartition, kafkago.RequestTimedOut, kafkago.BrokerNotAvailable,
		kafkago.ReplicaNotAvailable, kafkago.NetworkException, kafkago.NotEnoughReplicas, kafkago.NotEnoughReplicasAfterAppend,
		kafkago.KafkaStorageError, kafkago.FencedLeaderEpoch, kafkago.UnknownLeaderEpoch, kafkago.ThrottlingQuotaExceeded,
		kafkago.Unknown, kafkago.ListenerNotFound, kafkago.PreferredLeaderNotAvailable, kafkago.EligibleLeadersNotAvailable:
		return again
	case kafkago.MessageSizeTooLarge, kafkago.RecordListTooLarge:
		return split
	case kafkago.InvalidRecord, kafkago.InvalidTimestamp:
		return records
	case kafkago.InvalidMessage:
		return corrupt
	case kafkago.InvalidProducerEpoch, kafkago.ProducerFenced:
		return fenced
	case kafkago.OutOfOrderSequenceNumber, kafkago.UnknownProducerId, kafkago.InvalidProducerIDMapping:
		return broken
	}
	return refused
}

// ambiguous reports whether the batch may have been appended although the answer is no success.
func ambiguous(code kafkago.Error) bool {
	switch code {
	case kafkago.RequestTimedOut, kafkago.NotEnoughReplicasAfterAppend, kafkago.NetworkException, kafkago.Unknown, kafkago.KafkaStorageError:
		return true
	}
	return false
}

// Kinds of what holds records, fit for a metric label.
const (
	kindMissing     = "missing"
	kindForbidden   = "forbidden"
	kindNoLeader    = "no_leader"
	kindQuarantined = "quarantined"
	kindRefused     = "refused"
	kindUnreachable = "unreachable"
	kindGrowing     = "growing"
	kindAdopting    = "adopting"
)

// obstacle is why records wait: a kind for machines and a text for people.
type obstacle struct{ kind, text string }

func (o obstacle) none() bool { return o.kind == "" }

// topicObstacle explains a topic's error code in metadata or in an answer, with what to do about it.
func topicObstacle(topic string, err error, creates bool) obstacle {
	code, ok := errors.AsType[kafkago.Error](err)
	if !ok {
		return obstacle{kindUnreachable, fmt.Sprintf("topic %q cannot be asked for: %v", topic, err)}
	}
	switch code {
	case kafkago.UnknownTopicOrPartition:
		if creates {
			return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist yet; it is being created", topic)}
		}
		return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist; create it, or set topics.create", topic)}
	case kafkago.TopicAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf("topic %q may not be used; grant this user WRITE, READ and DESCRIBE on it", topic)}
	case kafkago.ClusterAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf("topic %q may not be created; grant this user CREATE on it, or create it by hand", topic)}
	case kafkago.InvalidTopic:
		return obstacle{kindRefused, fmt.Sprintf("%q is no name that Kafka allows for a topic; correct the routing", topic)}
	case kafkago.UnsupportedCompressionType:
		return obstacle{kindRefused, fmt.Sprintf("the broker of topic %q does not know this compression; change kafka.compression", topic)}
	case kafkago.PolicyViolation:
		return obstacle{kindRefused, fmt.Sprintf("a policy of the cluster refuses topic %q; ask its operators, or create the topic by hand", topic)}
	case kafkago.InvalidReplicationFactor:
		return obstacle{kindMissing, fmt.Sprintf("topic %q cannot be created with this replication: there are fewer brokers; lower topics.create.replication", topic)}
	}
	return obstacle{kindRefused, fmt.Sprintf("topic %q: Kafka answers %v", topic, err)}
}

// Away reports whether the records wait for brokers, which another node may reach, rather than for something that nobody
// can write now.
func (b Blocked) Away() bool { return b.Kind == kindUnreachable || b.Kind == kindNoLeader }
