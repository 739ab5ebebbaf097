package kafkawire

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/addpartitionstotxn"
	"github.com/segmentio/kafka-go/protocol/endtxn"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/initproducerid"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

const (
	coordinatorOfGroups       = 0
	coordinatorOfTransactions = 1

	// leastTransactionTimeout is the shortest time that is tried.
	leastTransactionTimeout = time.Second
)

// callCoordinator sends a request about items partitions to the coordinator of a transactional id. It
// looks the coordinator up each time: such requests are rare, and coordinators move.
func (c *Client) callCoordinator(
	ctx context.Context, id string, items int, req protocol.Message,
) (protocol.Message, error) {
	addr, err := c.findCoordinator(ctx, coordinatorOfTransactions, id)
	if err != nil {
		return nil, err
	}
	return c.callBroker(ctx, addr, timeoutFor(adminTimeout, items), req)
}

// findCoordinator returns the address of the coordinator of a consumer group or transactional id.
func (c *Client) findCoordinator(ctx context.Context, keyType int8, id string) (string, error) {
	message, err := c.callAny(ctx, metaTimeout, &findcoordinator.Request{Key: id, KeyType: keyType})
	if err != nil {
		return "", fmt.Errorf("finding the coordinator of %s: %w", id, err)
	}
	at := message.(*findcoordinator.Response)
	if at.ErrorCode != 0 {
		return "", fmt.Errorf("finding the coordinator of %s: %w", id, Code(at.ErrorCode))
	}
	return net.JoinHostPort(at.Host, strconv.Itoa(int(at.Port))), nil
}

// codeError returns the error of a code, nil for 0.
func codeError(code int16) error {
	if code == 0 {
		return nil
	}
	return Code(code)
}

// InitProducerID returns the next epoch of a transactional id. If producer is a producer, only the holder of
// its epoch gets the next one. With the id and epoch -1 the call always succeeds, and aborts the
// transaction that the last owner has left open. An error of the coordinator is a Code.
//
// The coordinator aborts a transaction, and bumps the epoch itself, after Config.TransactionTimeout, or after a shorter time
// if the cluster does not allow that.
func (c *Client) InitProducerID(ctx context.Context, id string, producer batch.Producer) (batch.Producer, error) {
	for {
		timeout := time.Duration(c.transactionTimeout.Load())
		message, err := c.callCoordinator(ctx, id, 1, &initproducerid.Request{
			TransactionalID:      id,
			TransactionTimeoutMs: int32(timeout.Milliseconds()),
			ProducerID:           producer.ID,
			ProducerEpoch:        producer.Epoch,
		})
		if err != nil {
			return batch.Producer{}, err
		}

		response := message.(*initproducerid.Response)
		err = codeError(response.ErrorCode)
		if !errors.Is(err, InvalidTransactionTimeout) {
			return batch.Producer{ID: response.ProducerID, Epoch: response.ProducerEpoch}, err
		}
		// No broker reports its transaction.max.timeout.ms to every user.
		if timeout/2 < leastTransactionTimeout {
			return batch.Producer{}, fmt.Errorf("%w: the shortest that is tried is %s; raise transaction.max.timeout.ms of the brokers", err, timeout)
		}
		c.transactionTimeout.CompareAndSwap(int64(timeout), int64(timeout/2))
	}
}

// AddPartitions adds partitions to the transaction of a transactional id. The result has the code of
// each partition that the coordinator has named.
func (c *Client) AddPartitions(
	ctx context.Context, id string, producer batch.Producer, partitions []record.TopicPartition,
) (map[record.TopicPartition]Code, error) {
	req := &addpartitionstotxn.Request{TransactionalID: id, ProducerID: producer.ID, ProducerEpoch: producer.Epoch}
	for topic, ids := range groupByTopic(partitions) {
		req.Topics = append(req.Topics, addpartitionstotxn.RequestTopic{Name: topic, Partitions: ids})
	}

	message, err := c.callCoordinator(ctx, id, len(partitions), req)
	if err != nil {
		return nil, err
	}
	out := make(map[record.TopicPartition]Code, len(partitions))
	for _, t := range message.(*addpartitionstotxn.Response).Results {
		for _, r := range t.Results {
			out[record.TopicPartition{Topic: t.Name, Partition: r.PartitionIndex}] = Code(r.ErrorCode)
		}
	}
	return out, nil
}

// AbortTransaction makes the coordinator abort the transaction of a transactional id, which has items
// partitions. It returns before the markers are written.
func (c *Client) AbortTransaction(ctx context.Context, id string, producer batch.Producer, items int) error {
	req := &endtxn.Request{TransactionalID: id, ProducerID: producer.ID, ProducerEpoch: producer.Epoch}
	message, err := c.callCoordinator(ctx, id, items, req)
	if err != nil {
		return err
	}
	return codeError(message.(*endtxn.Response).ErrorCode)
}
