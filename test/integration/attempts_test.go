//go:build unix

package integration

import (
	"fmt"
	"testing"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// N17: with max_attempts 1, an envelope that the brokers reject once becomes a dead letter with this attempt,
// and its key continues.
func TestOneAttemptIsOne(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order"}, Set: map[string]any{"retry.max_attempts": 1}})
	s.CreateTopic("payment", 1, 1, kafka.ConfigEntry{ConfigName: "message.timestamp.before.max.ms", ConfigValue: "1"})
	topics := s.ReadTopics("order", "payment")
	const n = 60
	// Append the events long before the relay sends them, so that the brokers reject nearly all.
	for i := range n {
		s.AppendEvents(s.Outbox(), kit.NewEvent("payment", fmt.Sprintf("p%d", i%7), i, 20), kit.NewEvent("order", fmt.Sprintf("o%d", i%7), i, 20))
	}

	s.StartRelay().WaitTookOver()
	dead := s.State.Collection("letters")
	letters := int64(0)
	stacktest.Eventually(t, "each payment is dead or delivered", func() bool {
		letters, _ = dead.CountDocuments(t.Context(), bson.D{})
		return int(letters)+len(topics.AllRecords()) >= 2*n
	})

	if letters == 0 {
		t.Fatal("the brokers rejected no record")
	}

	one, err := dead.CountDocuments(t.Context(), bson.D{
		{Key: "class", Value: "attempts_exhausted"},
		{Key: "reason", Value: bson.D{{Key: "$regex", Value: "^the only attempt failed"}}},
		{Key: "attempts", Value: bson.D{{Key: "$size", Value: 1}}},
	})
	if err != nil || one != letters {
		doc, _ := dead.FindOne(t.Context(), bson.D{}).Raw()
		t.Log(doc)
		t.Errorf("%d of %d dead letters have one attempt, want all (%v)", one, letters, err)
	}

	s.WaitNoneHeld()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "o1", n, 20))
	topics.WaitDistinct(2*n - int(letters) + 1)
}
