package bench

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	kafka "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/initproducerid"
	"github.com/segmentio/kafka-go/protocol/produce"
	"github.com/segmentio/kafka-go/protocol/rawproduce"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
)

// rawProduce encodes the same records as the relay and sends them. Each broker has one request in flight,
// while the next one is filled. There is no ordering across failures, no fence and no retry. So it measures
// the limit of Kafka.
type rawProduce struct {
	spec
	lanes    []*produceLane
	producer batch.Producer
	keys     [][]byte
	payloads [][]byte
}

// produceLane sends to one broker.
type produceLane struct {
	broker *broker
	parts  []int32
	batch  chan []*sealed // filled requests
	free   chan []*sealed // requests to fill
	err    error
}

// sealed is the batch of one partition in a request.
type sealed struct {
	part int32
	b    batch.Builder
	raw  net.Buffers // the unread pieces; nil without records
}

const (
	batchBytes   = 1<<20 - 1024
	requestBytes = 4 << 20
	keyCount     = 1000
	eventType    = "OrderPlaced"
	aggregate    = "order"
)

func newRawProduce(ctx context.Context, spec spec) (work, error) {
	cluster := newCluster(spec.Kafka)
	defer cluster.closeIdle()
	leaders, err := cluster.partitionLeaders(ctx, spec.Topic)
	if err != nil {
		return nil, err
	}

	produce := &rawProduce{spec: spec}
	for addr, parts := range leaders {
		broker, err := dialBroker(ctx, addr)
		if err != nil {
			produce.disconnect()
			return nil, err
		}
		produce.lanes = append(produce.lanes, newProduceLane(broker, parts))
	}

	if produce.producer, err = identify(ctx, produce.lanes[0].broker); err != nil {
		produce.disconnect()
		return nil, err
	}

	for i := range keyCount {
		produce.keys = append(produce.keys, []byte(orderingKey(i)))
	}
	for i := range 256 {
		produce.payloads = append(produce.payloads, newPayload(i, spec.Payload))
	}
	return produce, nil
}

// identify requests a producer id. A broker that has just started has none for a moment, so identify retries.
func identify(ctx context.Context, broker *broker) (batch.Producer, error) {
	for try := 1; ; try++ {
		message, err := broker.sendRequest(responseTime, &initproducerid.Request{ProducerID: -1, ProducerEpoch: -1, TransactionTimeoutMs: 60_000})
		if err != nil {
			return batch.Producer{}, fmt.Errorf("requesting a producer id: %w", err)
		}

		id := message.(*initproducerid.Response)
		if id.ErrorCode == 0 {
			return batch.Producer{ID: id.ProducerID, Epoch: id.ProducerEpoch}, nil
		}
		if code := kafka.Error(id.ErrorCode); !code.Temporary() || try == 50 {
			return batch.Producer{}, fmt.Errorf("requesting a producer id: %w", code)
		}

		select {
		case <-ctx.Done():
			return batch.Producer{}, context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func newProduceLane(broker *broker, parts []int32) *produceLane {
	lane := &produceLane{broker: broker, parts: parts, batch: make(chan []*sealed, 1), free: make(chan []*sealed, 2)}
	for range cap(lane.free) {
		var req []*sealed
		for _, p := range parts {
			req = append(req, &sealed{part: p})
		}
		lane.free <- req
	}
	return lane
}

func (r *rawProduce) disconnect() {
	for _, l := range r.lanes {
		l.broker.closeConnection()
	}
}

// run fills requests in one goroutine, as the relay's pump, and sends them in one goroutine per broker.
func (r *rawProduce) run(ctx context.Context) (outcome, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var lanes sync.WaitGroup
	for _, l := range r.lanes {
		lanes.Go(func() {
			if l.err = l.produceAll(r.Topic); l.err != nil {
				cancel()
			}
		})
	}

	outcome := outcome{Began: time.Now().UnixNano()}
	r.fill(ctx)
	lanes.Wait()
	outcome.Ended, outcome.Events = time.Now().UnixNano(), r.Events

	for _, l := range r.lanes {
		if l.err != nil {
			return outcome, l.err
		}
	}
	return outcome, ctx.Err()
}

// filling is the request to which a lane adds its next records.
type filling struct {
	l     *produceLane
	req   []*sealed
	bytes int
}

// fill encodes all records into requests, and passes full requests to the lanes. It blocks while a lane has no free
// request.
func (r *rawProduce) fill(ctx context.Context) {
	where := [partitions]*filling{}
	var all []*filling
	for _, l := range r.lanes {
		filling := &filling{l: l}
		all = append(all, filling)
		for _, p := range l.parts {
			where[p] = filling
		}
	}

	sequences := [partitions]int32{}
	send := func(filling *filling) {
		for _, s := range filling.req {
			s.raw = nil
			if n := s.b.Count(); n > 0 {
				// Without a codec, Seal cannot fail.
				_ = s.b.Seal(batch.None(), r.producer, sequences[s.part])
				s.raw = s.b.AppendPieces(nil)
				sequences[s.part] = batch.NextSequence(sequences[s.part], n)
			}
		}
		filling.l.batch <- filling.req
		filling.req, filling.bytes = nil, 0
	}

	var chunks batch.Chunks
	rec := record.Record{Headers: []record.Header{{Key: []byte("id"), Value: make([]byte, 36)}}}
	for i := range r.Events {
		rec.Key, rec.Value, rec.TimeMS = r.keys[i%keyCount], r.payloads[i&255], time.Now().UnixMilli()
		// The partition is that of Kafka's default partitioner.
		partition := int32(keyhash.Murmur2(rec.Key)&0x7fffffff) % partitions
		filling := where[partition]

		size := batch.Size(&rec)
		if filling.req != nil {
			if sealed := filling.of(partition); filling.bytes+size > requestBytes || sealed.b.Len()+size > batchBytes {
				send(filling)
			}
		}

		if filling.req == nil {
			select {
			case filling.req = <-filling.l.free:
			case <-ctx.Done():
				r.end()
				return
			}
			for _, s := range filling.req {
				s.b.Reset(&chunks)
			}
		}

		filling.of(partition).b.Append(&rec)
		filling.bytes += size
	}

	for _, f := range all {
		if f.req != nil {
			send(f)
		}
	}
	r.end()
}

func (r *rawProduce) end() {
	for _, l := range r.lanes {
		close(l.batch)
	}
}

func (f *filling) of(partition int32) *sealed {
	for _, s := range f.req {
		if s.part == partition {
			return s
		}
	}
	return nil
}

// produceAll sends the filled requests, one after the other.
func (l *produceLane) produceAll(topic string) error {
	for req := range l.batch {
		if err := l.send(topic, req); err != nil {
			return err
		}
		l.free <- req
	}
	return nil
}

func (l *produceLane) send(topic string, req []*sealed) error {
	const acksAll, timeout = -1, 10 * time.Second
	requestTopic := rawproduce.RequestTopic{Topic: topic}
	for _, s := range req {
		if s.raw != nil {
			requestTopic.Partitions = append(requestTopic.Partitions, rawproduce.RequestPartition{
				Partition: s.part, RecordSet: protocol.RawRecordSet{Reader: &s.raw},
			})
		}
	}

	message, err := l.broker.sendRequest(timeout+time.Second, &rawproduce.Request{
		Acks: acksAll, Timeout: int32(timeout.Milliseconds()), Topics: []rawproduce.RequestTopic{requestTopic},
	})
	if err != nil {
		return fmt.Errorf("producing: %w", err)
	}
	for _, t := range message.(*produce.Response).Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				return fmt.Errorf("producing to %s-%d: %w", topic, p.Partition, kafka.Error(p.ErrorCode))
			}
		}
	}
	return nil
}
