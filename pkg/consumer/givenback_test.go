package consumer_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// revoking is a transport whose generations give back partitions when the test sends a change.
type revoking struct {
	transport.Transport
	changes   chan transport.Change
	committed chan int64 // offsets above 0
	onLog     func()     // called when Log has read the state of a partition
}

func newRevoking(k *kit) *revoking {
	return &revoking{Transport: k.kafka, changes: make(chan transport.Change), committed: make(chan int64, 1000), onLog: func() {}}
}

// revoke gives the first partition of the topic back. It blocks until the member has given it back.
func (r *revoking) revoke(k *kit) {
	k.Helper()
	done := make(chan struct{})
	r.changes <- transport.Change{Revoked: []transport.TopicPartition{{Topic: k.topic}}, Done: func() { close(done) }}
	select {
	case <-done:
	case <-k.context().Done():
		k.Fatal("the partition is not given back")
	}
}

func (r *revoking) Join(ctx context.Context, group string, topics []string, s transport.Session) error {
	return r.Transport.Join(ctx, group, topics, revokingSession{s, r})
}

type revokingSession struct {
	transport.Session
	r *revoking
}

func (s revokingSession) Serve(ctx context.Context, g transport.Generation) error {
	return s.Session.Serve(ctx, revokingGeneration{g, s.r})
}

type revokingGeneration struct {
	transport.Generation
	r *revoking
}

func (g revokingGeneration) Changes() <-chan transport.Change { return g.r.changes }

func (g revokingGeneration) Log(ctx context.Context, tp transport.TopicPartition) (inbox.Log, error) {
	log, err := g.Generation.Log(ctx, tp)
	g.r.onLog()
	return log, err
}

func (g revokingGeneration) Commit(ctx context.Context, offsets map[transport.TopicPartition]transport.GroupOffset) error {
	for _, offset := range offsets {
		if offset.Offset > 0 {
			g.r.committed <- offset.Offset
		}
	}
	return g.Generation.Commit(ctx, offsets)
}

// measured calls its function for each measurement.
type measured struct {
	telemetry.Discard
	note func(telemetry.Measurement)
}

func (m *measured) Measure(measurement telemetry.Measurement) { m.note(measurement) }

// addBlockedHandler registers a handler that ignores its context until the end of the test.
func addBlockedHandler(t *testing.T, c *consumer.Consumer) (begun chan struct{}) {
	t.Helper()
	begun, release := make(chan struct{}, 100), make(chan struct{})
	t.Cleanup(func() { close(release) })
	addHandler(t, c, "counted", func(context.Context, *consumer.Message) error {
		begun <- struct{}{}
		<-release
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce))
	return begun
}

func TestAPartitionThatIsGivenBackCommitsNothingUnfinished(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	r := newRevoking(k)
	givingBack := atomic.Bool{}
	// The commit loop has time between the release of the buffers and the removal of the partition.
	var early atomic.Int64
	sink := &measured{note: func(m telemetry.Measurement) {
		if m.Metric == telemetry.Lag && m.N == 0 && givingBack.Load() {
			select {
			case offset := <-r.committed:
				early.Store(offset)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}}
	c := k.newConsumer(consumer.WithTransport(r), consumer.WithTelemetry(sink), consumer.WithDrain(10*time.Millisecond), consumer.WithCommitInterval(5*time.Millisecond))
	begun := addBlockedHandler(t, c)

	k.publish(newMessages(1, 20)...)
	k.start(c)
	k.waitFor("the handler", begun)
	k.waitUntil("all messages", func(context.Context) bool {
		partitions := c.Status().Partitions
		return len(partitions) == 1 && partitions[0].Lag == 20
	})

	givingBack.Store(true)
	r.revoke(k)
	if got := early.Load(); got != 0 {
		t.Errorf("the offset %d was committed, but the message at 0 is unfinished", got)
	}
}

func TestTheLagOfAPartitionThatIsGivenBackStaysZero(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	r := newRevoking(k)
	var last atomic.Int64
	answered, over := make(chan struct{}), make(chan struct{}, 1000)
	sink := &measured{note: func(m telemetry.Measurement) {
		switch m.Metric {
		case telemetry.Lag:
			last.Store(m.N)
		case telemetry.Suspended:
			// It follows the lags of all partitions.
			select {
			case <-answered:
				over <- struct{}{}
			default:
			}
		default:
			// The test needs no other figure.
		}
	}}
	c := k.newConsumer(consumer.WithTransport(r), consumer.WithTelemetry(sink),
		consumer.WithDrain(10*time.Millisecond), consumer.WithBufferedRecords(1), consumer.WithMaxAhead(1))
	begun := addBlockedHandler(t, c)

	waits, reading := atomic.Bool{}, make(chan struct{}, 100)
	r.onLog = func() {
		if waits.Load() {
			reading <- struct{}{}
			<-answered
		}
	}
	k.publish(newMessage("k", "counted", "0"))
	k.start(c)
	k.waitFor("the handler", begun)

	// The partition has no room for another fetch, so only the gauges read its log.
	k.publish(newMessages(1, 20)...)
	waits.Store(true)
	k.waitFor("the gauges", reading)

	r.revoke(k)
	close(answered)
	k.waitFor("the end of the measurement", over)
	if got := last.Load(); got != 0 {
		t.Errorf("the lag of a partition that was given back is %d", got)
	}
}
