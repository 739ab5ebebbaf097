package consumer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/retry"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	// publishAttempts is how often a topic is looked for that is not there.
	publishAttempts = 5
	// publishPatience is how long a partition is tried at least: a leader that died is replaced after the brokers' session, 9 s
	// by default.
	publishPatience = 15 * time.Second
)

// Publish writes messages with acks of all in-sync replicas. Those of one partition are one batch in their order; it is
// sent again when its fate is unknown, so what was written may be there twice, with the same id. While brokers are away or have no
// leader it goes on for some 15 s, or until ctx ends, and then returns the last error; a topic that is not there is an error within
// seconds.
func (k *Kafka) Publish(ctx context.Context, topic string, ms []*Message) error {
	if len(ms) == 0 {
		return nil
	}
	cl := &kafka.Client{Addr: k.addr, Transport: k.produce, Timeout: requestTimeout}
	n, err := k.partitions(ctx, cl, topic)
	if err != nil {
		return fmt.Errorf("publishing to topic %s: %w", topic, err)
	}
	byPart := map[int][]*Message{}
	for _, m := range ms {
		p := choose(m, n)
		byPart[p] = append(byPart[p], m)
	}
	for p, list := range byPart {
		if err := k.write(ctx, cl, topic, p, list); err != nil {
			return fmt.Errorf("publishing to topic %s, partition %d: %w", topic, p, err)
		}
	}
	return nil
}

// choose is the partition: of the key as Java's client has it, without one by the offset it came from.
func choose(m *Message, n int) int {
	if m.Key == nil {
		return int(max(m.Offset, 0) % int64(n))
	}
	return int(event.Murmur2(m.Key)&0x7fffffff) % n
}

func (k *Kafka) partitions(ctx context.Context, cl *kafka.Client, topic string) (int, error) {
	b, began := retry.Reopen.Start(), time.Now()
	for {
		md, err := cl.Metadata(ctx, &kafka.MetadataRequest{Topics: []string{topic}})
		if err == nil {
			err = kafka.UnknownTopicOrPartition
			for _, t := range md.Topics {
				if t.Name == topic {
					err = t.Error
					if err == nil && len(t.Partitions) > 0 {
						return len(t.Partitions), nil
					}
				}
			}
		}
		missing := errors.Is(err, kafka.UnknownTopicOrPartition)
		switch {
		case missing && b.Attempts() >= publishAttempts:
			return 0, fmt.Errorf("%w: create it", err)
		case !missing && time.Since(began) > publishPatience:
			return 0, err
		}
		k.refresh(ctx)
		if err := b.Wait(ctx); err != nil {
			return 0, err
		}
	}
}

func (k *Kafka) refresh(ctx context.Context) { refreshLayout(ctx, k.produce, k.addr) }

func (k *Kafka) write(ctx context.Context, cl *kafka.Client, topic string, p int, list []*Message) error {
	b, began := retry.Reopen.Start(), time.Now()
	for {
		res, err := cl.Produce(ctx, &kafka.ProduceRequest{
			Topic: topic, Partition: p, RequiredAcks: kafka.RequireAll, Records: kafka.NewRecordReader(records(list)...),
		})
		if err == nil {
			err = res.Error
		}
		if err == nil && len(res.RecordErrors) > 0 {
			for _, e := range res.RecordErrors {
				err = errors.Join(err, e)
			}
		}
		if err == nil {
			return nil
		}
		if code := kafka.Error(0); errors.As(err, &code) && !code.Temporary() || time.Since(began) > publishPatience || ctx.Err() != nil {
			return err
		}
		k.refresh(ctx)
		if b.Wait(ctx) != nil {
			return err
		}
	}
}

func records(list []*Message) []kafka.Record {
	out := make([]kafka.Record, len(list))
	for i, m := range list {
		r := kafka.Record{Key: kafka.NewBytes(m.Key), Value: kafka.NewBytes(m.Value)}
		for _, h := range m.Headers {
			r.Headers = append(r.Headers, kafka.Header{Key: h.Key, Value: h.Value})
		}
		out[i] = r
	}
	return out
}
