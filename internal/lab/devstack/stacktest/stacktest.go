// Package stacktest gives each test a separate database and separate topics on real servers. It uses the servers
// named by OUTRELAY_TEST_MONGODB_URI and OUTRELAY_TEST_KAFKA, or one stack that all test processes of this machine
// share: a broker and two replica sets. The first process starts the stack, which takes about 2 s, or longer if the
// servers must be fetched. The stack ends 20 s after the last process that used it. If no servers are available, tests fail; they never skip. A
// test that breaks servers starts its own with [Own].
package stacktest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// MongoURI returns the address of a replica set of one member with test commands enabled. It is the same for all tests of a process.
func MongoURI(tb testing.TB) string {
	tb.Helper()
	if uri := os.Getenv(devstack.EnvMongoDB); uri != "" {
		return uri
	}
	at := shared(tb)
	return at.MongoURIs[sharedSet]
}

// Client connects to MongoURI and disconnects when the test ends.
func Client(tb testing.TB, opts ...*options.ClientOptions) *mongo.Client {
	tb.Helper()
	base := options.Client().ApplyURI(MongoURI(tb)).SetHeartbeatInterval(500 * time.Millisecond)
	client, err := mongo.Connect(append([]*options.ClientOptions{base}, opts...)...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = client.Disconnect(context.WithoutCancel(tb.Context())) })
	return client
}

// Name returns a short unique name for a database, a topic or a watcher.
func Name(tb testing.TB) string {
	tb.Helper()
	n := strings.Map(func(char rune) rune {
		if char >= 'a' && char <= 'z' || char >= 'A' && char <= 'Z' || char >= '0' && char <= '9' {
			return char
		}
		return '_'
	}, tb.Name())
	return fmt.Sprintf("%.24s_%08x", n, rand.Uint32())
}

// Database returns a new database for the test, and drops it when the test ends.
func Database(tb testing.TB, client *mongo.Client) *mongo.Database {
	tb.Helper()
	db := client.Database(Name(tb))
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = db.Drop(ctx)
	})
	return db
}

// Brokers returns the address of a Kafka cluster of one broker.
func Brokers(tb testing.TB) []string {
	tb.Helper()
	if brokers := os.Getenv(devstack.EnvKafka); brokers != "" {
		return strings.Split(brokers, ",")
	}
	return shared(tb).Brokers
}

// Topic creates a new topic for the test, and deletes it when the test ends.
func Topic(tb testing.TB, partitions int) string {
	tb.Helper()
	name := Name(tb)
	CreateTopic(tb, name, partitions)
	return name
}

// Topics are the topics of one test, whose names begin with Prefix.
type Topics struct {
	Prefix string

	tb testing.TB
	cl *kafka.Client
}

// NewTopics returns topics with a unique prefix. When the test ends, it deletes all topics with this prefix.
func NewTopics(tb testing.TB) *Topics {
	tb.Helper()
	tr := &kafka.Transport{}
	cl := &kafka.Client{Addr: kafka.TCP(Brokers(tb)...), Transport: tr, Timeout: 10 * time.Second}
	topics := &Topics{Prefix: Name(tb) + ".", tb: tb, cl: cl}
	tb.Cleanup(func() {
		defer tr.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		known, err := cl.Metadata(ctx, &kafka.MetadataRequest{})
		if err != nil {
			return
		}

		var names []string
		for _, topic := range known.Topics {
			if strings.HasPrefix(topic.Name, topics.Prefix) {
				names = append(names, topic.Name)
			}
		}
		_, _ = cl.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: names})
	})
	return topics
}

// Create creates the topic Prefix + name, unless it exists, and returns its name.
func (t *Topics) Create(name string, partitions int) string {
	t.tb.Helper()
	name = t.Prefix + name
	createTopic(t.tb, t.cl, kafka.TopicConfig{Topic: name, NumPartitions: partitions, ReplicationFactor: 1})
	return name
}

// CreateTopic creates a topic by name.
func CreateTopic(tb testing.TB, name string, partitions int, configs ...kafka.ConfigEntry) {
	tb.Helper()
	CreateTopicOn(tb, Brokers(tb), name, partitions, 1, configs...)
}

// createTopic creates a topic and blocks until its leaders respond. On a loaded machine a controller may
// consider a live broker dead, and a response may be so late that the client retries and finds its own topic.
func createTopic(tb testing.TB, cl *kafka.Client, topic kafka.TopicConfig) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 90*time.Second)
	defer cancel()

	again := time.NewTicker(250 * time.Millisecond)
	defer again.Stop()
	for {
		res, err := cl.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{topic}})
		if err == nil {
			err = res.Errors[topic.Topic]
		}
		if err == nil || errors.Is(err, kafka.TopicAlreadyExists) {
			break
		}

		var code kafka.Error
		// Other errors mean that there was no response, or not in time.
		if errors.As(err, &code) && !code.Temporary() && code != kafka.BrokerNotAvailable {
			tb.Fatalf("creating topic %s: %v", topic.Topic, err)
		}

		select {
		case <-again.C:
		case <-ctx.Done():
			tb.Fatalf("creating topic %s: %v", topic.Topic, err)
		}
	}

	if n := len(topic.ReplicaAssignments); n > 0 {
		topic.NumPartitions = n
	}
	// A leader may learn of its partition later than the metadata show it.
	for {
		err := checkLeaders(ctx, cl, topic)
		if err == nil {
			return
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			tb.Fatalf("topic %s was created, but its leaders do not respond: %v", topic.Topic, err)
		}
	}
}

// checkLeaders returns nil if the leader of each partition responds to a request.
func checkLeaders(ctx context.Context, cl *kafka.Client, topic kafka.TopicConfig) error {
	var ask []kafka.OffsetRequest
	for p := range topic.NumPartitions {
		ask = append(ask, kafka.FirstOffsetOf(p))
	}

	res, err := cl.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{topic.Topic: ask}})
	if err != nil {
		return err
	}

	for _, p := range res.Topics[topic.Topic] {
		err = errors.Join(err, p.Error)
	}
	if n := len(res.Topics[topic.Topic]); err == nil && n != topic.NumPartitions {
		return fmt.Errorf("%d of %d partitions", n, topic.NumPartitions)
	}
	return err
}

// CreateTopicOn creates a topic with the given number of replicas of each partition on the brokers, and
// deletes it when the test ends.
func CreateTopicOn(tb testing.TB, brokers []string, name string, partitions, replicas int, configs ...kafka.ConfigEntry) {
	tb.Helper()
	createForTest(tb, brokers, kafka.TopicConfig{
		Topic: name, NumPartitions: partitions, ReplicationFactor: replicas, ConfigEntries: configs,
	})
}

// CreateAssignedTopic is CreateTopicOn with the ids of the brokers that have a replica of each partition.
func CreateAssignedTopic(tb testing.TB, brokers []string, name string, assigned [][]int, configs ...kafka.ConfigEntry) {
	tb.Helper()
	// Kafka creates a topic only with the same number of replicas for all partitions, so the others are added later.
	topic := kafka.TopicConfig{Topic: name, NumPartitions: -1, ReplicationFactor: -1, ConfigEntries: configs}
	more := &kafka.AlterPartitionReassignmentsRequest{Topic: name, Timeout: 30 * time.Second}
	for p, ids := range assigned {
		topic.ReplicaAssignments = append(topic.ReplicaAssignments, kafka.ReplicaAssignment{Partition: p, Replicas: ids[:1]})
		if len(ids) > 1 {
			part := kafka.AlterPartitionReassignmentsRequestAssignment{PartitionID: p, BrokerIDs: ids}
			more.Assignments = append(more.Assignments, part)
		}
	}

	cl := createForTest(tb, brokers, topic)
	res, err := cl.AlterPartitionReassignments(tb.Context(), more)
	if err == nil {
		err = res.Error
	}
	if err != nil {
		tb.Fatalf("assigning the partitions of %s: %v", name, err)
	}
	Eventually(tb, "all replicas are in sync", func() bool {
		known, err := cl.Metadata(tb.Context(), &kafka.MetadataRequest{Topics: []string{name}})
		return err == nil && len(known.Topics) == 1 && !slices.ContainsFunc(known.Topics[0].Partitions, func(partition kafka.Partition) bool {
			return len(partition.Isr) != len(assigned[partition.ID])
		})
	})
}

// createForTest creates a topic, and deletes it when the test ends. It returns the client.
func createForTest(tb testing.TB, brokers []string, topic kafka.TopicConfig) *kafka.Client {
	tb.Helper()
	tr := &kafka.Transport{}
	cl := &kafka.Client{Addr: kafka.TCP(brokers...), Transport: tr, Timeout: 10 * time.Second}
	createTopic(tb, cl, topic)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = cl.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic.Topic}})
		tr.CloseIdleConnections()
	})
	return cl
}
