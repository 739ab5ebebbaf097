package fence

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

// Errors of a takeover and of the calls after it. Other errors wrap a kafkawire.Code.
var (
	// errStuck means that a transaction of this transactional id does not end: a partition in it cannot
	// take its marker (CONCURRENT_TRANSACTIONS).
	errStuck = errors.New("the transactional id has an unfinished transaction")
	// ErrFenced means that another process has taken the transactional id. An owner with a confirmed
	// lease takes over again. Three times within a minute means that another deployment uses the same id
	// (N5).
	ErrFenced = errors.New("the transactional id was taken by another owner")
	// ErrSelfMove means that the owner's own transaction hangs. The caller drains, calls NextGeneration,
	// saves and continues (N4).
	ErrSelfMove = errors.New("a transaction of the owner does not end; its next transactional id is needed")
	// errNoHealthy means that no partition could take a marker.
	errNoHealthy = errors.New("no partition is healthy")
	// errDeadline means that a step ran out of time without a response of the coordinator that decides it.
	errDeadline = errors.New("no usable response in time")
	// ErrIDForbidden means that the ACLs do not allow this user to use a transactional id.
	ErrIDForbidden = errors.New("the transactional id may not be used; " +
		"grant this user WRITE and DESCRIBE on the transactional ids that begin with \"outrelay.\"")
)

// Producer is a producer id and its epoch.
type Producer = batch.Producer

// anyEpoch makes Init return the next epoch, whichever process holds the id. The zero Producer is a
// valid identity, so it must not be a default.
var anyEpoch = Producer{ID: -1, Epoch: -1}

// Client sends the requests of takeovers. It is safe for concurrent use.
type Client struct{ kafka *kafkawire.Client }

// NewClient returns a client that uses the connections of client.
func NewClient(client *kafkawire.Client) *Client { return &Client{client} }

// Init returns the next epoch of a transactional id. With anyEpoch it takes the id over, and aborts the
// transaction that the last owner has left open. With a producer, only the holder of that epoch gets the
// next one. It retries while the coordinator is away or loading, until ctx ends. Errors: errStuck,
// ErrFenced, ErrIDForbidden, errDeadline, or the code of a rejection.
func (c *Client) Init(ctx context.Context, id string, producer Producer, patience Patience) (got Producer, err error) {
	err = patience.retry(ctx, "taking transactional id "+id, func() error {
		got, err = c.kafka.InitProducerID(ctx, id, producer)
		return err
	})
	if errors.Is(err, kafkawire.TransactionalIDAuthorizationFailed) || errors.Is(err, kafkawire.ClusterAuthorizationFailed) {
		err = fmt.Errorf("%w: %w", ErrIDForbidden, err)
	}
	if err != nil {
		return Producer{}, err
	}
	return got, nil
}

// Barrier begins to write abort markers with the epoch of producer into partitions, with a transaction without
// records. Success does not mean that the markers are written: they have to be read. A partition that
// cannot be part of a transaction (missing, not authorized) is left out, and is in rejected with its
// error. begun reports whether the transaction was begun. If it was, an error leaves the id with an open
// transaction.
func (c *Client) Barrier(
	ctx context.Context, id string, producer Producer, partitions []record.TopicPartition, patience Patience,
) (rejected map[record.TopicPartition]error, begun bool, err error) {
	rejected = map[record.TopicPartition]error{}
	// Kafka accepts or rejects a request as a whole. So it is sent again without the partitions at
	// fault.
	for !begun {
		if len(partitions) == 0 {
			return rejected, false, nil
		}

		before := len(rejected)
		err = patience.retry(ctx, "adding partitions to a transaction of "+id, func() error {
			return c.addPartitions(ctx, id, producer, partitions, rejected)
		})
		if err != nil {
			return rejected, false, err
		}
		begun = len(rejected) == before
		partitions = withoutRejected(partitions, rejected)
	}

	err = patience.retry(ctx, "aborting a transaction of "+id, func() error {
		return c.kafka.AbortTransaction(ctx, id, producer, len(partitions))
	})
	return rejected, true, err
}

// addPartitions adds all partitions in one request, which Kafka accepts or rejects as a whole. It puts
// the partitions that are at fault into rejected. The error is an error of the transaction.
func (c *Client) addPartitions(
	ctx context.Context, id string, producer Producer,
	partitions []record.TopicPartition, rejected map[record.TopicPartition]error,
) error {
	codes, err := c.kafka.AddPartitions(ctx, id, producer, partitions)
	if err != nil {
		return err
	}

	for tp, code := range codes {
		switch code {
		case 0, kafkawire.OperationNotAttempted:
			// Kafka did not try the others if one partition is at fault.
		case kafkawire.UnknownTopicOrPartition, kafkawire.TopicAuthorizationFailed, kafkawire.InvalidTopic:
			rejected[tp] = code
		default:
			err = code
		}
	}
	if err == nil && len(codes) < len(partitions) {
		// The response is incomplete, so the step is retried.
		err = kafkawire.Unknown
	}
	return err
}

func withoutRejected(list []record.TopicPartition, rejected map[record.TopicPartition]error) []record.TopicPartition {
	kept := make([]record.TopicPartition, 0, len(list))
	for _, tp := range list {
		if rejected[tp] == nil {
			kept = append(kept, tp)
		}
	}
	return kept
}

// Event is an event that an operator may need. It is not an error: the takeover continues.
type Event struct {
	Kind  EventKind
	Topic string // of the kinds that concern a partition
	Text  string // for operators: what happened, to which target, and the fix
	Alarm bool   // of ProducerIDChanged: it was not expected
}

// EventKind names an event. It is fit for a log field and a metric label.
type EventKind string

// The kinds of events.
const (
	// OutOfRange: the stored offset is not in the partition, which was read from the start of its log
	// (N8, N9).
	OutOfRange EventKind = "read_back_out_of_range"
	// Truncated: the tail is longer than the bound, and a part of it was not read back (N8).
	Truncated EventKind = "read_back_truncated"
	// Corrupt: a batch cannot be read, and was skipped.
	Corrupt EventKind = "read_back_corrupt"
	// ProducerIDChanged: the coordinator forgot an earlier producer id, which can no longer be fenced (N5).
	ProducerIDChanged EventKind = "producer_id_changed"
	// ForeignProducer: another client has written with the producer id of the relay (N4).
	ForeignProducer EventKind = "foreign_producer"
	// ClusterChanged: the previous owner sent to another Kafka cluster.
	ClusterChanged EventKind = "cluster_changed"
	// GenerationMoved: the transactional id was left for the id of the next generation.
	GenerationMoved EventKind = "generation_moved"
	// Hung: the first step of a takeover hung. Partitions that cannot be fenced wait.
	Hung EventKind = "transactional_id_hung"
	// Waiting: a step has been retried for seconds.
	Waiting EventKind = "takeover_waiting"
)

func formatPartition(tp record.TopicPartition) string {
	return fmt.Sprintf("%s-%d", tp.Topic, tp.Partition)
}
