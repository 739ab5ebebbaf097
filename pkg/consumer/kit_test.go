package consumer_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/internal/service/transport/kafkago"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/event"
)

// patience is how long a test waits for an expected event. It is long, because the machine may be
// busy.
const patience = 3 * time.Minute

// kit is the database, the topic and the group of one test.
type kit struct {
	testing.TB
	db    *mongo.Database
	topic string
	group string
	kafka *kafkago.Transport
	cfg   transport.Config
}

func newKit(t testing.TB, partitions int, opts ...*options.ClientOptions) *kit {
	t.Helper()
	k := &kit{TB: t, topic: stacktest.Topic(t, partitions), group: stacktest.Name(t)}
	k.db = stacktest.Database(t, stacktest.Client(t, opts...))
	k.cfg = transport.Config{
		Brokers: stacktest.Brokers(t), SessionTimeout: 20 * time.Second, HeartbeatInterval: 100 * time.Millisecond,
		RebalanceTimeout: 20 * time.Second, JoinBackoff: 100 * time.Millisecond, MaxWait: 100 * time.Millisecond,
	}
	k.openKafka()
	return k
}

// openKafka opens the client with which the test publishes.
func (k *kit) openKafka() {
	k.Helper()
	var err error
	if k.kafka, err = kafkago.New(k.cfg); err != nil {
		k.Fatal(err)
	}
	k.Cleanup(k.kafka.Close)
}

// newKitOf returns a kit with the database, the topic and the group of k, and a client of its own.
func newKitOf(k *kit, opts ...*options.ClientOptions) *kit {
	k.Helper()
	other := *k
	other.db = stacktest.Client(k, opts...).Database(k.db.Name())
	return &other
}

// context ends with the test, or when its patience does.
func (k *kit) context() context.Context {
	ctx, cancel := context.WithTimeout(k.Context(), patience)
	k.Cleanup(cancel)
	return ctx
}

func newMessage(key, typ, value string) *consumer.Message {
	return &consumer.Message{Key: []byte(key), Value: []byte(value), Headers: []event.Header{
		{Key: "id", Value: []byte(key + "/" + typ + "/" + value)}, {Key: "type", Value: []byte(typ)},
	}}
}

// newRecords returns messages as records to publish.
func newRecords(ms ...*consumer.Message) []transport.Record {
	out := make([]transport.Record, len(ms))
	for i, m := range ms {
		out[i] = transport.Record{Key: m.Key, Value: m.Value, Headers: m.Headers}
	}
	return out
}

func (k *kit) publish(ms ...*consumer.Message) {
	k.Helper()
	if err := k.kafka.Publish(k.context(), k.topic, newRecords(ms...)); err != nil {
		k.Fatal(err)
	}
}

// newMessages returns n messages with some keys. Each value is the number of the message within its key.
func newMessages(keys, n int) []*consumer.Message {
	out := make([]*consumer.Message, n)
	for i := range out {
		out[i] = newMessage(fmt.Sprintf("key%02d", i%keys), "counted", fmt.Sprint(i/keys))
	}
	return out
}

func (k *kit) newConsumer(opts ...consumer.Option) *consumer.Consumer {
	k.Helper()
	base := []consumer.Option{
		consumer.WithKafka(k.cfg), consumer.WithTopics(k.topic), consumer.WithCommitInterval(50 * time.Millisecond), consumer.WithSharedTransaction(64),
		consumer.WithErrorHook(func(_ context.Context, err error) { k.logError(err) }), consumer.WithLogger(slog.New(slog.DiscardHandler)),
	}
	c, err := consumer.New(k.group, k.db, append(base, opts...)...)
	if err != nil {
		k.Fatal(err)
	}
	return c
}

// logError logs an error while the test runs. The log of a test must not be used after the test.
func (k *kit) logError(err error) {
	if k.Context().Err() == nil {
		k.Log(err)
	}
}

// start runs the consumer until stop or the end of the test. stop waits until the consumer has ended.
func (k *kit) start(c *consumer.Consumer) (stop func()) {
	k.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(k.Context()))
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				k.Errorf("Run: %v", err)
			}
		case <-time.After(patience):
			k.Error("Run does not end")
		}
	})

	k.Cleanup(stop)
	return stop
}

func addHandler(t testing.TB, c *consumer.Consumer, pattern string, f consumer.HandlerFunc, opts ...consumer.HandlerOption) {
	t.Helper()
	addHandlerAs(t, c, pattern, pattern, f, opts...)
}

// addHandlerAs registers f for a pattern under another name.
func addHandlerAs(t testing.TB, c *consumer.Consumer, name, pattern string, f consumer.HandlerFunc, opts ...consumer.HandlerOption) {
	t.Helper()
	if err := c.Handle(name, consumer.Func(f, pattern), opts...); err != nil {
		t.Fatal(err)
	}
}

// insertInto returns a handler that inserts one document for each message, in the transaction of the message.
func (k *kit) insertInto(name string) consumer.HandlerFunc {
	coll := k.newCollection(name)
	return func(ctx context.Context, m *consumer.Message) error {
		_, err := coll.InsertOne(ctx, bson.D{{Key: "id", Value: m.ID}, {Key: "key", Value: string(m.Key)}, {Key: "value", Value: string(m.Value)}})
		return err
	}
}

func (k *kit) newCollection(name string) *mongo.Collection {
	k.Helper()
	if err := k.db.CreateCollection(k.context(), name); err != nil && !strings.Contains(err.Error(), "NamespaceExists") {
		k.Fatal(err)
	}
	return k.db.Collection(name)
}

// waitUntil waits for a condition that another goroutine establishes.
func (k *kit) waitUntil(what string, cond func(ctx context.Context) bool) {
	k.Helper()
	ctx := k.context()
	stacktest.Eventually(k, what, func() bool { return cond(ctx) })
}

func (k *kit) countDocuments(name string) int {
	k.Helper()
	n, err := k.db.Collection(name).CountDocuments(k.context(), bson.D{})
	if err != nil {
		k.Fatal(err)
	}
	return int(n)
}

func (k *kit) waitCount(name string, n int) {
	k.Helper()
	k.waitUntil(fmt.Sprintf("%d effects", n), func(ctx context.Context) bool {
		got, err := k.db.Collection(name).CountDocuments(ctx, bson.D{})
		return err == nil && int(got) >= n
	})
}

// checkOnce checks that each of n messages had its effect once, in the order of each key.
func (k *kit) checkOnce(name string, n int) {
	k.Helper()
	cur, err := k.db.Collection(name).Find(k.context(), bson.D{}, options.Find().SetSort(bson.D{{Key: "$natural", Value: 1}}))
	if err != nil {
		k.Fatal(err)
	}

	var docs []struct{ ID, Key, Value string }
	if err := cur.All(k.context(), &docs); err != nil {
		k.Fatal(err)
	}

	seen, last := map[string]int{}, map[string]int{}
	for _, d := range docs {
		seen[d.ID]++
		if seen[d.ID] == 2 {
			k.Errorf("%s had its effect twice", d.ID)
		}
		var v int
		if _, err := fmt.Sscan(d.Value, &v); err != nil {
			k.Fatal(err)
		}
		if before, ok := last[d.Key]; ok && v != before+1 && seen[d.ID] == 1 {
			k.Errorf("key %s: %d after %d", d.Key, v, before)
		}
		last[d.Key] = v
	}
	if len(seen) != n {
		k.Errorf("%d of %d messages had their effect", len(seen), n)
	}
}

// readCommitted returns the offsets of the group in the topic, by partition, or -1 for none.
func (k *kit) readCommitted(partitions int) []int64 {
	k.Helper()
	return k.committedOf(k.topic, partitions)
}

func (k *kit) committedOf(topic string, partitions int) []int64 {
	k.Helper()
	cl, done := k.newClient()
	defer done()
	ids := make([]int, partitions)
	for i := range ids {
		ids[i] = i
	}

	out := make([]int64, partitions)
	k.waitUntil("offsets", func(ctx context.Context) bool {
		res, err := cl.OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: k.group, Topics: map[string][]int{topic: ids}})
		if err != nil || res.Error != nil {
			return false
		}
		for _, p := range res.Topics[topic] {
			if p.Error != nil {
				return false
			}
			out[p.Partition] = p.CommittedOffset
		}
		return true
	})

	return out
}

// readEnds returns the end offsets of a topic with one partition.
func (k *kit) readEnds(topic string) []int64 {
	k.Helper()
	cl, done := k.newClient()
	defer done()
	res, err := cl.ListOffsets(k.context(), &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic: {kafka.LastOffsetOf(0)}}})
	if err != nil {
		k.Fatal(err)
	}
	var out []int64
	for _, p := range res.Topics[topic] {
		out = append(out, p.LastOffset)
	}
	return out
}

func (k *kit) newClient() (*kafka.Client, func()) {
	tr := &kafka.Transport{}
	return &kafka.Client{Addr: kafka.TCP(k.cfg.Brokers...), Transport: tr, Timeout: 10 * time.Second}, tr.CloseIdleConnections
}

// deleteAtEnd deletes topics that the consumer creates, at the end of the test.
func (k *kit) deleteAtEnd(topics ...string) {
	k.Cleanup(func() {
		cl, done := k.newClient()
		defer done()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(k.Context()), 10*time.Second)
		defer cancel()
		_, _ = cl.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: topics})
	})
}

// disposed collects the disposed messages.
type disposed struct {
	mu   sync.Mutex
	list []disposal
	fail error
	more chan struct{}
}

type disposal struct {
	m       *consumer.Message
	handler string
	verdict consumer.Verdict
	cause   error
}

func newDisposed() *disposed { return &disposed{more: make(chan struct{}, 10_000)} }

func (d *disposed) Dispose(_ context.Context, m *consumer.Message, handler string, v consumer.Verdict, cause error) (*consumer.GivenUp, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fail != nil {
		return nil, d.fail
	}
	d.list = append(d.list, disposal{m, handler, v, cause})
	d.more <- struct{}{}
	return nil, nil
}

func (d *disposed) setError(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail = err
}

func (d *disposed) listAll() []disposal {
	d.mu.Lock()
	defer d.mu.Unlock()
	return append([]disposal(nil), d.list...)
}

// waitFor waits for a signal.
func (k *kit) waitFor(what string, c <-chan struct{}) {
	k.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		k.Fatalf("%s: not within %v", what, patience)
	}
}

// withTries returns an option: a message is tried n times, without a delay.
func withTries(n int) consumer.HandlerOption {
	return consumer.WithRetry(consumer.Retry{Quick: make([]time.Duration, n-1), MaxAttempts: n})
}

var errWanted = errors.New("as wanted")
