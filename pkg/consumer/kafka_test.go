package consumer_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// A topic that does not exist yet does not prevent reading the others. It is reported, and joined when it
// exists.
func TestTopicThatDoesNotExistYet(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.cfg.WatchPartitions = 50 * time.Millisecond
	later := stacktest.Name(t)
	reported := make(chan struct{}, 10)
	c := k.newConsumer(consumer.WithTopics(later), consumer.WithErrorHook(func(_ context.Context, err error) {
		if strings.Contains(err.Error(), later) && strings.Contains(err.Error(), "do not exist yet") {
			reported <- struct{}{}
		}
	}))

	addHandler(t, c, "counted", k.insertInto("effects"))
	k.publish(newMessages(3, 10)...)
	k.start(c)
	k.waitCount("effects", 10)
	k.waitFor("the report", reported)
	stacktest.CreateTopic(t, later, 2)
	k.waitUntil("a message", func(ctx context.Context) bool {
		return k.kafka.Publish(ctx, later, newRecords(newMessage("new", "counted", "0"))) == nil
	})

	k.waitCount("effects", 11)
}

func TestExclusiveMemberHasAllPartitionsAndAnotherTakesOver(t *testing.T) {
	t.Parallel()
	k := newKit(t, 3)
	k.cfg.Exclusive = true
	var stats [2]counts
	var stops [2]func()
	var parts [2]chan int
	for i := range stops {
		k.cfg.Priority = int32(i)
		parts[i] = make(chan int, 100)
		c := k.newConsumer(consumer.WithTelemetry(&assigned{counts: &stats[i], n: parts[i]}))
		addHandler(t, c, "counted", k.insertInto("effects"))
		stops[i] = k.start(c)
	}

	awaitParts := func(i, n int) {
		for {
			select {
			case got := <-parts[i]:
				if got == n {
					return
				}
				if got != 0 && got != 3 {
					t.Fatalf("member %d has %d partitions", i, got)
				}
			case <-k.context().Done():
				t.Fatalf("member %d never had %d partitions", i, n)
			}
		}
	}

	awaitParts(1, 3) // the higher priority
	k.publish(newMessages(6, 30)...)
	k.waitCount("effects", 30)
	stops[1]()
	awaitParts(0, 3)
	k.publish(newMessage("more", "counted", "0"))
	k.waitCount("effects", 31)
	k.checkOnce("effects", 31)
}

type assigned struct {
	*counts
	n chan int
}

func (a *assigned) Measure(m telemetry.Measurement) {
	if m.Metric == telemetry.Assigned {
		a.n <- int(m.N)
	}
}

// Published records are in the partitions that Java's client, and so the relay, would choose, with all of their
// parts.
func TestPublishWritesRecordsAsTheyAre(t *testing.T) {
	t.Parallel()
	k := newKit(t, 7)
	var want []string
	for i := range 40 {
		m := newMessage(fmt.Sprint("key", i), "type", fmt.Sprint(i))
		m.Headers = append(m.Headers, event.Header{Key: "type", Value: []byte("twice")})
		if i%5 == 0 {
			m.Value = nil
		}
		k.publish(m)
		want = append(want, string(m.Key))
	}

	cl, err := kgo.NewClient(kgo.SeedBrokers(k.cfg.Brokers...), kgo.ConsumeTopics(k.topic))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	java := kgo.StickyKeyPartitioner(nil).ForTopic(k.topic)
	n := 0
	for n < len(want) {
		fs := cl.PollFetches(k.context())
		if fs.Err() != nil {
			t.Fatal(fs.Err())
		}
		fs.EachRecord(func(r *kgo.Record) {
			n++
			if p := java.Partition(&kgo.Record{Key: r.Key}, 7); int32(p) != r.Partition {
				t.Errorf("%s is in partition %d, not %d", r.Key, r.Partition, p)
			}
			var i int
			if _, err := fmt.Sscanf(string(r.Key), "key%d", &i); err != nil {
				t.Fatal(err)
			}
			if (r.Value == nil) != (i%5 == 0) || len(r.Headers) != 3 || string(r.Headers[2].Value) != "twice" {
				t.Errorf("%+v", r)
			}
		})
	}

	err = k.kafka.Publish(k.context(), stacktest.Name(t), newRecords(newMessage("a", "b", "c")))
	if err == nil || !strings.Contains(err.Error(), "create it") {
		t.Errorf("a topic that does not exist: %v", err)
	}
}

// Brokers that cannot be reached are waited for and reported; a stop does not wait with them.
func TestBrokersThatAreAwayAreReportedAndWaitedFor(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	k.cfg.Brokers = []string{"127.0.0.1:1"}
	reported := make(chan struct{}, 1000)
	c := k.newConsumer(consumer.WithErrorHook(func(context.Context, error) { reported <- struct{}{} }))
	addHandler(t, c, "*", nop)
	stop := k.start(c)
	k.waitFor("a report", reported)
	k.waitFor("another", reported)
	stop()
}

// Publish waits while brokers cannot be reached for seconds, such as the brokers of a partition without a
// leader.
func TestPublishWaitsForTheBrokers(t *testing.T) {
	t.Parallel()
	k := newKit(t, 1)
	way, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}

	var open atomic.Bool
	var wg sync.WaitGroup
	// The listener leads to a broker while it is open.
	wg.Go(func() {
		for {
			c, err := way.Accept()
			if err != nil {
				return
			}
			if !open.Load() {
				_ = c.Close()
				continue
			}
			broker, err := net.Dial("tcp", k.cfg.Brokers[0])
			if err != nil {
				t.Error(err)
				_ = c.Close()
				continue
			}
			for _, d := range [][2]net.Conn{{c, broker}, {broker, c}} {
				wg.Go(func() { _, _ = io.Copy(d[0], d[1]); _ = d[0].Close() })
			}
		}
	})

	cfg := k.cfg
	cfg.Brokers = []string{way.Addr().String()}
	away, err := kafkago.New(cfg)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { away.Close(); _ = way.Close(); wg.Wait() })
	ended := make(chan error, 1)
	go func() { ended <- away.Publish(k.context(), k.topic, newRecords(newMessage("a", "t", "waits"))) }()
	select {
	case err := <-ended:
		t.Fatalf("it does not wait: %v", err)
	case <-time.After(4 * time.Second):
	}

	open.Store(true)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
