//go:build unix

package integration

import (
	"maps"
	"slices"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/resume"
	"github.com/outrelay/outrelay/test/kit"
)

// N15: an owner dies after it has moved envelopes to the dead letters and before its position passes them. The
// stream repeats them to its successor, whose configuration would send them. They stay dead letters until an
// operator requeues them.
func TestN15_ASuccessorDoesNotSendDeadEvents(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Types: []string{"order", "payment"}})
	s.SetConfig("topics.allow", []string{s.TopicOf("order"), s.TopicOf("late")})
	topics := s.ReadTopics("order", "payment", "late")
	owner := s.StartCrashing("mid-waiting-write")
	owner.WaitTookOver()
	// The topic of the event is missing, so the resolved position waits for the event for some seconds. The owner dies when it stores the event.
	s.AppendEvents(s.Outbox(), kit.NewEvent("late", "l", 0, 20))
	const n = 20
	var events []event.Event
	var dead []string
	for i := range n {
		e := kit.NewEvent("payment", "p", i, 20)
		events = append(events, e, kit.NewEvent("order", "o", i, 20))
		dead = append(dead, e.ID().String())
	}
	s.AppendEvents(s.Outbox(), events...)
	for _, id := range dead {
		s.Ledger.MarkDead(s.DB.Name()+".outbox", id)
	}
	stored := s.State.Collection("letters")
	stacktest.Eventually(t, "all payments are dead", func() bool {
		count, err := stored.CountDocuments(t.Context(), bson.D{})
		return err == nil && count == n
	})
	if !owner.KilledByCrashPoint(kit.Patience) {
		t.Fatal("the owner has stored no waiting event")
	}
	position := outboxes.PosOf(resume.Position{Token: s.WatcherDocument().Lookup("token").Value})
	behind, err := stored.CountDocuments(t.Context(), bson.D{{Key: "pos", Value: bson.D{{Key: "$gt", Value: position}}}})
	if err != nil || behind != n {
		t.Fatalf("the stream repeats %d of %d dead events, %v", behind, n, err)
	}

	s.SetConfig("topics.allow", []string{})
	s.CreateTopic("late", 1, 1)
	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	s.WaitNoneHeld()

	if code, out, errOut := s.RunCommand("dead", "requeue", "--all", "--yes"); code != 0 {
		t.Fatalf("dead requeue: exit code %d\n%s%s", code, out, errOut)
	}
	topics.WaitDistinct(2*n + 1)
	topics.WaitForEnd()
	for id, of := range topics.Deliveries() {
		if slices.Contains(dead, id) != maps.Equal(of, map[string]int{"1": 1}) {
			t.Errorf("deliveries of %s: %v", id, of)
		}
	}
}
