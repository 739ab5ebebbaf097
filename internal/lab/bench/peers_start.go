package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// clusterTimeAfter returns a cluster time that is after all events so far.
func clusterTimeAfter(ctx context.Context, comparison *comparison) (bson.Timestamp, error) {
	at, err := mongodb.ClusterTime(ctx, comparison.client)
	at.I++
	return at, err
}

// outrelay is a relay process of a comparison.
type outrelayPublisher struct {
	*relay
	bench   *comparison
	setting setting
}

func startOutrelay(ctx context.Context, comparison *comparison, place place) (publisher, error) {
	setting := setting{
		watch: place.collection, topic: place.topic, state: comparison.newStateDB(place.collection), label: place.collection,
		start: time.Unix(int64(place.start.T), 0).UTC().Format(time.RFC3339),
	}
	relay, err := comparison.startRelay(setting)
	return &outrelayPublisher{relay, comparison, setting}, err
}

func (o *outrelayPublisher) kill() error { return o.Kill() }

func (o *outrelayPublisher) restart(ctx context.Context) (err error) {
	o.relay, err = o.bench.startRelay(o.setting)
	return err
}

// connectPublisher is a connector in Kafka Connect, in standalone mode. It shares no time with the coordination of a
// group of workers.
type connectPublisher struct{ *kafkaconnect.Worker }

func (c connectPublisher) pid() int            { return c.PID() }
func (c connectPublisher) checkRunning() error { return c.CheckRunning() }
func (c connectPublisher) kill() error         { return c.Kill() }

func (c connectPublisher) restart(context.Context) error { return c.LaunchWithConnector() }

// stopProcess kills the worker: it takes long to stop, and nothing of it is kept.
func (c connectPublisher) stopProcess() error {
	c.Close()
	return nil
}

// connectJVM are the options of Java in Kafka's own start script.
func connectJVM() []string {
	return strings.Fields("-Xms256M -Xmx2G -server -XX:+UseG1GC -XX:MaxGCPauseMillis=20 -XX:InitiatingHeapOccupancyPercent=35 " +
		"-XX:+ExplicitGCInvokesConcurrent -Djava.awt.headless=true")
}

// startConnector starts a worker that stores its offsets every ten seconds. The default is a minute. launch starts the
// process and its connector.
func (b *comparison) startConnector(ctx context.Context, place place, plugin string, config map[string]string, launch func(*kafkaconnect.Worker) error) (publisher, error) {
	jvm, err := b.trustStore(ctx, place.dir)
	if err != nil {
		return nil, err
	}

	worker := map[string]string{"offset.flush.interval.ms": strconv.FormatInt(offsetInterval.Milliseconds(), 10)}
	if b.login != nil {
		security, err := connectorSecurity(b.login.Kafka)
		if err != nil {
			return nil, err
		}
		maps.Copy(worker, security)
	}

	connector, err := kafkaconnect.Prepare(ctx, kafkaconnect.Options{
		Plugin: plugin, Name: "bench", Config: config, Brokers: b.Kafka, JVM: append(connectJVM(), jvm...), Worker: worker,
	})
	if err != nil {
		return nil, err
	}

	if err := launch(connector); err != nil {
		connector.Close()
		return nil, err
	}
	b.logProgress("Kafka Connect with %s is process %d", plugin, connector.PID())
	return connectPublisher{connector}, nil
}

// startDebezium starts Debezium at the position of the place.
func startDebezium(fast bool) func(context.Context, *comparison, place) (publisher, error) {
	return func(ctx context.Context, comparison *comparison, place place) (publisher, error) {
		prefix, _ := strings.CutSuffix(place.topic, "."+place.collection)
		config := map[string]string{
			"connector.class":           "io.debezium.connector.mongodb.MongoDbConnector",
			"mongodb.connection.string": comparison.connectorURI(),
			"topic.prefix":              comparison.db,
			"collection.include.list":   comparison.db + "." + place.collection,
			"snapshot.mode":             "no_data",
			"transforms":                "outbox",
			"transforms.outbox.type":    "io.debezium.connector.mongodb.transforms.outbox.MongoEventRouter",
			// The route is the type of the aggregate, which is the same for all events.
			"transforms.outbox.route.topic.regex":       ".*",
			"transforms.outbox.route.topic.replacement": prefix + "." + place.collection,
		}
		if fast {
			maps.Copy(config, map[string]string{"poll.interval.ms": "2", "producer.override.linger.ms": "0"})
		}

		// The connector is created stopped, so that it does not read before it has the position.
		return comparison.startConnector(ctx, place, kafkaconnect.Debezium, config, func(worker *kafkaconnect.Worker) error {
			err := worker.Launch()
			if err == nil {
				err = worker.CreateStopped(ctx)
			}
			if err == nil {
				err = worker.SetOffset(ctx, map[string]any{"server_id": comparison.db}, map[string]any{"sec": place.start.T, "ord": place.start.I, "resume_token": place.token})
			}
			if err == nil {
				err = worker.Resume(ctx)
			}
			return err
		})
	}
}

// startMongoKafka starts the MongoDB Kafka connector at the time of the place. It sends whole documents.
func startMongoKafka(fast bool) func(context.Context, *comparison, place) (publisher, error) {
	return func(ctx context.Context, comparison *comparison, place place) (publisher, error) {
		at, err := json.Marshal(map[string]any{"$timestamp": map[string]uint32{"t": place.start.T, "i": place.start.I}})
		if err != nil {
			return nil, fmt.Errorf("encoding the start: %w", err)
		}
		config := map[string]string{
			"connector.class":            "com.mongodb.kafka.connect.MongoSourceConnector",
			"connection.uri":             comparison.connectorURI(),
			"database":                   comparison.db,
			"collection":                 place.collection,
			"topic.prefix":               comparison.db,
			"publish.full.document.only": "true",
			"startup.mode":               "timestamp",
			"startup.mode.timestamp.start.at.operation.time": string(at),
		}
		if fast {
			config["producer.override.linger.ms"] = "0"
		}

		return comparison.startConnector(ctx, place, kafkaconnect.MongoKafka, config, (*kafkaconnect.Worker).LaunchWithConnector)
	}
}
