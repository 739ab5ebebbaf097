package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// A new leader that lost records and has grown past the group's offset before the next fetch is found out by its epochs.
func TestN29_ALeaderThatLostRecordsAndHasGrownIsReadFromWhereItDiffers(t *testing.T) {
	t.Parallel()
	l := newShrinkingLog(t)
	l.moveLeader(0)
	l.produce(4)
	r := l.startReader()
	r.waitHandled(0, 1, 2, 3)

	// A clean change of the leader is none of it.
	l.moveLeader(1)
	l.produce(1)
	r.waitHandled(4)

	l.shrinkTo(2)
	l.moveLeader(0)
	l.produce(1)
	r.waitHandled(2, 3, 4, 5)
	if gap := <-r.gaps; !gap.Diverged || gap.End != 2 || gap.Offset != 5 {
		t.Errorf("%+v", gap)
	}
}

// The same is found out by a member that joins after the change of the leader: the group stores the epoch with its offset.
func TestN29_AMemberThatJoinsLaterFindsOutThatTheLeaderLostRecords(t *testing.T) {
	t.Parallel()
	for name, use := range map[string][]consumer.Option{"kafka-go": nil, "franz": {franz.Use()}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newShrinkingLog(t)
			l.moveLeader(0)
			l.produce(5)
			r := l.startReader(use...)
			r.waitHandled(0, 1, 2, 3, 4)
			r.leave()

			l.shrinkTo(2)
			l.moveLeader(1)
			l.produce(1)
			r = l.startReader(use...)
			r.waitHandled(2, 3, 4, 5)
			if gap := <-r.gaps; !gap.Diverged || gap.End != 2 || gap.Offset != 5 {
				t.Errorf("%+v", gap)
			}
		})
	}
}

// shrinkingLog is a topic with one partition on two fake brokers.
type shrinkingLog struct {
	t       *testing.T
	cluster *kfake.Cluster
	client  *kgo.Client
}

func newShrinkingLog(t *testing.T) *shrinkingLog {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(1, "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.DefaultProduceTopic("log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(client.Close)
	return &shrinkingLog{t, cluster, client}
}

func (l *shrinkingLog) produce(n int) {
	l.t.Helper()
	for i := range n {
		r := &kgo.Record{Key: []byte("a"), Value: fmt.Append(nil, i), Headers: []kgo.RecordHeader{{Key: "type", Value: []byte("counted")}}}
		if err := l.client.ProduceSync(l.t.Context(), r).FirstErr(); err != nil {
			l.t.Fatal(err)
		}
	}
}

// moveLeader makes a broker the leader of the partition.
func (l *shrinkingLog) moveLeader(to int32) {
	l.t.Helper()
	if err := l.cluster.MoveTopicPartition("log", 0, to); err != nil {
		l.t.Fatal(err)
	}
}

// shrinkTo makes the leader answer once like one that has lost the records from end on. The fake broker keeps them.
func (l *shrinkingLog) shrinkTo(end int64) {
	l.cluster.ControlKey(int16(kmsg.OffsetForLeaderEpoch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		res := req.ResponseKind().(*kmsg.OffsetForLeaderEpochResponse)
		p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
		p.EndOffset = end
		topic := kmsg.NewOffsetForLeaderEpochResponseTopic()
		topic.Topic, topic.Partitions = "log", append(topic.Partitions, p)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})
}

// logReader is a consumer of a shrinkingLog.
type logReader struct {
	t     *testing.T
	got   chan int64
	gaps  chan *transport.RangeError
	leave func() // commits and leaves the group
}

// startReader starts a consumer in the group.
func (l *shrinkingLog) startReader(opts ...consumer.Option) *logReader {
	l.t.Helper()
	r := &logReader{t: l.t, got: make(chan int64, 100), gaps: make(chan *transport.RangeError, 10)}
	c, err := consumer.New("group", nil, append([]consumer.Option{
		consumer.WithKafka(transport.Config{Brokers: l.cluster.ListenAddrs(), MaxWait: 100 * time.Millisecond, HeartbeatInterval: 100 * time.Millisecond}),
		consumer.WithTopics("log"), consumer.WithInbox(&renewed{}), consumer.WithDisposer(newDisposed()),
		consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) }),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if gap, ok := errors.AsType[*transport.RangeError](err); ok {
				r.gaps <- gap
			}
		}),
	}, opts...)...)
	if err != nil {
		l.t.Fatal(err)
	}

	addHandler(l.t, c, "counted", func(_ context.Context, m *consumer.Message) error {
		r.got <- m.Offset
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce))

	r.leave = startConsumer(l.t, c)
	return r
}

// waitHandled waits until the records at these offsets are handled, in this order.
func (r *logReader) waitHandled(offsets ...int64) {
	r.t.Helper()
	for _, want := range offsets {
		select {
		case offset := <-r.got:
			if offset != want {
				r.t.Fatalf("offset %d, want %d", offset, want)
			}
		case <-time.After(patience):
			r.t.Fatalf("offset %d was not handled", want)
		}
	}
}
