package devstack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"sync"
	"time"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/outrelay/outrelay/internal/base/retry"
)

const (
	tailWait    = 500 * time.Millisecond // of a fetch that finds no record
	tailBytes   = 4 << 20                // of one fetch
	tailRetry   = 100 * time.Millisecond // after an error
	tailRefresh = time.Second            // between two checks for new partitions
)

// Header is a header of a record. A nil value is a null.
type Header struct {
	Key   string
	Value []byte
}

// Message is a record as a consumer receives it. Its bytes are not shared.
type Message struct {
	Topic      string
	Partition  int
	Offset     int64
	Key, Value []byte // nil is a null
	Headers    []Header
	Time       time.Time // the record's timestamp
	Seen       time.Time // when the fetch of the record returned
}

// Header returns the value of the first header with the name, or "" if there is none.
func (m Message) Header(name string) string {
	for _, h := range m.Headers {
		if h.Key == name {
			return string(h.Value)
		}
	}
	return ""
}

// Tail reads all partitions of the topics from their first record on and calls receive for each record, until
// ctx ends. It is an independent reader for demos and tests: it uses no code of the relay, also reads
// uncommitted records, and commits no offsets. Records of one partition arrive in order. receive
// runs concurrently for several partitions, and blocks its own partition while it runs. Markers of transactions
// are not records. Tail retries brokers and partitions that are not available, and also reads topics and
// partitions that are created later.
func Tail(ctx context.Context, brokers, topics []string, receive func(Message)) {
	tr := &kafka.Transport{MetadataTTL: tailRefresh, MetadataTopics: topics}
	defer tr.CloseIdleConnections()
	cl := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr}

	var wg sync.WaitGroup
	defer wg.Wait()

	type part struct {
		topic string
		id    int
	}

	reading := map[part]bool{}
	for {
		res, err := cl.Metadata(ctx, &kafka.MetadataRequest{Topics: topics})
		if err == nil {
			for _, t := range res.Topics {
				for _, p := range t.Partitions {
					// A topic without a leader or a partition that is new is read in a later round.
					if pt := (part{t.Name, p.ID}); t.Error == nil && !reading[pt] {
						reading[pt] = true
						wg.Go(func() { tailPartition(ctx, cl, pt.topic, pt.id, receive) })
					}
				}
			}
		}

		if retry.Sleep(ctx, tailRefresh) != nil {
			return
		}
	}
}

// tailPartition reads one partition until ctx ends.
func tailPartition(ctx context.Context, cl *kafka.Client, topic string, partition int, receive func(Message)) {
	next := kafka.FirstOffset
	for ctx.Err() == nil {
		res, err := cl.Fetch(ctx, &kafka.FetchRequest{
			Topic: topic, Partition: partition, Offset: next, MinBytes: 1, MaxBytes: tailBytes, MaxWait: tailWait,
		})
		seen := time.Now()
		if err == nil {
			err = res.Error
		}

		// The retention has removed the records at next in the meantime.
		if errors.Is(err, kafka.OffsetOutOfRange) {
			next = kafka.FirstOffset
		}
		if err != nil {
			_ = retry.Sleep(ctx, tailRetry)
			continue
		}

		if next == kafka.FirstOffset {
			next = res.LogStartOffset
		}
		next = tailRecords(res.Records, next, func(message Message) {
			message.Topic, message.Partition, message.Seen = topic, partition, seen
			receive(message)
		})
	}
}

// tailRecords calls receive for the records from next on, and returns the offset of the next fetch. If a record
// cannot be read, tailRecords stops there, and the next fetch starts with this record.
func tailRecords(set kafka.RecordReader, next int64, receive func(Message)) int64 {
	batches := []kafka.RecordReader{set}
	if stream, ok := set.(*protocol.RecordStream); ok {
		batches = stream.Records
	}

	for _, b := range batches {
		// A marker has an offset but no record.
		if batch, ok := b.(*protocol.ControlBatch); ok {
			next = max(next, batch.Offset()+1)
			continue
		}

		for {
			record, err := b.ReadRecord()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				return next
			}

			message, err := message(record)
			if err != nil {
				return next
			}
			// A batch may begin before the offset that was requested.
			if message.Offset >= next {
				next = message.Offset + 1
				receive(message)
			}
		}
	}
	return next
}

func message(record *kafka.Record) (Message, error) {
	message := Message{Offset: record.Offset, Time: record.Time}
	var err error
	if message.Key, err = protocol.ReadAll(record.Key); err != nil {
		return message, err
	}
	if message.Value, err = protocol.ReadAll(record.Value); err != nil {
		return message, err
	}

	for _, h := range record.Headers {
		message.Headers = append(message.Headers, Header(h))
	}
	return message, errors.Join(closed(record.Key), closed(record.Value))
}

func closed(data protocol.Bytes) error {
	if data == nil {
		return nil
	}
	return data.Close()
}

// CreateTopic creates a topic and blocks until every partition has a leader. If the topic exists, it returns
// an error.
func (s *Stack) CreateTopic(ctx context.Context, name string, partitions, replicas int) error {
	cl, done := newClient(s.Brokers())
	defer done()
	if partitions < 1 || partitions > math.MaxInt32 || replicas < 1 || replicas > len(s.brokers) {
		return fmt.Errorf("creating topic %s: %d partitions with %d replicas are not possible on %d brokers",
			name, partitions, replicas, len(s.brokers))
	}

	err := retryWhile(ctx, func() error {
		config := kafka.TopicConfig{Topic: name, NumPartitions: partitions, ReplicationFactor: replicas}
		res, err := cl.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{config}})
		if err == nil {
			err = res.Errors[name]
		}
		return err
	}, isAway)
	if err != nil {
		return fmt.Errorf("creating topic %s: %w", name, err)
	}

	// Kafka returns before the leaders are elected.
	for {
		led := 0
		for p := range partitions {
			if partition, err := readPartition(ctx, cl, name, p); err == nil && partition.Leader.Host != "" {
				led++
			}
		}

		if led == partitions {
			return nil
		}
		if retry.Sleep(ctx, tailRetry) != nil {
			return fmt.Errorf("topic %s: %d of %d partitions have a leader: %w", name, led, partitions, context.Cause(ctx))
		}
	}
}
