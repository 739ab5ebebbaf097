package kafkawire

import (
	"errors"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// Code is an error code of Kafka.
type Code = kafkago.Error

// The codes that packages outside of this one distinguish.
const (
	ClusterAuthorizationFailed         = kafkago.ClusterAuthorizationFailed
	ConcurrentTransactions             = kafkago.ConcurrentTransactions
	CoordinatorNotAvailable            = kafkago.GroupCoordinatorNotAvailable
	FencedInstanceID                   = kafkago.FencedInstanceID
	GroupAuthorizationFailed           = kafkago.GroupAuthorizationFailed
	IllegalGeneration                  = kafkago.IllegalGeneration
	InvalidConfig                      = kafkago.InvalidConfiguration
	InvalidProducerEpoch               = kafkago.InvalidProducerEpoch
	InvalidProducerIDMapping           = kafkago.InvalidProducerIDMapping
	invalidReplicationFactor           = kafkago.InvalidReplicationFactor
	InvalidTopic                       = kafkago.InvalidTopic
	InvalidTransactionTimeout          = kafkago.InvalidTransactionTimeout
	LeaderNotAvailable                 = kafkago.LeaderNotAvailable
	MessageTooLarge                    = kafkago.MessageSizeTooLarge
	NotEnoughReplicas                  = kafkago.NotEnoughReplicas
	OffsetOutOfRange                   = kafkago.OffsetOutOfRange
	OperationNotAttempted              = kafkago.Error(55) // kafka-go uses another name
	PolicyViolation                    = kafkago.PolicyViolation
	ProducerFenced                     = kafkago.ProducerFenced
	RebalanceInProgress                = kafkago.RebalanceInProgress
	TopicAuthorizationFailed           = kafkago.TopicAuthorizationFailed
	TransactionalIDAuthorizationFailed = kafkago.TransactionalIDAuthorizationFailed
	Unknown                            = kafkago.Unknown
	UnknownMemberID                    = kafkago.UnknownMemberId
	UnknownTopicOrPartition            = kafkago.UnknownTopicOrPartition
	unsupportedCompressionType         = kafkago.UnsupportedCompressionType
)

// RejectionError is an error code of Kafka with the words of the broker, which are often the only reason: of a policy, or of a
// name that collides with another one.
type RejectionError struct {
	Code    Code
	Message string
}

func (e *RejectionError) Error() string { return fmt.Sprintf("%v (%s)", e.Code, e.Message) }
func (e *RejectionError) Unwrap() error { return e.Code }

// newRejection returns the error of a code with the words of the broker, which may be empty. It returns nil for code 0.
func newRejection(code Code, message string) error {
	switch {
	case code == 0:
		return nil
	case message == "":
		return code
	}
	// The words may repeat a name of any length.
	return &RejectionError{code, record.Shorten(message, 500)}
}

// wordsOf returns the words of the broker in an error, or "".
func wordsOf(err error) string {
	if rejection, ok := errors.AsType[*RejectionError](err); ok {
		return rejection.Message
	}
	return ""
}

// IsRetriable reports whether a request that failed with err may succeed later. An error without a
// code comes from the connection, such as to a coordinator that died. Retrying a permanent error costs
// time. Not retrying a temporary error would give up a takeover because a broker restarts.
func IsRetriable(err error) bool {
	code, ok := errors.AsType[Code](err)
	if !ok {
		return true
	}
	switch code {
	// kafka-go counts these codes as permanent, but they end with a restart, an election or a new topic.
	case kafkago.BrokerNotAvailable, kafkago.UnknownTopicOrPartition, kafkago.Unknown:
		return true
	}
	return code.Temporary()
}

// Verdict is the meaning of a broker's response for a batch.
type Verdict uint8

// The verdicts.
const (
	VerdictAcked      Verdict = iota
	VerdictRetry              // unknown, or not now: send the same bytes again soon
	VerdictTooLarge           // nothing was appended
	VerdictBadRecords         // some records are at fault: nothing was appended
	VerdictCorrupt            // the broker received other bytes than were sent
	VerdictRejected           // definitely rejected for now: send the same bytes again each second
	VerdictFenced
	VerdictBroken
)

// Classify returns the verdict for an error code. It never looks at texts. A code that is not listed
// holds the partition, so that nothing is skipped and an operator sees the reason.
func Classify(code Code) Verdict {
	switch code {
	case 0, kafkago.DuplicateSequenceNumber:
		return VerdictAcked

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
		return VerdictRetry

	case kafkago.MessageSizeTooLarge, kafkago.RecordListTooLarge:
		return VerdictTooLarge
	case kafkago.InvalidRecord, kafkago.InvalidTimestamp:
		return VerdictBadRecords
	case kafkago.InvalidMessage:
		return VerdictCorrupt
	case kafkago.InvalidProducerEpoch, kafkago.ProducerFenced:
		return VerdictFenced
	case kafkago.OutOfOrderSequenceNumber, kafkago.UnknownProducerId, kafkago.InvalidProducerIDMapping:
		return VerdictBroken
	}
	return VerdictRejected
}

// MayBeAppended reports whether a batch may be in the log although the broker responded with code.
// It excludes only codes with which a broker certainly ends the request before it appends. Any other
// code, also one of a future Kafka version, leaves the outcome unknown.
//
// Kafka may respond with an error although it has appended the batch: with acks=all it waits in
// DelayedProduce for the followers. If that wait ends without them, the code is
// NOT_LEADER_OR_FOLLOWER (the leader has moved), KAFKA_STORAGE_ERROR (its disk is gone),
// NOT_ENOUGH_REPLICAS_AFTER_APPEND, or REQUEST_TIMED_OUT. An exception after the append becomes
// UNKNOWN_SERVER_ERROR. UNKNOWN_TOPIC_OR_PARTITION ends that wait only if the topic was deleted, and
// its log with it.
func MayBeAppended(code Code) bool {
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
