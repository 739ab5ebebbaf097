package kafka

import (
	"errors"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/kafka/fence"
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
	// ErrClosed means that the sink's Run has ended.
	ErrClosed = errors.New("the sink is closed")
)

// verdict is the meaning of a broker's response for a batch.
type verdict uint8

const (
	verdictAcked      verdict = iota
	verdictRetry              // unknown, or not now: send the same bytes again soon
	verdictTooLarge           // nothing was appended
	verdictBadRecords         // some records are at fault: nothing was appended
	verdictCorrupt            // the broker received other bytes than were sent
	verdictRefused            // definitely refused for now: send the same bytes again each second
	verdictFenced
	verdictBroken
)

// classify returns the verdict for an error code. It never looks at texts. A code that is not listed
// holds the partition, so that nothing is skipped and an operator sees the reason.
func classify(code kafkago.Error) verdict {
	switch code {
	case 0, kafkago.DuplicateSequenceNumber:
		return verdictAcked

	case kafkago.LeaderNotAvailable,
		kafkago.NotLeaderForPartition,
		kafkago.RequestTimedOut,
		kafkago.BrokerNotAvailable,
		kafkago.ReplicaNotAvailable,
		kafkago.NetworkException,
		kafkago.NotEnoughReplicas,
		kafkago.NotEnoughReplicasAfterAppend,
		kafkago.KafkaStorageError,
		kafkago.FencedLeaderEpoch,
		kafkago.UnknownLeaderEpoch,
		kafkago.ThrottlingQuotaExceeded,
		kafkago.Unknown,
		kafkago.ListenerNotFound,
		kafkago.PreferredLeaderNotAvailable,
		kafkago.EligibleLeadersNotAvailable:
		return verdictRetry

	case kafkago.MessageSizeTooLarge, kafkago.RecordListTooLarge:
		return verdictTooLarge
	case kafkago.InvalidRecord, kafkago.InvalidTimestamp:
		return verdictBadRecords
	case kafkago.InvalidMessage:
		return verdictCorrupt
	case kafkago.InvalidProducerEpoch, kafkago.ProducerFenced:
		return verdictFenced
	case kafkago.OutOfOrderSequenceNumber, kafkago.UnknownProducerId, kafkago.InvalidProducerIDMapping:
		return verdictBroken
	}
	return verdictRefused
}

// mayBeAppended reports whether a batch may be in the log although the broker responded with code.
// It excludes only codes with which a broker certainly ends the request before it appends. Any other
// code, also one of a future Kafka version, leaves the outcome unknown.
//
// Kafka may respond with an error although it has appended the batch: with acks=all it waits in
// DelayedProduce for the followers. If that wait ends without them, the code is
// NOT_LEADER_OR_FOLLOWER (the leader has moved), KAFKA_STORAGE_ERROR (its disk is gone),
// NOT_ENOUGH_REPLICAS_AFTER_APPEND, or REQUEST_TIMED_OUT. An exception after the append becomes
// UNKNOWN_SERVER_ERROR. UNKNOWN_TOPIC_OR_PARTITION ends that wait only if the topic was deleted, and
// its log with it.
func mayBeAppended(code kafkago.Error) bool {
	switch code {
	// KafkaApis checks the permissions first.
	case kafkago.TopicAuthorizationFailed,
		kafkago.ClusterAuthorizationFailed,
		kafkago.TransactionalIDAuthorizationFailed:
		return false

	// KafkaApis validates the request itself.
	case kafkago.InvalidTopic,
		kafkago.UnsupportedVersion,
		kafkago.InvalidRequest,
		kafkago.InvalidRequiredAcks,
		kafkago.UnsupportedCompressionType,
		kafkago.UnsupportedForMessageFormat:
		return false

	// If the topic was deleted, its log is not in a new topic of the same name.
	case kafkago.UnknownTopicOrPartition:
		return false

	// Partition counts the replicas before it appends.
	case kafkago.NotEnoughReplicas:
		return false

	// UnifiedLog checks the size, the checksum and the records before it appends.
	case kafkago.MessageSizeTooLarge,
		kafkago.RecordListTooLarge,
		kafkago.InvalidMessage,
		kafkago.InvalidRecord,
		kafkago.InvalidTimestamp:
		return false
	}
	return true
}

// Kinds of obstacles. They are fit for a metric label.
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

// obstacle is the reason why records wait: a kind for programs and a text for operators.
type obstacle struct{ kind, text string }

func (o obstacle) none() bool { return o.kind == "" }

// topicObstacle explains a topic's error code in metadata or in a response, with the fix. creates
// means that missing topics are created automatically.
func topicObstacle(topic string, err error, creates bool) obstacle {
	code, ok := errors.AsType[kafkago.Error](err)
	if !ok {
		return obstacle{kindUnreachable, fmt.Sprintf("topic %q cannot be looked up: %v", topic, err)}
	}

	switch code {
	case kafkago.UnknownTopicOrPartition:
		if creates {
			return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist yet; it is being created", topic)}
		}
		return obstacle{kindMissing, fmt.Sprintf("topic %q does not exist; create it, or set topics.create", topic)}

	case kafkago.TopicAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf(
			"topic %q may not be used; grant this user WRITE, READ and DESCRIBE on it", topic)}

	case kafkago.ClusterAuthorizationFailed:
		return obstacle{kindForbidden, fmt.Sprintf(
			"topic %q may not be created; grant this user CREATE on it, or create it manually", topic)}

	case kafkago.LeaderNotAvailable:
		return obstacle{kindNoLeader, fmt.Sprintf(
			"a partition of topic %q has no leader that responds; check its brokers", topic)}

	case kafkago.InvalidTopic:
		return obstacle{kindRefused, fmt.Sprintf("Kafka does not allow the topic name %q; correct the routing", topic)}

	case kafkago.UnsupportedCompressionType:
		return obstacle{kindRefused, fmt.Sprintf(
			"the broker of topic %q does not support this compression; change kafka.compression", topic)}

	case kafkago.PolicyViolation:
		return obstacle{kindRefused, fmt.Sprintf(
			"a policy of the cluster rejects topic %q; ask its operators, or create the topic manually", topic)}

	case kafkago.InvalidReplicationFactor:
		return obstacle{kindMissing, fmt.Sprintf("topic %q cannot be created with this replication factor: "+
			"there are fewer brokers; lower topics.create.replication", topic)}
	}
	return obstacle{kindRefused, fmt.Sprintf("topic %q: Kafka responds with %v", topic, err)}
}

// WaitsForBroker reports whether the records wait for brokers that another node may be able to reach. It returns
// false if no node can write the target now.
func (b Blocked) WaitsForBroker() bool { return b.Kind == kindUnreachable || b.Kind == kindNoLeader }
