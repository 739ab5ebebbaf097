package bench

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	kafka "github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/mongodb"
)

const (
	inserters = 16
	warmUp    = 50
	warmRun   = 30_000 // further events, at warmRate per second; fewer if the backlog is smaller
	warmRate  = 1000
	// arriveWithin bounds the wait for the last events.
	arriveWithin = 60 * time.Second
)

// shots are inserts at a fixed rate, with the times of their acknowledgements and arrivals.
type shots struct {
	from  int // number of the first
	docs  []bson.Raw
	acked []atomic.Int64 // nanoseconds since base
	came  []atomic.Int64
	left  atomic.Int64
	all   chan struct{}
	base  time.Time
}

func newShots(from, n, size int) (*shots, error) {
	return newShotsOf(from, n, func(i int) (bson.Raw, error) { return newEnvelope(i, size) })
}

func newShotsOf(from, n int, document func(i int) (bson.Raw, error)) (*shots, error) {
	shots := &shots{
		from: from, docs: make([]bson.Raw, n), acked: make([]atomic.Int64, n), came: make([]atomic.Int64, n),
		all: make(chan struct{}), base: time.Now(),
	}
	shots.left.Store(int64(n))

	for i := range shots.docs {
		var err error
		if shots.docs[i], err = document(from + i); err != nil {
			return nil, err
		}
	}
	return shots, nil
}

// recordArrival records the first arrival of a number.
func (s *shots) recordArrival(number int, arrivedAt time.Time) {
	i := number - s.from
	if i < 0 || i >= len(s.docs) {
		return
	}
	if !s.came[i].CompareAndSwap(0, int64(max(arrivedAt.Sub(s.base), 1))) {
		return
	}

	if s.left.Add(-1) == 0 {
		close(s.all)
	}
}

// insertAtRate inserts at the given rate in all, into the collections in turns, also while earlier inserts are slow (open loop).
func (s *shots) insertAtRate(ctx context.Context, rate int, colls ...*mongo.Collection) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)

	due := make(chan int, len(s.docs))
	var wg sync.WaitGroup
	for range inserters {
		wg.Go(func() {
			for i := range due {
				if _, err := colls[i%len(colls)].InsertOne(ctx, s.docs[i]); err != nil {
					cancel(fmt.Errorf("inserting: %w", err))
					return
				}
				s.acked[i].Store(int64(time.Since(s.base)))
			}
		})
	}

	began := time.Now()
	for i := range s.docs {
		// The times of the inserts are fixed in advance, so a slow one delays no other.
		wait := time.Until(began.Add(time.Duration(i) * time.Second / time.Duration(rate)))
		if wait > 0 {
			time.Sleep(wait)
		}

		if ctx.Err() != nil {
			break
		}
		due <- i
	}

	close(due)
	wg.Wait()
	return context.Cause(ctx)
}

// awaitArrivals blocks until all events have arrived.
func (s *shots) awaitArrivals(ctx context.Context, failed func() error) error {
	deadline := time.NewTimer(arriveWithin)
	defer deadline.Stop()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()

	for {
		select {
		case <-s.all:
			return nil
		case <-tick.C:
			if err := failed(); err != nil {
				return err
			}
		case <-deadline.C:
			return fmt.Errorf("%d of %d events did not arrive within %s", s.left.Load(), len(s.docs), arriveWithin)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// delayHistogram returns the times from the acknowledgement to the arrival. An event may arrive before the
// writer receives the acknowledgement. This counts as no delay.
func (s *shots) delayHistogram() *hdrhistogram.Histogram {
	histogram := hdrhistogram.New(1, time.Minute.Microseconds(), 3)
	for i := range s.docs {
		delay := time.Duration(s.came[i].Load() - s.acked[i].Load())
		// The error is only for values out of bounds.
		_ = histogram.RecordValue(min(max(delay.Microseconds(), 0), time.Minute.Microseconds()))
	}
	return histogram
}

// latencies has the latencies of one run at one rate, in milliseconds.
type latencies struct {
	p50, p99, p999 float64
	otherCPU       float64
	known          bool // whether otherCPU is known
}

// quantileMS returns a quantile in milliseconds.
func quantileMS(histogram *hdrhistogram.Histogram, fraction float64) float64 {
	return float64(histogram.ValueAtQuantile(fraction)) / 1000
}

// reserveNumbers returns the first of n new numbers. Numbers never repeat, so a late arrival matches no later shot.
func (b *bench) reserveNumbers(n int) (from int) {
	from = b.numbered
	b.numbered += n
	return from
}

// rawLatency measures inserts at a fixed rate while only a bare change stream reads.
func (b *bench) rawLatency(ctx context.Context, coll *mongo.Collection, rate int) (latencies, error) {
	n := int(b.Duration.Seconds() * float64(rate))
	shots, err := newShots(b.reserveNumbers(n), n, b.Payload)
	if err != nil {
		return latencies{}, err
	}
	return b.streamLatency(ctx, coll, rate, shots, func() error { return nil }, func(number int, _ []byte) error {
		shots.recordArrival(number, time.Now())
		return nil
	})
}

// bothLatency measures inserts at a fixed rate while a bare change stream reads, whose reader sends each event to the topic at once and
// waits for Kafka's acknowledgement.
func (b *bench) bothLatency(ctx context.Context, coll *mongo.Collection, tailing *tailing, rate int) (latencies, error) {
	n := int(b.Duration.Seconds() * float64(rate))
	shots, err := newShots(b.reserveNumbers(n), n, b.Payload)
	if err != nil {
		return latencies{}, err
	}
	tailing.shots.Store(shots)

	return b.streamLatency(ctx, coll, rate, shots, tailing.consumer.failure, func(number int, payload []byte) error {
		key := kafka.NewBytes([]byte(orderingKey(number)))
		record := kafka.Record{Key: key, Value: kafka.NewBytes(payload)}
		_, err := b.cluster.client.Produce(ctx, &kafka.ProduceRequest{
			Topic: tailing.topic, Partition: number % partitions, RequiredAcks: kafka.RequireAll, Records: kafka.NewRecordReader(record),
		})
		return err
	})
}

// streamLatency inserts the shots at a fixed rate. It calls take for each event of a bare change stream, and ends with the error of failed.
func (b *bench) streamLatency(
	ctx context.Context, coll *mongo.Collection, rate int, shots *shots, failed func() error, take func(number int, payload []byte) error,
) (latencies, error) {
	var latencies latencies
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()

	at, err := mongodb.ClusterTime(ctx, b.client)
	if err != nil {
		return latencies, err
	}
	cs, err := watch(ctx, coll, &at)
	if err != nil {
		return latencies, err
	}

	var failure atomic.Pointer[error]
	var reading sync.WaitGroup
	reading.Go(func() {
		if err := readStream(ctx, cs, take); err != nil && ctx.Err() == nil {
			failure.Store(&err)
		}
	})
	defer reading.Wait()
	defer cancel()

	meter := startMeter(b.serverPIDs()...)
	if err := shots.insertAtRate(ctx, rate, coll); err != nil {
		return latencies, err
	}
	latencies.otherCPU, latencies.known = meter.measureOtherCPU()

	err = shots.awaitArrivals(ctx, func() error {
		if err := failure.Load(); err != nil {
			return *err
		}
		return failed()
	})

	histogram := shots.delayHistogram()
	latencies.p50, latencies.p99 = quantileMS(histogram, 50), quantileMS(histogram, 99)
	return latencies, err
}

// readStream calls take for each event of a change stream.
func readStream(ctx context.Context, cs *mongo.ChangeStream, take func(number int, payload []byte) error) error {
	defer cs.Close(context.WithoutCancel(ctx))
	for ctx.Err() == nil {
		if !cs.TryNext(ctx) {
			if err := cs.Err(); err != nil {
				return err
			}
			continue
		}

		payload, ok := insertPayload(cs.Current)
		if !ok {
			continue
		}
		if number, ok := eventNumber(payload); ok {
			if err := take(number, payload); err != nil {
				return err
			}
		}
	}
	return nil
}

// tailing is a relay that tails a collection, and a consumer of its topic.
type tailing struct {
	relay    *relay
	consumer *tailer
	shots    atomic.Pointer[shots]
	topic    string
}

func (b *bench) startTailing(ctx context.Context, coll *mongo.Collection, name string) (tail *tailing, err error) {
	tail = &tailing{}
	if tail.topic, err = b.newTopic(ctx, name); err != nil {
		return nil, err
	}
	if err = b.followTopic(ctx, tail); err != nil {
		return nil, err
	}

	tail.relay, err = b.startRelay(setting{
		watch: coll.Name(), topic: tail.topic, state: b.newStateDB(name), start: "now", label: name,
	})

	if err == nil {
		err = b.warmUpRelay(ctx, coll, tail, min(warmRun, b.Events))
	}
	if err != nil {
		return nil, errors.Join(err, tail.stopAll())
	}
	return tail, nil
}

// followTopic starts the consumer of the topic.
func (b *bench) followTopic(ctx context.Context, tail *tailing) (err error) {
	tail.consumer, err = b.startConsumer(ctx, tail.topic, func(n int, arrivedAt time.Time, _ sender) {
		if shots := tail.shots.Load(); shots != nil {
			shots.recordArrival(n, arrivedAt)
		}
	})
	return err
}

func (t *tailing) stopAll() error {
	t.consumer.stopReading()
	if t.relay == nil {
		return nil
	}
	return t.relay.stopProcess()
}

// warmUpRelay inserts single events until warmUp of them have arrived. Then it inserts n, as many as a broker needs to
// compile its code for small requests. A new JVM takes three times as long for each of them, and its compiler takes up to 0.8 of a core.
func (b *bench) warmUpRelay(ctx context.Context, coll *mongo.Collection, tailing *tailing, n int) error {
	began, seen := time.Now(), 0
	// The first events take longer than any later one.
	for seen < warmUp {
		shots, err := newShots(b.reserveNumbers(1), 1, b.Payload)
		if err != nil {
			return err
		}
		tailing.shots.Store(shots)
		if err := shots.insertAtRate(ctx, 1, coll); err != nil {
			return err
		}

		select {
		case <-shots.all:
			seen++
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return context.Cause(ctx)
		}

		if err := errors.Join(tailing.relay.checkRunning(), tailing.consumer.failure()); err != nil {
			return err
		}

		if time.Since(began) > stall {
			return fmt.Errorf("nothing arrives from the relay for %s; end of its log: %s", stall, tailing.relay.words)
		}
	}

	shots, err := newShots(b.reserveNumbers(n), n, b.Payload)
	if err != nil {
		return err
	}
	tailing.shots.Store(shots)
	if err := shots.insertAtRate(ctx, warmRate, coll); err != nil {
		return err
	}
	return shots.awaitArrivals(ctx, func() error { return errors.Join(tailing.relay.checkRunning(), tailing.consumer.failure()) })
}

// relayLatency measures inserts at a fixed rate while the relay delivers them to a consumer.
func (b *bench) relayLatency(ctx context.Context, coll *mongo.Collection, tailing *tailing, rate int) (latencies, error) {
	n := int(b.Duration.Seconds() * float64(rate))
	shots, err := newShots(b.reserveNumbers(n), n, b.Payload)
	if err != nil {
		return latencies{}, err
	}
	tailing.shots.Store(shots)

	meter := startMeter(append(b.serverPIDs(), tailing.relay.pid())...)
	if err := shots.insertAtRate(ctx, rate, coll); err != nil {
		return latencies{}, err
	}

	var latencies latencies
	latencies.otherCPU, latencies.known = meter.measureOtherCPU()
	if err := shots.awaitArrivals(ctx, func() error { return errors.Join(tailing.relay.checkRunning(), tailing.consumer.failure()) }); err != nil {
		return latencies, fmt.Errorf("%w; end of the relay's log: %s", err, tailing.relay.words)
	}

	histogram := shots.delayHistogram()
	latencies.p50, latencies.p99, latencies.p999 = quantileMS(histogram, 50), quantileMS(histogram, 99), quantileMS(histogram, 99.9)
	return latencies, nil
}

// measureLatency measures the latency at each rate: of the bare stream, then of the relay, then of the bare stream with a bare producer. It
// never measures two of them concurrently, because a second stream would double the cost on the server.
func (b *bench) measureLatency(ctx context.Context, run int, coll *mongo.Collection, samples *samples) error {
	if len(b.Rates) == 0 {
		return nil
	}

	for _, rate := range b.Rates {
		raw, err := b.rawLatency(ctx, coll, rate)
		if err != nil {
			return fmt.Errorf("latency of the raw stream at %d/s: %w", rate, err)
		}

		samples.rawP50[rate], samples.rawP99[rate] = append(samples.rawP50[rate], raw.p50), append(samples.rawP99[rate], raw.p99)
		if name := fmt.Sprintf("raw_latency_%d", rate); raw.known {
			samples.otherCPU[name] = append(samples.otherCPU[name], raw.otherCPU)
		}
		b.logProgress("run %d of %d: raw stream at %d/s  p50 %.2f ms  p99 %.2f ms  CPU of others %.1f %%",
			run, b.Runs, rate, raw.p50, raw.p99, raw.otherCPU)
	}

	// One relay serves all rates, because its start would take longer than a measurement.
	tailing, err := b.startTailing(ctx, coll, fmt.Sprintf("live%d", run))
	if err != nil {
		return fmt.Errorf("latency: %w", err)
	}
	defer b.cluster.deleteTopic(context.WithoutCancel(ctx), tailing.topic)
	for _, rate := range b.Rates {
		latencies, err := b.relayLatency(ctx, coll, tailing, rate)
		if err != nil {
			return errors.Join(fmt.Errorf("latency at %d/s: %w", rate, err), tailing.stopAll())
		}

		samples.p50[rate] = append(samples.p50[rate], latencies.p50)
		samples.p99[rate] = append(samples.p99[rate], latencies.p99)
		samples.p3[rate] = append(samples.p3[rate], latencies.p999)
		if name := fmt.Sprintf("latency_%d", rate); latencies.known {
			samples.otherCPU[name] = append(samples.otherCPU[name], latencies.otherCPU)
		}
		b.logProgress("run %d of %d: relay at %d/s  p50 %.2f ms  p99 %.2f ms  p99.9 %.2f ms  CPU of others %.1f %%",
			run, b.Runs, rate, latencies.p50, latencies.p99, latencies.p999, latencies.otherCPU)
	}

	// The consumer and the broker are warm now.
	defer tailing.consumer.stopReading()
	if err := tailing.relay.stopProcess(); err != nil {
		return err
	}
	for _, rate := range b.Rates {
		both, err := b.bothLatency(ctx, coll, tailing, rate)
		if err != nil {
			return fmt.Errorf("latency of both at %d/s: %w", rate, err)
		}
		samples.bothP50[rate], samples.bothP99[rate] = append(samples.bothP50[rate], both.p50), append(samples.bothP99[rate], both.p99)
		b.logProgress("run %d of %d: both at %d/s  p50 %.2f ms  p99 %.2f ms  CPU of others %.1f %%",
			run, b.Runs, rate, both.p50, both.p99, both.otherCPU)
	}
	return nil
}
