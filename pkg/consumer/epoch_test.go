package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
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

// A member that has read the whole log notices that the new leader has lost records also while there is no new one: the leader may
// have as many as before.
func TestN29_AnIdleMemberFindsOutThatTheLeaderLostRecords(t *testing.T) {
	t.Parallel()
	for name, use := range map[string][]consumer.Option{"kafka-go": nil, "franz": {franz.Use()}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newShrinkingLog(t)
			l.moveLeader(0)
			l.produce(5)
			r := l.startReader(use...)
			r.waitHandled(0, 1, 2, 3, 4)

			l.shrinkTo(2)
			l.moveLeader(1)
			r.waitHandled(2, 3, 4)
			if gap := <-r.gaps; !gap.Diverged || gap.End != 2 || gap.Offset != 5 {
				t.Errorf("%+v", gap)
			}
		})
	}
}

// The log of a new leader that has lost records ends before the offset of the group, and has other records before its end.
func TestN29_ALeaderThatEndsBeforeTheOffsetIsReadFromWhereItDiffers(t *testing.T) {
	t.Parallel()
	l := newShrinkingLog(t)
	l.moveLeader(0)
	l.produce(5)
	r := l.startReader()
	r.waitHandled(0, 1, 2, 3, 4)

	l.shrinkTo(2)
	l.endAt(4)
	l.moveLeader(1)
	r.waitHandled(2, 3, 4)
	if gap := <-r.gaps; !gap.Diverged || gap.End != 2 || gap.Offset != 5 {
		t.Errorf("%+v", gap)
	}
	if !l.responded.Load() {
		t.Error("the leader was not asked for the end of its log")
	}
}

// N29: records that replaced handled ones are handled, although the group has committed no offset after those: a member that was
// killed, or whose coordinator was away, begins again before them.
func TestN29_RecordsInPlaceOfUncommittedOnesAreHandled(t *testing.T) {
	t.Parallel()
	for _, mode := range []consumer.Mode{consumer.Transactional, consumer.Claimed} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := stacktest.Database(t, stacktest.Client(t))
			l, handled := &changing{id: "cluster/topic"}, &handledTimes{times: map[string]int{}}
			run := func(committed int64) (stop func()) {
				c := inDatabase(t, l, db)
				addHandler(t, c, "counted", handled.handle, consumer.WithMode(mode))
				stop = startConsumer(t, c)
				l.waitCommitted(t, committed)
				return stop
			}
			for range 10 {
				l.append("a")
			}
			run(10)()

			// The offset 5 was committed last. The records from 7 on are lost.
			l.replaceFrom(7, 8)
			l.mu.Lock()
			l.committed, l.diverged = 5, 0
			l.mu.Unlock()
			run(15)()
			handled.checkOnce(t, 10+8)

			// The watermark is that of the new records.
			l.mu.Lock()
			l.committed = 5
			l.mu.Unlock()
			if _, err := db.Collection("inbox").DeleteMany(t.Context(), bson.D{}); err != nil {
				t.Fatal(err)
			}
			run(15)()
			handled.checkOnce(t, 10+8)
		})
	}
}

// N29: a message of a removed record that is set aside, and the message of the record in its place, are two messages.
func TestN29_AMessageInPlaceOfOneThatIsSetAsideIsHandled(t *testing.T) {
	t.Parallel()
	db := stacktest.Database(t, stacktest.Client(t))
	l, handled := &changing{id: "cluster/topic"}, &handledTimes{times: map[string]int{}}
	var broken atomic.Bool
	broken.Store(true)
	run := func() (stop func()) {
		c := inDatabase(t, l, db, consumer.WithRetry(soon))
		addHandler(t, c, "counted", func(ctx context.Context, m *consumer.Message) error {
			if broken.Load() {
				return errWanted
			}
			return handled.handle(ctx, m)
		})
		stop = startConsumer(t, c)
		l.waitCommitted(t, 2)
		return stop
	}
	l.append("a")
	l.append("a")
	run()()

	l.replaceFrom(1, 1)
	l.mu.Lock()
	l.committed, l.diverged = 0, 0
	l.mu.Unlock()
	run()
	broken.Store(false)
	stacktest.Eventually(t, "all messages", func() bool { return handled.count() == 3 })
	handled.checkOnce(t, 3)
}

// N29: a partition that is read again from an offset that is still in the log finds records in the places of those that it has handled.
func TestN29_RecordsInPlaceOfHandledOnesAreHandledAfterAPause(t *testing.T) {
	t.Parallel()
	l, _, goOn, handled := pauseAndDrop(t)
	// The two records of the other key were handled. The second one of the key that is held up has to be fetched again.
	l.replaceFrom(2, 2)
	l.mu.Lock()
	l.diverged = 0
	l.mu.Unlock()
	goOn()
	stacktest.Eventually(t, "the records in the places", func() bool { got := handled(); return got[2] == 2 && got[3] == 2 },
		func() any { return fmt.Sprint(handled()) })
	l.waitCommitted(t, 4)
	if got := handled(); got[0] != 1 || got[1] != 1 {
		t.Errorf("the records that stayed were handled %v times, want once", got)
	}
}

// handledTimes counts how often each message was handled, by its id.
type handledTimes struct {
	mu    sync.Mutex
	times map[string]int
}

func (h *handledTimes) handle(_ context.Context, m *consumer.Message) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.times[m.ID]++
	return nil
}

func (h *handledTimes) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.times)
}

// checkOnce fails the test unless n messages were handled, each once.
func (h *handledTimes) checkOnce(t *testing.T, n int) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.times) != n {
		t.Errorf("%d messages were handled, want %d: %v", len(h.times), n, h.times)
	}
	for id, times := range h.times {
		if times != 1 {
			t.Errorf("%s was handled %d times, want once", id, times)
		}
	}
}

// shrinkingLog is a topic with one partition on two fake brokers.
type shrinkingLog struct {
	t         *testing.T
	cluster   *kfake.Cluster
	client    *kgo.Client
	responded atomic.Bool // endAt has responded
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
	return &shrinkingLog{t: t, cluster: cluster, client: client}
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

// shrinkTo makes the leader respond once like one that has lost the records from end on. The fake broker keeps them.
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

// endAt makes broker 1 respond to a fetch and the request for the end of the log once like a leader whose log ends at end.
func (l *shrinkingLog) endAt(end int64) {
	const leader = 1
	l.cluster.ControlKey(int16(kmsg.Fetch), func(req kmsg.Request) (kmsg.Response, error, bool) {
		if l.cluster.CurrentNode() != leader {
			return nil, nil, false
		}
		res := req.ResponseKind().(*kmsg.FetchResponse)
		p := kmsg.NewFetchResponseTopicPartition()
		p.ErrorCode = kerr.OffsetOutOfRange.Code
		topic := kmsg.NewFetchResponseTopic()
		topic.TopicID, topic.Partitions = req.(*kmsg.FetchRequest).Topics[0].TopicID, append(topic.Partitions, p)
		res.Topics = append(res.Topics, topic)
		return res, nil, true
	})

	l.cluster.ControlKey(int16(kmsg.ListOffsets), func(req kmsg.Request) (kmsg.Response, error, bool) {
		const latest, epoch = -1, 99
		if l.cluster.CurrentNode() != leader || req.(*kmsg.ListOffsetsRequest).Topics[0].Partitions[0].Timestamp != latest {
			return nil, nil, false
		}
		res := req.ResponseKind().(*kmsg.ListOffsetsResponse)
		p := kmsg.NewListOffsetsResponseTopicPartition()
		p.Offset, p.LeaderEpoch = end, epoch
		topic := kmsg.NewListOffsetsResponseTopic()
		topic.Topic, topic.Partitions = "log", append(topic.Partitions, p)
		res.Topics = append(res.Topics, topic)
		l.responded.Store(true)
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
