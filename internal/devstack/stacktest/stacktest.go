// Package stacktest gives tests a database and topics of their own on real servers.
package stacktest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// MongoURI is the address of a replica set of one member with test commands enabled.
func MongoURI(tb testing.TB) string {
	tb.Helper()
	if uri := os.Getenv("OUTRELAY_TEST_MONGODB_URI"); uri != "" {
		return uri
	}
	tb.Fatal("OUTRELAY_TEST_MONGODB_URI is not set")
	return ""
}

// Client connects to MongoURI and disconnects when the test ends.
func Client(tb testing.TB, opts ...*options.ClientOptions) *mongo.Client {
	tb.Helper()
	c, err := mongo.Connect(append([]*options.ClientOptions{options.Client().ApplyURI(MongoURI(tb)).SetHeartbeatInterval(500 * time.Millisecond)}, opts...)...)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = c.Disconnect(context.WithoutCancel(tb.Context())) })
	return c
}

// Name is a short unique name for a database, a topic or a watcher.
func Name(tb testing.TB) string {
	tb.Helper()
	n := strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, tb.Name())
	return fmt.Sprintf("%.24s_%08x", n, rand.Uint32())
}

// Database is a database of the test's own, dropped when it ends.
func Database(tb testing.TB, c *mongo.Client) *mongo.Database {
	tb.Helper()
	db := c.Database(Name(tb))
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_ = db.Drop(ctx)
	})
	return db
}

// Brokers are the addresses of a Kafka cluster of one broker.
func Brokers(tb testing.TB) []string {
	tb.Helper()
	if b := os.Getenv("OUTRELAY_TEST_KAFKA"); b != "" {
		return strings.Split(b, ",")
	}
	tb.Fatal("OUTRELAY_TEST_KAFKA is not set")
	return nil
}

// Topic creates a topic of the test's own with that many partitions and deletes it when the test ends.
func Topic(tb testing.TB, partitions int) string {
	tb.Helper()
	name := Name(tb)
	CreateTopic(tb, name, partitions)
	return name
}

// CreateTopic creates a topic by name.
func CreateTopic(tb testing.TB, name string, partitions int, configs ...kafka.ConfigEntry) {
	tb.Helper()
	tr := &kafka.Transport{}
	cl := &kafka.Client{Addr: kafka.TCP(Brokers(tb)...), Transport: tr, Timeout: 10 * time.Second}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	res, err := cl.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{Topic: name, NumPartitions: partitions, ReplicationFactor: 1, ConfigEntries: configs}}})
	if err == nil {
		err = res.Errors[name]
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		_, _ = cl.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{name}})
		tr.CloseIdleConnections()
	})
}
