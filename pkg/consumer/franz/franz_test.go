package franz_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// group is a consumer group with its topic and its database.
type group struct {
	*testing.T
	db          *mongo.Database
	topic, name string
	producer    *kgo.Client
}

func newGroup(t *testing.T, partitions int) *group {
	t.Helper()
	g := &group{T: t, topic: stacktest.Topic(t, partitions), name: stacktest.Name(t)}
	g.db = stacktest.Database(t, stacktest.Client(t))
	if err := g.db.CreateCollection(t.Context(), "effects"); err != nil {
		t.Fatal(err)
	}

	var err error
	g.producer, err = kgo.NewClient(kgo.SeedBrokers(stacktest.Brokers(t)...), kgo.DefaultProduceTopic(g.topic),
		kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(g.producer.Close)
	return g
}

// publish writes a message of this key to a partition.
func (g *group) publish(partition int32, key, id string) {
	g.Helper()
	err := g.producer.ProduceSync(g.Context(), &kgo.Record{Partition: partition, Key: []byte(key), Value: []byte(id), Headers: []kgo.RecordHeader{
		{Key: "id", Value: []byte(id)}, {Key: "type", Value: []byte("counted")},
	}}).FirstErr()
	if err != nil {
		g.Fatal(err)
	}
}

// startMember runs a member until stop is called.
func (g *group) startMember(handler consumer.HandlerFunc, opts ...franz.Option) (stop func()) {
	g.Helper()
	c, err := consumer.New(g.name, g.db, consumer.WithBrokers(stacktest.Brokers(g)...), consumer.WithTopics(g.topic), franz.Use(opts...),
		consumer.WithCommitInterval(50*time.Millisecond), consumer.WithDrain(20*time.Second),
		consumer.WithErrorHook(func(_ context.Context, err error) {
			if g.Context().Err() == nil {
				g.Log(err)
			}
		}))
	if err != nil {
		g.Fatal(err)
	}
	if err := c.Handle("counted", consumer.Func(handler, "counted")); err != nil {
		g.Fatal(err)
	}

	ctx, cancel := context.WithCancel(context.WithoutCancel(g.Context()))
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			g.Errorf("Run: %v", err)
		}
	})
	g.Cleanup(stop)
	return stop
}

// insertEffect writes one document for each message.
func (g *group) insertEffect(ctx context.Context, m *consumer.Message) error {
	_, err := g.db.Collection("effects").InsertOne(ctx, bson.D{{Key: "id", Value: m.ID}, {Key: "key", Value: string(m.Key)}})
	return err
}

// untilEffects waits for n effects, and checks that there are not more.
func (g *group) untilEffects(n int) {
	g.Helper()
	stacktest.Eventually(g, fmt.Sprintf("%d effects", n), func() bool {
		got, err := g.db.Collection("effects").CountDocuments(g.Context(), bson.D{})
		if int(got) > n {
			g.Fatalf("%d effects of %d messages", got, n)
		}
		return err == nil && int(got) == n
	})
}

// Members join and leave while messages arrive. Each message has its effect once, in the order of its key.
func TestEachEffectHappensOnceWhileMembersComeAndGo(t *testing.T) {
	t.Parallel()
	const keys, each, partitions = 12, 40, 4
	g := newGroup(t, partitions)
	stops := []func(){g.startMember(g.insertEffect)}
	for i := range each {
		for k := range keys {
			g.publish(int32(k%partitions), fmt.Sprint("key-", k), fmt.Sprintf("%d/%03d", k, i))
		}
		switch {
		case i%10 == 3:
			stops = append(stops, g.startMember(g.insertEffect))
		case i%10 == 8:
			stops[0]()
			stops = stops[1:]
		}
	}
	g.untilEffects(keys * each)

	cur, err := g.db.Collection("effects").Find(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}
	var docs []struct{ ID, Key string }
	if err := cur.All(t.Context(), &docs); err != nil {
		t.Fatal(err)
	}
	last := map[string]string{}
	for _, d := range docs {
		if d.ID <= last[d.Key] {
			t.Errorf("%s has its effect after %s", d.ID, last[d.Key])
		}
		last[d.Key] = d.ID
	}
}

// While a partition waits for its handler before it moves to a new member, the other one is handled. Its handler is not
// interrupted.
func TestAPartitionThatStaysGoesOnDuringARebalance(t *testing.T) {
	t.Parallel()
	g := newGroup(t, 2)
	begun, release := make(chan struct{}, 2), make(chan struct{})
	var interrupted atomic.Int32
	handled := make(chan *consumer.Message, 1000)
	handler := func(ctx context.Context, m *consumer.Message) error {
		if strings.HasPrefix(string(m.Value), "long") {
			begun <- struct{}{}
			select {
			case <-release:
			case <-ctx.Done():
				interrupted.Add(1)
				return ctx.Err()
			}
		}
		handled <- m
		return g.insertEffect(ctx, m)
	}
	g.startMember(handler)
	for p := range int32(2) {
		g.publish(p, "blocked", fmt.Sprint("long-", p))
		<-begun
	}

	// The first member cannot give a partition away before its handler has ended. In the meantime, the new messages of only one
	// partition are handled.
	g.startMember(handler)
	published := 0
	stacktest.Eventually(t, "one partition stops, and the other one goes on", func() bool {
		key := fmt.Sprint("other-", published)
		for p := range int32(2) {
			g.publish(p, key, fmt.Sprintf("short-%d-%d", p, published))
		}
		published++
		late := time.After(2 * time.Second)
		for seen := 0; seen < 2; {
			select {
			case m := <-handled:
				if string(m.Key) == key {
					seen++
				}
			case <-late:
				return seen == 1
			}
		}
		return false
	})
	close(release)
	g.untilEffects(2 + 2*published)
	if n := interrupted.Load(); n > 0 {
		t.Errorf("%d handlers were interrupted", n)
	}
}

func TestWrongOptionsNameTheFix(t *testing.T) {
	t.Parallel()
	db := stacktest.Client(t).Database("unused")
	_, err := consumer.New("g", db, consumer.WithTopics("t"), franz.Use(franz.WithInstanceID(""), nil), consumer.WithSessionTimeout(-1))
	for _, want := range []string{"WithSessionTimeout is -1ns: it must be positive", "no brokers: name them with WithBrokers"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}
