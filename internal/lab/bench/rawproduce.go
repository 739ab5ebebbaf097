package bench

import (
	"context"
	"fmt"
	"io"
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
	raw  []byte
	at   int // bytes of raw that were read
}

// Read implements io.Reader.
func (s *sealed) Read(p []byte) (int, error) {
	if s.at == len(s.raw) {
		return 0, io.EOF
	}
	n := copy(p, s.raw[s.at:])
	s.at += n
	return n, nil
}

// WriteTo implements io.WriterTo. It needs one write instead of a copy in pieces.
func (s *sealed) WriteTo(w io.Writer) (int64, error) {
	n, err := w.Write(s.raw[s.at:])
	s.at += n
	return int64(n), err
}

const (
	batchBytes   = 1<<20 - 1024
	requestBytes = 4 << 20
	keyCount     = 1000
	eventType    = "OrderPlaced"
	aggregate    = "order"
)

func newRawProduce(ctx context.Context, s spec) (work, error) {
	c := newCluster(s.Kafka)
	defer c.closeIdle()
	leaders, err := c.partitionLeaders(ctx, s.Topic)
	if err != nil {
		return nil, err
	}

	r := &rawProduce{spec: s}
	for addr, parts := range leaders {
		b, err := dialBroker(ctx, addr)
		if err != nil {
			r.disconnect()
			return nil, err
		}
		r.lanes = append(r.lanes, newProduceLane(b, parts))
	}

	if r.producer, err = identify(ctx, r.lanes[0].broker); err != nil {
		r.disconnect()
		return nil, err
	}

	for i := range keyCount {
		r.keys = append(r.keys, []byte(orderingKey(i)))
	}
	for i := range 256 {
		r.payloads = append(r.payloads, newPayload(i, s.Payload))
	}
	return r, nil
}

// identify requests a producer id. A broker that has just started has none for a moment, so identify retries.
func identify(ctx context.Context, b *broker) (batch.Producer, error) {
	for try := 1; ; try++ {
		m, err := b.sendRequest(answerWithin, &initproducerid.Request{ProducerID: -1, ProducerEpoch: -1, TransactionTimeoutMs: 60_000})
		if err != nil {
			return batch.Producer{}, fmt.Errorf("requesting a producer id: %w", err)
		}

		id := m.(*initproducerid.Response)
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

func newProduceLane(b *broker, parts []int32) *produceLane {
	l := &produceLane{broker: b, parts: parts, batch: make(chan []*sealed, 1), free: make(chan []*sealed, 2)}
	for range cap(l.free) {
		var req []*sealed
		for _, p := range parts {
			req = append(req, &sealed{part: p})
		}
		l.free <- req
	}
	return l
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

	o := outcome{Began: time.Now().UnixNano()}
	r.fill(ctx)
	lanes.Wait()
	o.Ended, o.Events = time.Now().UnixNano(), r.Events

	for _, l := range r.lanes {
		if l.err != nil {
			return o, l.err
		}
	}
	return o, ctx.Err()
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
		f := &filling{l: l}
		all = append(all, f)
		for _, p := range l.parts {
			where[p] = f
		}
	}

	sequences := [partitions]int32{}
	send := func(f *filling) {
		for _, s := range f.req {
			s.raw, s.at = nil, 0
			if n := s.b.Count(); n > 0 {
				// Without a codec, Seal cannot fail.
				s.raw, _ = s.b.Seal(batch.None(), nil, r.producer, sequences[s.part])
				sequences[s.part] = batch.NextSequence(sequences[s.part], n)
			}
		}
		f.l.batch <- f.req
		f.req, f.bytes = nil, 0
	}

	rec := record.Record{Headers: []record.Header{{Key: []byte("id"), Value: make([]byte, 36)}}}
	for i := range r.Events {
		rec.Key, rec.Value, rec.TimeMS = r.keys[i%keyCount], r.payloads[i&255], time.Now().UnixMilli()
		// The partition is that of Kafka's default partitioner.
		p := int32(keyhash.Murmur2(rec.Key)&0x7fffffff) % partitions
		f := where[p]

		size := batch.Size(&rec)
		if f.req != nil {
			if s := f.of(p); f.bytes+size > requestBytes || s.b.Len()+size > batchBytes {
				send(f)
			}
		}

		if f.req == nil {
			select {
			case f.req = <-f.l.free:
			case <-ctx.Done():
				r.end()
				return
			}
			for _, s := range f.req {
				s.b.Reset(s.b.Buffer())
			}
		}

		f.of(p).b.Append(&rec)
		f.bytes += size
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

func (f *filling) of(p int32) *sealed {
	for _, s := range f.req {
		if s.part == p {
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
	t := rawproduce.RequestTopic{Topic: topic}
	for _, s := range req {
		if s.raw != nil {
			t.Partitions = append(t.Partitions, rawproduce.RequestPartition{
				Partition: s.part, RecordSet: protocol.RawRecordSet{Reader: s},
			})
		}
	}

	m, err := l.broker.sendRequest(timeout+time.Second, &rawproduce.Request{
		Acks: acksAll, Timeout: int32(timeout.Milliseconds()), Topics: []rawproduce.RequestTopic{t},
	})
	if err != nil {
		return fmt.Errorf("producing: %w", err)
	}
	for _, t := range m.(*produce.Response).Topics {
		for _, p := range t.Partitions {
			if p.ErrorCode != 0 {
				return fmt.Errorf("producing to %s-%d: %w", topic, p.Partition, kafka.Error(p.ErrorCode))
			}
		}
	}
	return nil
}
