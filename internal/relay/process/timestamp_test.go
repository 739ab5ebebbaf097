package process_test

import (
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// A mapped timestamp that Kafka cannot store makes its event a dead letter, and the partition goes on. A broker that compresses the
// records itself reports a negative one as an unknown error.
func TestATimestampThatKafkaRejectsStopsNoPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	read := *b
	read.topic = "gzip-" + b.topic
	stacktest.CreateTopic(t, read.topic, 1,
		kafka.ConfigEntry{ConfigName: "compression.type", ConfigValue: "gzip"},
		kafka.ConfigEntry{ConfigName: "message.timestamp.after.max.ms", ConfigValue: "3600000"})
	for _, created := range []time.Time{time.UnixMilli(-1), time.Now().AddDate(10, 0, 0), time.UnixMilli(-1000), time.Now()} {
		doc := bson.D{
			{Key: "ts", Value: bson.Timestamp{}},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "1"},
			{Key: "type", Value: "Created"},
			{Key: "payload", Value: "x"},
			{Key: "created", Value: created},
		}
		if _, err := b.db.Collection("outbox").InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
	}

	b.start("retry.max_attempts=2", "mapping={timestamp: created}", "topics.rules=[{match: {aggregatetype: order}, to: ["+read.topic+"]}]")
	read.consume(1)
	stacktest.Eventually(t, "the others are dead letters", func() bool { return b.countLetters(bson.D{}) == 3 })
}
