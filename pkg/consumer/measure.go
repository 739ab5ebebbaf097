package consumer

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/outrelay/outrelay/internal/base/retry"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// measure passes a measurement of the group to WithTelemetry.
func (c *Consumer) measure(measurement telemetry.Measurement) {
	measurement.Group = c.group
	c.s.telemetry.Measure(measurement)
}

// count measures n messages of the handler. It does nothing if n is 0.
func (t *track) count(metric telemetry.Metric, n int, reason string) {
	if n > 0 {
		t.p.s.c.measure(telemetry.Measurement{Metric: metric, N: int64(n), Handler: t.reg.name, Reason: reason})
	}
}

// measureStop measures that fetching has stopped, or goes on. The reason is "paused" or "database".
func (c *Consumer) measureStop(reason string, stopped bool) {
	measurement := telemetry.Measurement{Metric: telemetry.Suspended, Reason: reason}
	if stopped {
		measurement.N = 1
	}
	c.measure(measurement)
}

// countRunning adds delta to the number of running lanes.
func (r *run) countRunning(delta int64) {
	r.c.measure(telemetry.Measurement{Metric: telemetry.Running, N: r.runningLanes.Add(delta)})
}

// remeasure measures the gauges of the member again, because measurements of several goroutines may arrive in another order.
func (r *run) remeasure() {
	r.countRunning(0)
	r.countHeld(0, 0)
	r.c.measureStop("paused", r.c.gate.isPaused())
}

// countHeld adds to the number and the size of the messages in memory.
func (r *run) countHeld(messages, bytes int64) {
	r.c.measure(telemetry.Measurement{Metric: telemetry.Held, N: r.heldMessages.Add(messages)})
	r.c.measure(telemetry.Measurement{Metric: telemetry.HeldBytes, N: r.heldBytes.Add(bytes)})
}

// startSpan begins the span of an attempt at the messages. It returns a panic of the Sink as an error.
func (t *track) startSpan(ctx context.Context, list []task) (_ context.Context, end func(error), err error) {
	defer recoverPanic(&err)

	attempt := telemetry.Attempt{
		Group: t.p.s.c.group, Handler: t.reg.name, Topic: t.p.tp.Topic, Messages: make([]telemetry.Message, len(list)),
	}
	for i, x := range list {
		message := x.entry.m
		attempt.Messages[i] = telemetry.Message{ID: message.ID, Name: message.Name, Number: message.Attempt, Headers: message.Headers}
	}

	ctx, end = t.p.s.c.s.telemetry.Start(ctx, attempt)
	if ctx == nil || end == nil {
		return nil, nil, errors.New("the telemetry sink returned nil")
	}
	return ctx, end, nil
}

// endSpan ends a span with the outcome of the attempt. It reports a panic of end. The panic does not change the outcome.
func (t *track) endSpan(end func(error), outcome error) {
	// A discarded message is an outcome, and not an error of the handler.
	if isRequest(requestDiscard)(outcome) {
		outcome = nil
	}
	if outcome != nil {
		outcome = &classifiedError{outcome}
	}

	var panicErr error
	func() {
		defer recoverPanic(&panicErr)
		end(outcome)
	}()
	if panicErr != nil {
		t.p.reportTrouble("cannot end the span of an attempt; the outcome of the attempt counts", fmt.Errorf("ending the span of handler %s: %w", t.reg.name, panicErr), "handler", t.reg.name)
	}
}

// classifiedError has the class of an error as its text, because the text of the error itself may quote the message.
type classifiedError struct{ err error }

func (e *classifiedError) Error() string { return classOf(e.err) }

func (e *classifiedError) Unwrap() error { return e.err }

// setLogEndLocked records the end of the log, and returns the lag of the partition.
func (p *partition) setLogEndLocked(end int64) (lag int64) {
	p.lagMeasured, p.logEnd = time.Now(), end
	return p.lagLocked()
}

// lagLocked returns how many offsets up to the last known end are not finished.
func (p *partition) lagLocked() int64 { return max(0, p.logEnd-p.finishedToLocked()) }

// oldestLocked returns the age of the oldest unfinished message, or 0 if there is none.
func (p *partition) oldestLocked() time.Duration {
	if len(p.entries) == 0 {
		return 0
	}
	return max(0, time.Since(time.UnixMilli(p.entries[0].writtenAt)))
}

// gauges guards the order of the gauges of a partition. The lock is held while the Sink runs.
type gauges struct {
	mu     sync.Mutex
	closed bool
}

func (p *partition) measureLag(n int64) {
	p.measureGauge(telemetry.Measurement{Metric: telemetry.Lag, N: n})
}

func (p *partition) measureOldest(age time.Duration) {
	p.measureGauge(telemetry.Measurement{Metric: telemetry.Oldest, Took: age})
}

// measureGauge passes a gauge of the partition to WithTelemetry. After closeGauges it does nothing.
func (p *partition) measureGauge(measurement telemetry.Measurement) {
	p.gauges.mu.Lock()
	defer p.gauges.mu.Unlock()
	if !p.gauges.closed {
		p.passGauge(measurement)
	}
}

// closeGauges measures that nothing is left. Another member measures the partition from now on, so a goroutine that has read its lag
// before must not measure it any more.
func (p *partition) closeGauges() {
	p.gauges.mu.Lock()
	defer p.gauges.mu.Unlock()
	p.gauges.closed = true
	p.passGauge(telemetry.Measurement{Metric: telemetry.Lag})
	p.passGauge(telemetry.Measurement{Metric: telemetry.Oldest})
}

func (p *partition) passGauge(measurement telemetry.Measurement) {
	measurement.Topic, measurement.Partition = p.tp.Topic, p.tp.Partition
	p.s.c.measure(measurement)
}

// gaugeInterval is how often partitions are measured in addition to their fetches.
const gaugeInterval = 3 * time.Second

// reportGauges reports the age of the oldest unfinished message of each partition until the
// generation ends. It also reports the lag of partitions that are not fetched. Otherwise the
// growing lag of a stopped partition would stay invisible.
func (s *session) reportGauges() {
	for retry.Sleep(s.serveCtx, gaugeInterval) == nil {
		s.c.health.beat()
		s.c.health.note(healthKafka, s.measurePartitions())
		s.remeasure()
		s.c.measureStop("database", s.outage.isOn())
	}
}

// measurePartitions measures all partitions. It returns the first error of Kafka, and measures no more lags after it.
func (s *session) measurePartitions() (failed error) {
	for _, p := range s.listPartitions() {
		p.mu.Lock()
		age := p.oldestLocked()
		stale := time.Since(p.lagMeasured) > gaugeInterval
		p.mu.Unlock()

		p.measureOldest(age)
		// A fetch reports the lag as well, so only idle partitions need a request.
		if !stale || failed != nil {
			continue
		}

		ctx, cancel := context.WithTimeout(s.serveCtx, healthTimeout)
		log, err := s.g.Log(ctx, p.tp)
		cancel()
		if err != nil {
			failed = fmt.Errorf("reading the end of partition %s: %w", p.tp, err)
			continue
		}
		if log.End >= 0 {
			p.mu.Lock()
			lag := p.setLogEndLocked(log.End)
			p.mu.Unlock()
			p.measureLag(lag)
		}
	}
	return failed
}
