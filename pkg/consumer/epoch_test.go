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

	"github.com/outrelay/outrelay/internal/transport"
	"github.com/outrelay/outrelay/pkg/consumer"
)

// A new leader that lost records and has grown past the group's offset before the next fetch is found out by its epochs.
func TestN29_ALeaderThatLostRecordsAndHasGrownIsReadFromWhereItDiffers(t *testing.T) {
	t.Parallel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(1, "log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	cl, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.DefaultProduceTopic("log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cl.Close)
	produce := func(n int) {
		t.Helper()
		for i := range n {
			r := &kgo.Record{Key: []byte("a"), Value: fmt.Append(nil, i), Headers: []kgo.RecordHeader{{Key: "type", Value: []byte("counted")}}}
			if err := cl.ProduceSync(t.Context(), r).FirstErr(); err != nil {
				t.Fatal(err)
			}
		}
	}
	move := func(to int32) {
		t.Helper()
		if err := cluster.MoveTopicPartition("log", 0, to); err != nil {
			t.Fatal(err)
		}
	}

	gaps := make(chan *transport.RangeError, 10)
	c, err := consumer.New("group", nil,
		consumer.WithKafka(transport.Config{Brokers: cluster.ListenAddrs(), MaxWait: 100 * time.Millisecond, HeartbeatInterval: 100 * time.Millisecond}),
		consumer.WithTopics("log"), consumer.WithInbox(&renewed{}), consumer.WithDisposer(newDisposed()),
		consumer.Transactions(func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) }),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if gap, ok := errors.AsType[*transport.RangeError](err); ok {
				gaps <- gap
			}
		}))
	if err != nil {
		t.Fatal(err)
	}
	got := make(chan int64, 100)
	handle(t, c, "counted", func(_ context.Context, m *consumer.Message) error {
		got <- m.Offset
		return nil
	}, consumer.WithMode(consumer.AtLeastOnce))
	expect := func(offsets ...int64) {
		t.Helper()
		for _, want := range offsets {
			select {
			case offset := <-got:
				if offset != want {
					t.Fatalf("offset %d, want %d", offset, want)
				}
			case <-time.After(patience):
				t.Fatalf("offset %d was not handled", want)
			}
		}
	}
	move(0)
	produce(4)
	runs(t, c)
	expect(0, 1, 2, 3)

	// A clean change of the leader is none of it.
	move(1)
	produce(1)
	expect(4)

	// The fake broker keeps its records; its answer is that of one that lost those from 2 on.
	cluster.ControlKey(int16(kmsg.OffsetForLeaderEpoch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		res := req.ResponseKind().(*kmsg.OffsetForLeaderEpochResponse)
		p := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
		p.EndOffset = 2
		topic := kmsg.NewOffsetForLeaderEpochResponseTopic()
		topic.Topic, topic.Partitions = "log", append(topic.Partitions, p)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})
	move(0)
	produce(1)
	expect(2, 3, 4, 5)
	if gap := <-gaps; !gap.Diverged || gap.End != 2 || gap.Offset != 5 {
		t.Errorf("%+v", gap)
	}
}
