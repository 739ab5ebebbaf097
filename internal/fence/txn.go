package fence

import (
	"context"
	"errors"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/record"
)

// txnTimeout is how long the coordinator leaves a transaction open before it aborts it and bumps the epoch itself. A
// barrier over hundreds of fresh partitions takes seconds.
const txnTimeout = 60_000

// Init is InitProducerID: with Anew it takes the transactional id and aborts what its last owner left open; with a
// producer it is conditional: only the holder of that epoch gets the next one. A coordinator that is away or loading is
// asked again until ctx ends. Errors: ErrStuck, ErrFenced, ErrDeadline, or the code of a refusal.
func (c *Client) Init(ctx context.Context, txid string, p Producer, pat Patience) (Producer, error) {
	var got Producer
	err := pat.do(ctx, "taking transactional id "+txid, func(ctx context.Context) error {
		ctx, cancel := c.bounded(ctx, 1)
		defer cancel()
		r, err := c.client().InitProducerID(ctx, &kafka.InitProducerIDRequest{
			TransactionalID: txid, TransactionTimeoutMs: txnTimeout, ProducerID: int(p.ID), ProducerEpoch: int(p.Epoch),
		})
		if err == nil {
			err = r.Error
		}
		if err == nil {
			got = Producer{ID: int64(r.Producer.ProducerID), Epoch: int16(r.Producer.ProducerEpoch)}
		}
		return err
	}, c.refresh)
	return got, err
}

// client is kafka-go's client over our transport.
func (c *Client) client() *kafka.Client {
	return &kafka.Client{Addr: c.Kafka.Addr, Transport: c.Transport}
}

// Barrier begins to write an abort marker with p's epoch into parts, by a transaction without records. Success says
// nothing about the markers: they have to be read. A partition that cannot be part of a transaction (missing,
// not authorised) is left out and reported with its own error; added reports whether the transaction was begun, in which
// case an error leaves the id with an open transaction.
func (c *Client) Barrier(ctx context.Context, txid string, p Producer, parts []record.TopicPartition, pat Patience) (refused map[record.TopicPartition]error, added bool, err error) {
	refused = map[record.TopicPartition]error{}
	for !added {
		if len(parts) == 0 {
			return refused, false, nil
		}
		before := len(refused)
		err = pat.do(ctx, "adding partitions to a transaction of "+txid, func(ctx context.Context) error {
			return c.add(ctx, txid, p, parts, refused)
		}, c.refresh)
		if err != nil {
			return refused, false, err
		}
		if added = len(refused) == before; !added {
			parts = without(parts, refused)
		}
	}
	err = pat.do(ctx, "aborting a transaction of "+txid, func(ctx context.Context) error {
		ctx, cancel := c.bounded(ctx, len(parts))
		defer cancel()
		r, err := c.client().EndTxn(ctx, &kafka.EndTxnRequest{TransactionalID: txid, ProducerID: int(p.ID), ProducerEpoch: int(p.Epoch)})
		if err == nil {
			err = r.Error
		}
		return err
	}, c.refresh)
	return refused, true, err
}

// add asks for all of parts at once, which Kafka grants or refuses as a whole. Partitions at fault themselves go to
// refused; the error is one of the transaction.
func (c *Client) add(ctx context.Context, txid string, p Producer, parts []record.TopicPartition, refused map[record.TopicPartition]error) error {
	ctx, cancel := c.bounded(ctx, len(parts))
	defer cancel()
	topics := map[string][]kafka.AddPartitionToTxn{}
	for _, tp := range parts {
		topics[tp.Topic] = append(topics[tp.Topic], kafka.AddPartitionToTxn{Partition: int(tp.Partition)})
	}
	r, err := c.client().AddPartitionsToTxn(ctx, &kafka.AddPartitionsToTxnRequest{
		TransactionalID: txid, ProducerID: int(p.ID), ProducerEpoch: int(p.Epoch), Topics: topics,
	})
	if err != nil {
		return err
	}
	answered := 0
	for topic, list := range r.Topics {
		for _, x := range list {
			answered++
			switch {
			case x.Error == nil, errors.Is(x.Error, notAttempted):
			case errors.Is(x.Error, kafka.UnknownTopicOrPartition), errors.Is(x.Error, kafka.TopicAuthorizationFailed), errors.Is(x.Error, kafka.InvalidTopic):
				refused[record.TopicPartition{Topic: topic, Partition: int32(x.Partition)}] = x.Error
			default:
				err = x.Error
			}
		}
	}
	if err == nil && answered < len(parts) {
		err = kafka.Unknown // half an answer: ask again
	}
	return err
}

func without(parts []record.TopicPartition, refused map[record.TopicPartition]error) []record.TopicPartition {
	kept := make([]record.TopicPartition, 0, len(parts))
	for _, tp := range parts {
		if refused[tp] == nil {
			kept = append(kept, tp)
		}
	}
	return kept
}
