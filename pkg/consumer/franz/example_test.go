package franz_test

import (
	"log"
	"os"

	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/pkg/consumer"
	"github.com/outrelay/outrelay/pkg/consumer/franz"
)

// Each pod of a StatefulSet is a static member: a rolling update causes no rebalance.
func ExampleUse() {
	var db *mongo.Database // of the service
	c, err := consumer.New("shipping", db,
		consumer.WithBrokers("kafka:9092"), consumer.WithTopics("outbox.event.order"),
		franz.Use(franz.WithInstanceID(os.Getenv("POD_NAME"))))
	if err != nil {
		log.Fatal(err)
	}
	log.Println(c.Status().Ready)
}
