package bench

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/pkg/event"
)

const (
	writeRate = 4000 // lower bound for writing scheduled envelopes while a relay reads
	writeTake = 4    // factor for the slowest write so far, if that is slower
)

// newScheduled returns the scheduled envelope number i, which is due at dueAt.
func (r *reconcilerRun) newScheduled(i int, dueAt time.Time) (bson.Raw, error) {
	doc, err := event.New(event.Aggregate{Type: aggregate, ID: orderingKey(i)}, eventType, event.Bytes("", newPayload(i, r.Payload)), event.WithDueAt(dueAt)).MarshalBSON()
	if err != nil {
		return nil, fmt.Errorf("encoding an event: %w", err)
	}
	return doc, nil
}

// drainScheduled measures envelopes that became due while no relay ran, from the end of the takeover to the
// last record. They were also written while no relay ran, so the stream has them too, and the relay skips
// them there.
func (r *reconcilerRun) drainScheduled(ctx context.Context) (meterReading, error) {
	return r.drainOverdue(ctx, "scheduled", func(coll *mongo.Collection, _ setting) error {
		at := time.Now().Add(-time.Hour)
		return r.writeDocuments(ctx, coll, r.Events, func(i int) (bson.Raw, error) {
			return r.newScheduled(i, at.Add(time.Duration(i)*time.Millisecond))
		})
	})
}

// drainKnown is drainScheduled for envelopes that were written long before, so that the stream has passed them.
func (r *reconcilerRun) drainKnown(ctx context.Context) (meterReading, error) {
	return r.drainOverdue(ctx, "known", func(coll *mongo.Collection, setting setting) error {
		setting.label = ""
		owner, _, err := r.startOwner(ctx, setting)
		if err != nil {
			return err
		}
		// If the measurement succeeds, the error of the stop is returned below.
		defer func() { _ = owner.stopProcess() }()

		first := r.timeAhead(r.Events)
		if err := r.writeDocuments(ctx, coll, r.Events, func(i int) (bson.Raw, error) {
			return r.newScheduled(i, first.Add(time.Duration(i)*time.Second/time.Duration(r.Events)))
		}); err != nil {
			return err
		}

		if err := owner.awaitRead(ctx, r.Events); err != nil {
			return err
		}
		if err := owner.stopProcess(); err != nil {
			return err
		}

		if time.Since(first) > 0 {
			return errors.New("the relay read for so long that the first of its envelopes were due")
		}
		return retry.Sleep(ctx, time.Until(first.Add(time.Second)))
	})
}

// timeAhead returns a time by which n envelopes are certainly written and read.
func (r *reconcilerRun) timeAhead(n int) time.Time {
	perDoc := max(time.Second/writeRate, writeTake*r.perDoc)
	return time.Now().Add(5*time.Second + time.Duration(n)*perDoc).Truncate(time.Millisecond)
}

// awaitRead blocks until the relay has read n envelopes from the stream.
func (r *relay) awaitRead(ctx context.Context, n int) error {
	for began := time.Now(); ; {
		counters, err := r.readCounters(ctx)
		switch {
		case err != nil:
			return err
		case int(counters.read) >= n:
			return nil
		case time.Since(began) > stall:
			return fmt.Errorf("the relay has read %.0f of %d events after %s; end of its log: %s", counters.read, n, stall, r.words)
		}

		if err := retry.Sleep(ctx, slow); err != nil {
			return err
		}
	}
}

// drainOverdue measures the drain of the envelopes that write puts into a collection. figure is the name of the rate.
func (r *reconcilerRun) drainOverdue(
	ctx context.Context, figure string, write func(*mongo.Collection, setting) error,
) (meterReading, error) {
	name := fmt.Sprintf("%s%d", figure, r.number)
	coll, err := r.newOutbox(ctx, name)
	if err != nil {
		return meterReading{}, err
	}
	defer func() { _ = coll.Drop(context.WithoutCancel(ctx)) }()

	topic, err := r.newTopic(ctx, name)
	if err != nil {
		return meterReading{}, err
	}
	defer r.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	setting := setting{watch: name, topic: topic, state: r.newStateDB(name), start: "backlog", label: name}
	if err := write(coll, setting); err != nil {
		return meterReading{}, err
	}

	owner, began, err := r.startOwner(ctx, setting)
	if err != nil {
		return meterReading{}, err
	}
	// If the measurement succeeds, the error of the stop is returned below.
	defer func() { _ = owner.stopProcess() }()

	meter := startMeter(append(r.serverPIDs(), owner.pid())...)
	watcher := &watcher{bench: r.bench, relay: owner, topic: topic}
	if err := watcher.followDrain(ctx, r.Events); err != nil {
		return meterReading{}, err
	}

	eps := float64(watcher.n) / watcher.at.Sub(began).Seconds()
	r.got.addValue(figure, eps)
	million := 1e6 / float64(watcher.n)
	result := newReading(meter, "%8.0f/s  CPU-s per million: %.1f of the relay, %.1f of the servers",
		eps, meter.measureUsed(owner.pid())*million, meter.measureUsed(r.servers...)*million)

	// The next measurement of this collection must not find its envelopes.
	if err := awaitEmpty(ctx, coll); err != nil {
		return result, err
	}
	return result, owner.stopProcess()
}

// awaitEmpty blocks until the collection is empty. The relay removes each scheduled envelope after its delivery.
func awaitEmpty(ctx context.Context, coll *mongo.Collection) error {
	for began := time.Now(); ; {
		n, err := coll.CountDocuments(ctx, bson.D{})
		if err != nil {
			return fmt.Errorf("counting: %w", err)
		}
		if n == 0 {
			return nil
		}

		if time.Since(began) > stall {
			return fmt.Errorf("%d envelopes that were sent are still there after %s", n, stall)
		}
		if err := retry.Sleep(ctx, slow); err != nil {
			return err
		}
	}
}

// dueEvents returns the number of envelopes for the due error.
func dueEvents(options Options) int { return min(dueAtOnce, options.Events) }

// measureDueError measures how late envelopes arrive that are due at the same moment.
func (r *reconcilerRun) measureDueError(ctx context.Context) (meterReading, error) {
	dueErrors, err := r.measureMoment(ctx, fmt.Sprintf("due%d", r.number), dueEvents(r.Options))
	r.got.addValue("due_p50", dueErrors.p50)
	r.got.addValue("due_p99", dueErrors.p99)
	r.got.addValue("due_max", dueErrors.most)
	dueErrors.words = fmt.Sprintf("p50 %.0f ms  p99 %.0f ms  at most %.0f ms", dueErrors.p50, dueErrors.p99, dueErrors.most)
	return dueErrors.meterReading, err
}

// measureBurst measures how long the delivery of all events takes if they are due at the same moment.
func (r *reconcilerRun) measureBurst(ctx context.Context) (meterReading, error) {
	dueErrors, err := r.measureMoment(ctx, fmt.Sprintf("burst%d", r.number), r.Events)
	r.got.addValue("burst", dueErrors.most/1000)
	dueErrors.words = fmt.Sprintf("%8.2f s for %d", dueErrors.most/1000, r.Events)
	return dueErrors.meterReading, err
}

// warmUps is the number of envelopes that are sent before the moment that is measured.
const warmUps = 100

// dueErrors has times in milliseconds.
type dueErrors struct {
	meterReading
	p50, p99, most float64
}

// measureMoment schedules n envelopes for one moment ahead, while a relay runs, and measures from that moment to a consumer.
func (r *reconcilerRun) measureMoment(ctx context.Context, name string, n int) (dueErrors dueErrors, err error) {
	coll, err := r.newOutbox(ctx, name)
	if err != nil {
		return dueErrors, err
	}
	defer func() { _ = coll.Drop(context.WithoutCancel(ctx)) }()

	topic, err := r.newTopic(ctx, name)
	if err != nil {
		return dueErrors, err
	}
	defer r.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	shots := &shots{
		from: 0, docs: make([]bson.Raw, n), acked: make([]atomic.Int64, n), came: make([]atomic.Int64, n),
		all: make(chan struct{}), base: time.Now(),
	}
	shots.left.Store(int64(n))
	warm := make(chan struct{}, warmUps)
	tailer, err := r.startConsumer(ctx, topic, func(i int, arrivedAt time.Time, _ sender) {
		shots.recordArrival(i, arrivedAt)
		if i >= n {
			retry.Signal(warm)
		}
	})
	if err != nil {
		return dueErrors, err
	}
	defer tailer.stopReading()

	owner, _, err := r.startOwner(ctx, setting{watch: name, topic: topic, state: r.newStateDB(name), start: "now", label: name})
	if err != nil {
		return dueErrors, err
	}
	// If the measurement succeeds, the error of the stop is returned below.
	defer func() { _ = owner.stopProcess() }()

	// The first record to a topic waits for its partitions to be stored, once in the life of the topic.
	past := time.Now().Add(-time.Hour)
	if err := r.writeDocuments(ctx, coll, warmUps, func(i int) (bson.Raw, error) { return r.newScheduled(n+i, past) }); err != nil {
		return dueErrors, err
	}
	for range warmUps {
		select {
		case <-warm:
		case <-time.After(stall):
			return dueErrors, fmt.Errorf("the first events did not arrive within %s; end of the relay's log: %s", stall, owner.words)
		case <-ctx.Done():
			return dueErrors, context.Cause(ctx)
		}
	}

	// The moment has to be far enough ahead for all inserts.
	arrivedAt := r.timeAhead(n)
	if err := r.writeDocuments(ctx, coll, n, func(i int) (bson.Raw, error) { return r.newScheduled(i, arrivedAt) }); err != nil {
		return dueErrors, err
	}
	if late := time.Since(arrivedAt); late > -time.Second {
		return dueErrors, fmt.Errorf("writing %d envelopes took until %s before they were due, which is too late for a measurement",
			n, -late)
	}

	for i := range shots.acked {
		shots.acked[i].Store(int64(arrivedAt.Sub(shots.base)))
	}
	if err := retry.Sleep(ctx, time.Until(arrivedAt)); err != nil {
		return dueErrors, err
	}

	meter := startMeter(append(r.serverPIDs(), owner.pid())...)
	if err := shots.awaitArrivals(ctx, func() error { return errors.Join(owner.checkRunning(), tailer.failure()) }); err != nil {
		return dueErrors, fmt.Errorf("%w; end of the relay's log: %s", err, owner.words)
	}

	dueErrors.otherCPU, dueErrors.known = meter.measureOtherCPU()
	for i := range shots.came {
		if early := shots.acked[i].Load() - shots.came[i].Load(); early > 0 {
			return dueErrors, fmt.Errorf("an envelope was sent %s before it was due", time.Duration(early))
		}
	}

	histogram := shots.delayHistogram()
	dueErrors.p50, dueErrors.p99, dueErrors.most = quantileMS(histogram, 50), quantileMS(histogram, 99), quantileMS(histogram, 100)
	return dueErrors, owner.stopProcess()
}

// restsBeforeMoment is how long Kafka is idle before the moment, as before that of [reconcilerRun.measureMoment].
const restsBeforeMoment = 5 * time.Second

// measureRawMoment measures the limit of the due error: as many records are sent at one moment, without a relay, to the same consumer.
func (r *reconcilerRun) measureRawMoment(ctx context.Context) (meterReading, error) {
	n := dueEvents(r.Options)
	topic, err := r.newTopic(ctx, fmt.Sprintf("rawdue%d", r.number))
	if err != nil {
		return meterReading{}, err
	}
	defer r.cluster.deleteTopic(context.WithoutCancel(ctx), topic)

	arrived := make(chan time.Time, n+warmUps)
	tailer, err := r.startConsumer(ctx, topic, func(_ int, arrivedAt time.Time, _ sender) { arrived <- arrivedAt })
	if err != nil {
		return meterReading{}, err
	}
	defer tailer.stopReading()

	spec := spec{Mode: modeProduce, Kafka: r.Kafka, Topic: topic, Events: warmUps, Payload: r.Payload}
	if _, err := r.runTogether(ctx, spec); err != nil {
		return meterReading{}, err
	}
	if err := retry.Sleep(ctx, restsBeforeMoment); err != nil {
		return meterReading{}, err
	}
	spec.Events = n
	produced, err := r.runTogether(ctx, spec)
	if err != nil {
		return meterReading{}, err
	}

	moment := time.Unix(0, produced.outcomes[0].Began)
	delays := hdrhistogram.New(1, time.Minute.Microseconds(), 3)
	late := time.NewTimer(stall)
	defer late.Stop()
	for i := range n + warmUps {
		select {
		case at := <-arrived:
			if i >= warmUps {
				// The error is only for values out of bounds.
				_ = delays.RecordValue(min(max(at.Sub(moment).Microseconds(), 0), time.Minute.Microseconds()))
			}
		case <-late.C:
			return meterReading{}, fmt.Errorf("%d of %d records did not arrive within %s", n+warmUps-i, n+warmUps, stall)
		case <-ctx.Done():
			return meterReading{}, context.Cause(ctx)
		}
	}

	p50, p99 := quantileMS(delays, 50), quantileMS(delays, 99)
	r.got.addValue("raw_due_p50", p50)
	r.got.addValue("raw_due_p99", p99)
	return meterReading{fmt.Sprintf("p50 %.0f ms  p99 %.0f ms", p50, p99), produced.otherCPU, produced.known}, nil
}
