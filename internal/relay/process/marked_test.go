package process_test

import (
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
)

// TestTheMarkOfAnEventThatWaitedForOneTopicHasBothPlaces: the stream sent the event to the other topic, and did not mark it.
func TestTheMarkOfAnEventThatWaitedForOneTopicHasBothPlaces(t *testing.T) {
	t.Parallel()
	b := setup(t)
	late := "late-" + b.topic
	b.start("recording=mark", fansOut(b.topic, late))
	b.append(1, event.WithID("fanned"))
	b.consume(1)
	stacktest.Eventually(t, "the event is parked", func() bool { return b.countWaiting(bson.D{{Key: "reason", Value: "parked"}}) == 1 })
	stacktest.CreateTopic(t, late, 1)

	var found struct {
		SentAt bson.DateTime    `bson:"sentAt"`
		Sent   []outboxes.Place `bson:"sent"`
	}
	stacktest.Eventually(t, "the event is marked", func() bool {
		err := b.db.Collection("outbox").FindOne(t.Context(), bson.D{{Key: "_id", Value: "fanned"}}).Decode(&found)
		return err == nil && found.SentAt != 0
	})
	var topics []string
	for _, place := range found.Sent {
		topics = append(topics, place.Topic)
	}
	slices.Sort(topics)
	if want := []string{b.topic, late}; !slices.Equal(topics, want) {
		t.Errorf("the mark has the places %v, want %v", topics, want)
	}
}
