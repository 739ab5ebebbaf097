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
	// ErrReopen: a new sink has to read back what arrived, or has to use another transactional id. It may be opened at once.
	ErrReopen = errors.New("the sink has to be opened anew")
	// ErrClosed: the sink's Run has ended.
	ErrClosed = errors.New("the sink is closed")
)

// verdict is what an answer of a broker means for a batch.
type verdict uint8

const (
	verdictAcked      verdict = iota
	verdictRetry              // unknown, or not now: the same bytes again, soon
	verdictTooLarge           // too large: nothing was appended
	verdictBadRecords         // some records are at fault themselves: nothing was appended
	verdictCorrupt            // the broker read other bytes than we sent
	verdictRefused            // a definite no for now: nothing was appended, the same bytes again each second
	verdictFenced
	verdictBroken
)

// classify reads an answer by its code, never by its text. A code that is not listed holds the partition: nothing is ever
// skipped, and an operator sees the reason.
func classify(code kafkago.Error) verdict {
	switch code {
	case 0, kafkago.DuplicateSequenceNumber:
		return verdictAcked
	case kafkago.LeaderNotAvailable, kafkago.NotLeaderForPartition, kafkago.RequestTimedOut, kafkago.BrokerNotAvailable,
		kafkago.ReplicaNotAvailable, kafkago.NetworkException, kafkago.NotEnoughReplicas, kafkago.NotEnoughReplicasAfterAppend,
		kafkago.KafkaStorageError, kafkago.FencedLeaderEpoch, kafkago.UnknownLeaderEpoch, kafkago.ThrottlingQuotaExceeded,
		kafkago.Unknown, kafkago.ListenerNotFound, kafkago.PreferredLeaderNotAvailable, kafkago.EligibleLeadersNotAvailable:
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

// mayBeAppended reports whether a batch may be in the log although this is the answer for it. Only codes with which a broker
// certainly ends the request before it appends are excluded; whatever is not listed, also what Kafka may answer one day,
// leaves the fate of the batch unknown.
//
// Kafka answers a batch that it has appended with an error, too: acks=all waits in DelayedProduce for the followers, and
// when that wait ends without them the code is NOT_LEADER_OR_FOLLOWER (the leader has moved), KAFKA_STORAGE_ERROR (its disk
// is gone), NOT_ENOUGH_REPLICAS_AFTER_APPEND, or REQUEST_TIMED_OUT. An exception behind the append becomes
// UNKNOWN_SERVER_ERROR. UNKNOWN_TOPIC_OR_PARTITION ends that wait only when the topic was deleted, and its log with it.
func mayBeAppended(code kafkago.Error) bool {
	switch code {
	case kafkago.TopicAuthorizationFailed, kafkago.ClusterAuthorizationFailed, kafkago.TransactionalIDAuthorizationFailed, // KafkaApis asks first
		kafkago.InvalidTopic, kafkago.UnsupportedVersion, kafkago.InvalidRequest, kafkago.InvalidRequiredAcks,
		kafkago.UnsupportedCompressionType, kafkago.UnsupportedForMessageFormat, // so is the request itself validated
		kafkago.UnknownTopicOrPartition,                         // nor has the log of a topic that is deleted anything for the next one of the name
		kafkago.NotEnoughReplicas,                               // Partition counts the replicas before it appends
		kafkago.MessageSizeTooLarge, kafkago.RecordListTooLarge, // UnifiedLog looks at the size,
		kafkago.InvalidMessage, kafkago.InvalidRecord, kafkago.InvalidTimestamp: // the checksum and the records before it appends
		return false
	}
	return true
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
	case kafkago.LeaderNotAvailable:
		return obstacle{kindNoLeader, fmt.Sprintf("a partition of topic %q has no leader that answers; look at its brokers", topic)}
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
