package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/kafkaconnect"
	"github.com/outrelay/outrelay/internal/mongodb"
)

// clusterTimeAfter returns a cluster time that is after all events so far.
func clusterTimeAfter(ctx context.Context, b *comparison) (bson.Timestamp, error) {
	at, err := mongodb.ClusterTime(ctx, b.client)
	at.I++
	return at, err
}

// outrelay is a relay process of a comparison.
type outrelayPublisher struct {
	*relay
	bench   *comparison
	setting setting
}

func startOutrelay(ctx context.Context, b *comparison, p place) (publisher, error) {
	s := setting{
		watch: p.collection, topic: p.topic, state: b.newStateDB(p.collection), label: p.collection,
		start: time.Unix(int64(p.start.T), 0).UTC().Format(time.RFC3339),
	}
	r, err := b.startRelay(s)
	return &outrelayPublisher{r, b, s}, err
}

func (o *outrelayPublisher) kill() error {
	o.relay.kill()
	<-o.done
	_ = o.in.Close()
	return nil
}

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
func (b *comparison) startConnector(ctx context.Context, p place, plugin string, config map[string]string, launch func(*kafkaconnect.Worker) error) (publisher, error) {
	jvm, err := b.trustStore(ctx, p.dir)
	if err != nil {
		return nil, err
	}

	worker := map[string]string{"offset.flush.interval.ms": "10000"}
	if b.login != nil {
		security, err := connectorSecurity(b.login.Kafka)
		if err != nil {
			return nil, err
		}
		maps.Copy(worker, security)
	}

	w, err := kafkaconnect.Prepare(ctx, kafkaconnect.Options{
		Plugin: plugin, Name: "bench", Config: config, Brokers: b.Kafka, JVM: append(connectJVM(), jvm...), Worker: worker,
	})
	if err != nil {
		return nil, err
	}

	if err := launch(w); err != nil {
		w.Close()
		return nil, err
	}
	b.logProgress("Kafka Connect with %s is process %d", plugin, w.PID())
	return connectPublisher{w}, nil
}

// startDebezium starts Debezium at the position of the place.
func startDebezium(fast bool) func(context.Context, *comparison, place) (publisher, error) {
	return func(ctx context.Context, b *comparison, p place) (publisher, error) {
		prefix, _ := strings.CutSuffix(p.topic, "."+p.collection)
		config := map[string]string{
			"connector.class":           "io.debezium.connector.mongodb.MongoDbConnector",
			"mongodb.connection.string": b.connectorURI(),
			"topic.prefix":              b.db,
			"collection.include.list":   b.db + "." + p.collection,
			"snapshot.mode":             "no_data",
			"transforms":                "outbox",
			"transforms.outbox.type":    "io.debezium.connector.mongodb.transforms.outbox.MongoEventRouter",
			// The route is the type of the aggregate, which is the same for all events.
			"transforms.outbox.route.topic.regex":       ".*",
			"transforms.outbox.route.topic.replacement": prefix + "." + p.collection,
		}
		if fast {
			maps.Copy(config, map[string]string{"poll.interval.ms": "2", "producer.override.linger.ms": "0"})
		}

		// The connector is created stopped, so that it does not read before it has the position.
		return b.startConnector(ctx, p, kafkaconnect.Debezium, config, func(w *kafkaconnect.Worker) error {
			err := w.Launch()
			if err == nil {
				err = w.Create(ctx, true)
			}
			if err == nil {
				err = w.SetOffset(ctx, map[string]any{"server_id": b.db}, map[string]any{"sec": p.start.T, "ord": p.start.I, "resume_token": p.token})
			}
			if err == nil {
				err = w.Resume(ctx)
			}
			return err
		})
	}
}

// startMongoKafka starts the MongoDB Kafka connector at the time of the place. It sends whole documents.
func startMongoKafka(fast bool) func(context.Context, *comparison, place) (publisher, error) {
	return func(ctx context.Context, b *comparison, p place) (publisher, error) {
		at, err := json.Marshal(map[string]any{"$timestamp": map[string]uint32{"t": p.start.T, "i": p.start.I}})
		if err != nil {
			return nil, fmt.Errorf("encoding the start: %w", err)
		}
		config := map[string]string{
			"connector.class":            "com.mongodb.kafka.connect.MongoSourceConnector",
			"connection.uri":             b.connectorURI(),
			"database":                   b.db,
			"collection":                 p.collection,
			"topic.prefix":               b.db,
			"publish.full.document.only": "true",
			"startup.mode":               "timestamp",
			"startup.mode.timestamp.start.at.operation.time": string(at),
		}
		if fast {
			config["producer.override.linger.ms"] = "0"
		}

		return b.startConnector(ctx, p, kafkaconnect.MongoKafka, config, (*kafkaconnect.Worker).LaunchWithConnector)
	}
}
