//go:build unix

package integration

import (
	"testing"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// The procedure of docs/operations.md for a message_too_large: raise the topic's max.message.bytes and requeue.
// The relay that has rejected the event keeps running.
func TestRaisedLimitOfATopicDeliversWithoutARestart(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Partitions: 1, Topic: []kafka.ConfigEntry{{ConfigName: "max.message.bytes", ConfigValue: "20000"}}})
	topics := s.ReadTopics()
	s.StartRelay().WaitTookOver()
	large := func(id string) event.Event {
		return event.New(event.Aggregate{Type: "order", ID: "k"}, "x", event.Bytes("", make([]byte, 100_000)), event.WithID(id))
	}
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "k", 0, 50), large("requeued"))
	stored := s.State.Collection("letters")
	var letter letters.Dead
	stacktest.Eventually(t, "the large event is dead", func() bool {
		return stored.FindOne(t.Context(), bson.D{{Key: "id", Value: "requeued"}}).Decode(&letter) == nil
	})
	if letter.Class != record.MessageTooLarge {
		t.Fatalf("dead letter %+v", letter)
	}

	s.SetTopicConfig("order", "max.message.bytes", "1000000")
	if code, out, errOut := s.RunCommand("dead", "requeue", "--all", "--yes"); code != 0 {
		t.Fatalf("dead requeue: exit code %d\n%s%s", code, out, errOut)
	}
	s.AppendEvents(s.Outbox(), large("appended"))
	topics.WaitDistinct(3)
	if n, err := stored.CountDocuments(t.Context(), bson.D{{Key: "id", Value: "appended"}}); err != nil || n != 0 {
		t.Errorf("%d dead letters (%v)", n, err)
	}
}
