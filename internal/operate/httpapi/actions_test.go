package httpapi

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
)

// An action that takes longer than its request waits goes on, and shows its progress and then its result to its actor.
func TestALongActionGoesOnAfterItsRequest(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	ann, bob := []string{"Authorization", basicLogin("ann", operatorToken)}, []string{"Authorization", basicLogin("bob", operatorToken)}
	due := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	var ids []event.ID
	for range 3 {
		scheduled := event.New(event.Aggregate{Type: "order", ID: "1"}, "PaymentDue", event.Payload{}, event.WithDueAt(due))
		if _, err := s.outbox.InsertOne(t.Context(), scheduled); err != nil {
			t.Fatal(err)
		}
		ids = append(ids, scheduled.ID())
	}

	// A quick action and a wrong request have their response at once, also with this preference.
	async := append([]string{"Prefer", "respond-async"}, ann...)
	s.call("POST", "/api/v1/scheduled/reschedule", `{"filter":{},"to":"2031-01-01T00:00:00Z"}`, async...).requireProblem(t, 422)
	var moved rescheduled
	s.mustCall(&moved, "POST", "/api/v1/scheduled/reschedule", `{"filter":{"type":"PaymentDue"},"to":"2031-01-01T00:00:00Z","dry_run":true}`, async...)
	if moved.Matched != 3 || moved.Moved != 0 {
		t.Errorf("dry run: %+v", moved)
	}
	s.call("POST", "/api/v1/scheduled/reschedule", `{"filter":{"type":"PaymentDue"},"to":"2031-01-01T00:00:00Z","expect":2}`, ann...).requireProblem(t, 409)
	s.mustCall(&moved, "POST", "/api/v1/scheduled/reschedule", `{"filter":{"type":"PaymentDue"},"to":"2031-01-01T00:00:00Z","expect":3}`, ann...)
	if moved.Matched != 3 || moved.Moved != 3 {
		t.Errorf("%+v", moved)
	}

	// The cancellation waits for a transaction that has changed one of the events.
	session, err := s.outbox.Database().Client().StartSession()
	if err == nil {
		err = session.StartTransaction()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer session.EndSession(t.Context())
	inside := mongo.NewSessionContext(t.Context(), session)
	if _, err := s.outbox.UpdateOne(inside, bson.D{{Key: "_id", Value: ids[1]}}, bson.D{{Key: "$set", Value: bson.D{{Key: "note", Value: "x"}}}}); err != nil {
		t.Fatal(err)
	}
	started := s.call("POST", "/api/v1/scheduled/cancel", `{"filter":{"type":"PaymentDue"}}`, async...)
	at := started.header.Get("Location")
	if started.status != http.StatusAccepted || !strings.HasPrefix(at, "/api/v1/actions/") {
		t.Fatalf("got %d to %q: %s", started.status, at, started.body)
	}

	var action Action
	s.mustCall(&action, "GET", at, "", ann...)
	if !action.Running || action.Operation != "cancel-scheduled" || action.Total != 3 || action.Result != nil {
		t.Errorf("the running action: %+v", action)
	}
	s.call("GET", at, "", bob...).requireProblem(t, 404)
	if err := session.CommitTransaction(t.Context()); err != nil {
		t.Fatal(err)
	}
	stacktest.Eventually(t, "the action ends", func() bool {
		s.mustCall(&action, "GET", at, "", ann...)
		return !action.Running
	}, func() any { return action })
	result, _ := action.Result.(map[string]any)
	if result["cancelled"] != 3.0 || action.Done != 3 || action.Problem != nil {
		t.Errorf("the result: %+v", action)
	}
}

// The part of an action that was done before it failed stays done, so the problem states how much that is.
func TestAnActionThatFailsHalfwayStatesWhatItDid(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	due := time.Now().Add(time.Hour)
	for i, id := range []string{"a1", "a2"} {
		doc := bson.D{
			{Key: "_id", Value: id},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "7"},
			{Key: "type", Value: "Due"},
			{Key: "dueAt", Value: due.Add(time.Duration(i) * time.Second)},
		}
		if _, err := s.outbox.InsertOne(t.Context(), doc); err != nil {
			t.Fatal(err)
		}
	}
	// The collection accepts no change of the second event.
	validator := bson.D{{Key: "_id", Value: bson.D{{Key: "$ne", Value: "a2"}}}}
	if err := s.outbox.Database().RunCommand(t.Context(), bson.D{{Key: "collMod", Value: s.outbox.Name()}, {Key: "validator", Value: validator}}).Err(); err != nil {
		t.Fatal(err)
	}

	body := `{"filter":{"ids":["a1","a2"]},"to":"` + due.Add(24*time.Hour).UTC().Format(time.RFC3339) + `"}`
	if problem := s.call("POST", "/api/v1/scheduled/reschedule", body).requireProblem(t, 503); problem.Done != 1 {
		t.Errorf("%+v, want 1 event done", problem)
	}
}
