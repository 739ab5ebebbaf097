package telemetry_test

import (
	"log"
	"net/http"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/pkg/telemetry"
)

// Spans and metrics go to OpenTelemetry, and a page serves the same metrics to Prometheus.
func Example() {
	var db *mongo.Database
	page := telemetry.NewPrometheus()
	sink := telemetry.Join(telemetry.OTel(), page)
	http.Handle("/metrics", page)

	if _, err := outbox.New(db, outbox.WithTelemetry(sink)); err != nil {
		log.Fatal(err)
	}
	if _, err := consumer.New("shipping", db, consumer.WithTopics("outbox.event.order"), consumer.WithTelemetry(sink)); err != nil {
		log.Fatal(err)
	}
}

// slowHandlers is a Sink of a service. It embeds Discard, so that later versions can add methods.
type slowHandlers struct{ telemetry.Discard }

func (slowHandlers) Measure(m telemetry.Measurement) {
	if m.Metric == telemetry.Handled && m.Took.Seconds() > 1 {
		log.Printf("handler %s of group %s took %v", m.Handler, m.Group, m.Took)
	}
}

// A service may have its own system of metrics.
func ExampleSink() {
	var db *mongo.Database
	if _, err := consumer.New("shipping", db, consumer.WithTopics("outbox.event.order"), consumer.WithTelemetry(slowHandlers{})); err != nil {
		log.Fatal(err)
	}
}
