//go:build unix

package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/test/kit"
)

// TestRecordsOfAnUncleanElectionAreHandled: a broker that has missed half of the log becomes the leader, and its log
// grows past the position of the group before the consumer reads again. The offsets alone show nothing. The records
// that replaced handled records are handled too (N29).
func TestRecordsOfAnUncleanElectionAreHandled(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "it starts a cluster of three brokers", "fault.long")
	// The consumer reads nothing until the other log is longer than the position of the group.
	t.Run("by a consumer that was paused", func(t *testing.T) {
		checkUncleanElection(t, (*lineReader).pause, (*lineReader).resume)
	})
	t.Run("by a consumer that joins later", func(t *testing.T) {
		checkUncleanElection(t, (*lineReader).stop, (*lineReader).startReading)
	})
}

// checkUncleanElection makes a broker without the latest records the leader of a log that a consumer reads. leave is called before,
// and resume when the log has other records at their offsets.
func checkUncleanElection(t *testing.T, leave, resume func(*lineReader)) {
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 3, Quick: true, Kafka: devstack.KafkaOptions{
		Props: map[string]string{"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"},
	}})
	s := kit.New(t, kit.Options{Stack: stack})
	log := newLossyLog(t, stack)
	r := &lineReader{t: t, s: s, topic: log.topic}
	r.startReading()
	defer r.stop()

	log.produce(t, "both-", 5)
	r.waitHandled("both-", 5)
	leader, follower := log.findReplicas(t)
	mustSucceed(t, follower.Kill())
	log.waitInSync(t, leader)
	log.produce(t, "lost-", 5)
	r.waitHandled("lost-", 5)

	leave(r)
	mustSucceed(t, leader.Kill())
	mustSucceed(t, follower.Restart(t.Context()))
	log.waitInSync(t, follower)
	log.produce(t, "new-", 10)
	resume(r)
	r.waitHandled("new-", 10)
	mustSucceed(t, leader.Restart(t.Context()))

	lines := r.handledLines()
	slices.Sort(lines)
	if n := len(slices.Compact(slices.Clone(lines))); n != len(lines) {
		t.Errorf("a record was handled twice: %v", lines)
	}
}

// lineReader is a consumer that collects the values of the records.
type lineReader struct {
	t     *testing.T
	s     *kit.Scene
	topic string

	consumer *consumer.Consumer
	cancel   context.CancelFunc
	ended    chan error

	mu      sync.Mutex
	handled []string
}

func (r *lineReader) startReading() {
	r.t.Helper()
	c, err := consumer.New("readers", r.s.DB, consumer.WithBrokers(r.s.Brokers...), consumer.WithTopics(r.topic))
	mustSucceed(r.t, err)
	mustSucceed(r.t, c.Handle("lines", consumer.Func(func(_ context.Context, m *consumer.Message) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.handled = append(r.handled, string(m.Value))
		return nil
	}, "*")))

	var ctx context.Context
	ctx, r.cancel = context.WithCancel(context.WithoutCancel(r.t.Context()))
	r.consumer, r.ended = c, make(chan error, 1)
	go func() { r.ended <- c.Run(ctx) }()
}

// stop ends the consumer. It leaves the group.
func (r *lineReader) stop() {
	r.t.Helper()
	if r.cancel == nil {
		return
	}
	r.cancel()
	r.cancel = nil
	if err := <-r.ended; err != nil {
		r.t.Error(err)
	}
}

func (r *lineReader) pause()  { r.consumer.Pause() }
func (r *lineReader) resume() { r.consumer.Resume() }

func (r *lineReader) handledLines() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.handled)
}

func (r *lineReader) waitHandled(prefix string, n int) {
	r.t.Helper()
	stacktest.EventuallyIn(r.t, kit.Patience, fmt.Sprintf("%d records %s are handled", n, prefix), func() bool {
		lines := r.handledLines()
		for i := range n {
			if !slices.Contains(lines, prefix+strconv.Itoa(i)) {
				return false
			}
		}
		return true
	}, func() any { return fmt.Sprint(r.handledLines()) })
}

// lossyLog is a topic with one partition on two brokers, whose leader may be any of them.
type lossyLog struct {
	stack  *devstack.Stack
	client *kgo.Client
	topic  string
}

func newLossyLog(t *testing.T, stack *devstack.Stack) *lossyLog {
	t.Helper()
	topic := stacktest.Name(t)
	client, err := kgo.NewClient(kgo.SeedBrokers(stack.Brokers()...), kgo.DefaultProduceTopic(topic), kgo.RequiredAcks(kgo.LeaderAck()),
		kgo.DisableIdempotentWrite(), kgo.MetadataMinAge(100*time.Millisecond))
	mustSucceed(t, err)
	t.Cleanup(client.Close)

	req := kmsg.NewPtrCreateTopicsRequest()
	created := kmsg.NewCreateTopicsRequestTopic()
	created.Topic, created.NumPartitions, created.ReplicationFactor = topic, 1, 2
	for name, value := range map[string]string{"unclean.leader.election.enable": "true", "min.insync.replicas": "1"} {
		config := kmsg.NewCreateTopicsRequestTopicConfig()
		config.Name, config.Value = name, &value
		created.Configs = append(created.Configs, config)
	}
	req.Topics = append(req.Topics, created)
	res, err := req.RequestWith(t.Context(), client)
	mustSucceed(t, err)
	mustSucceed(t, kerr.ErrorForCode(res.Topics[0].ErrorCode))
	return &lossyLog{stack: stack, client: client, topic: topic}
}

// produce writes n records with one key.
func (l *lossyLog) produce(t *testing.T, prefix string, n int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), kit.Patience)
	defer cancel()
	for i := range n {
		r := &kgo.Record{Key: []byte("k"), Value: []byte(prefix + strconv.Itoa(i)), Headers: []kgo.RecordHeader{{Key: "type", Value: []byte("written")}}}
		mustSucceed(t, l.client.ProduceSync(ctx, r).FirstErr())
	}
}

// describePartition returns the current state of the partition.
func (l *lossyLog) describePartition(ctx context.Context) (p kmsg.MetadataResponseTopicPartition, err error) {
	req := kmsg.NewPtrMetadataRequest()
	topic := kmsg.NewMetadataRequestTopic()
	topic.Topic = &l.topic
	req.Topics = append(req.Topics, topic)
	res, err := req.RequestWith(ctx, l.client)
	if err != nil {
		return p, err
	}
	if len(res.Topics) == 0 || len(res.Topics[0].Partitions) == 0 {
		return p, errors.New("the partition is not in the metadata")
	}
	return res.Topics[0].Partitions[0], nil
}

// findReplicas returns the leader and the other broker of the partition.
func (l *lossyLog) findReplicas(t *testing.T) (leader, follower *devstack.Member) {
	t.Helper()
	p, err := l.describePartition(t.Context())
	mustSucceed(t, err)
	for _, m := range l.stack.Kafkas() {
		switch {
		case int32(m.ID()) == p.Leader:
			leader = m
		case slices.Contains(p.Replicas, int32(m.ID())):
			follower = m
		}
	}
	return leader, follower
}

// waitInSync waits until the broker leads the partition and is its only replica in sync.
func (l *lossyLog) waitInSync(t *testing.T, only *devstack.Member) {
	t.Helper()
	stacktest.EventuallyIn(t, kit.Patience, "broker "+only.Name()+" alone has the log", func() bool {
		p, err := l.describePartition(t.Context())
		return err == nil && p.Leader == int32(only.ID()) && slices.Equal(p.ISR, []int32{p.Leader})
	})
}
