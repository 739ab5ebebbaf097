package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	kafka "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/fetch"
)

// tailer reads a new topic from its start, with one long poll for all partitions of a broker.
type tailer struct {
	brokers []brokerLink
	wg      sync.WaitGroup
	stop    context.CancelFunc

	mu  sync.Mutex
	err error
}

const (
	fetchWait  = 250 * time.Millisecond
	fetchBytes = 4 << 20
)

// sender is the producer identity of a record. Each owner has a different one.
type sender struct {
	id    int64
	epoch int16
}

// arrival is called for each record, with its number, the time of its arrival, and its sender.
type arrival func(number int, at time.Time, from sender)

// numbering returns the number of an event in the value of its record.
type numbering func(value []byte) (number int, ok bool)

// startConsumer starts to read the topic. It calls got for each record, from one goroutine per broker, until close.
func (b *bench) startConsumer(ctx context.Context, topic string, got arrival) (*tailer, error) {
	leaders, err := b.cluster.partitionLeaders(ctx, topic)
	if err != nil {
		return nil, err
	}

	ctx, cancel := context.WithCancel(ctx)
	tailer := &tailer{stop: cancel}
	for addr, parts := range leaders {
		conn, err := b.dialLink(ctx, addr)
		if err != nil {
			tailer.stopReading()
			return nil, err
		}
		tailer.brokers = append(tailer.brokers, conn)

		tailer.wg.Go(func() {
			if err := fetchRecords(ctx, conn, topic, parts, b.numberOf, got); err != nil && ctx.Err() == nil {
				tailer.mu.Lock()
				tailer.err = errors.Join(tailer.err, err)
				tailer.mu.Unlock()
			}
		})
	}
	return tailer, nil
}

func (c *tailer) stopReading() {
	c.stop()
	for _, b := range c.brokers {
		b.closeConnection()
	}
	c.wg.Wait()
}

// failure returns the errors that ended the reading.
func (c *tailer) failure() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// fetchRecords reads the partitions of one broker until ctx ends.
func fetchRecords(ctx context.Context, link brokerLink, topic string, parts []int32, numberOf numbering, got arrival) error {
	req := &fetch.Request{
		ReplicaID: -1, MaxWaitTime: int32(fetchWait.Milliseconds()), MinBytes: 1, MaxBytes: fetchBytes, SessionEpoch: -1,
		Topics: []fetch.RequestTopic{{Topic: topic}},
	}

	for _, p := range parts {
		req.Topics[0].Partitions = append(req.Topics[0].Partitions, fetch.RequestPartition{
			Partition: p, CurrentLeaderEpoch: -1, LogStartOffset: -1, PartitionMaxBytes: fetchBytes,
		})
	}

	for ctx.Err() == nil {
		message, err := link.sendRequest(responseTime, req)
		if err != nil {
			return fmt.Errorf("consuming: %w", err)
		}

		at := time.Now()
		for _, t := range message.(*fetch.Response).Topics {
			for i := range t.Partitions {
				partition := &t.Partitions[i]
				if partition.ErrorCode != 0 {
					return fmt.Errorf("consuming %s-%d: %w", topic, partition.Partition, kafka.Error(partition.ErrorCode))
				}

				next, err := readRecords(&partition.RecordSet, numberOf, func(n int, from sender) { got(n, at, from) })
				if err != nil {
					return fmt.Errorf("consuming %s-%d: %w", topic, partition.Partition, err)
				}

				// The next request continues after the last record or marker.
				for j := range req.Topics[0].Partitions {
					if requestPartition := &req.Topics[0].Partitions[j]; requestPartition.Partition == partition.Partition {
						requestPartition.FetchOffset = max(requestPartition.FetchOffset, next)
					}
				}
			}
		}
	}
	return nil
}

// readRecords calls got for the records of a response, and returns the next offset. Markers also count for
// the offset.
func readRecords(set *protocol.RecordSet, numberOf numbering, got func(number int, from sender)) (next int64, err error) {
	stream, ok := set.Records.(*protocol.RecordStream)
	if !ok {
		return 0, nil
	}

	for _, b := range stream.Records {
		_, marker := b.(*protocol.ControlBatch)
		var from sender
		if rb, ok := b.(*protocol.RecordBatch); ok {
			from = sender{rb.ProducerID, rb.ProducerEpoch}
		}

		for {
			rec, err := b.ReadRecord()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return next, err
			}

			next = rec.Offset + 1
			value, err := protocol.ReadAll(rec.Value)
			if err != nil {
				return next, err
			}
			if n, ok := numberOf(value); ok && !marker {
				got(n, from)
			}

			if rec.Key != nil {
				_ = rec.Key.Close()
			}
			if rec.Value != nil {
				_ = rec.Value.Close()
			}
		}
	}
	return next, nil
}
