package admin_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	mapping "github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/routing"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/purge"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// mappedStand returns a stand whose documents have other field names, with documents 0 to 9 of two keys.
func mappedStand(t *testing.T, template string) *stand {
	t.Helper()
	s := newStand(t, stacktest.Client(t))
	m, problems := mapping.NewMapping(mapping.Names{
		AggregateType: "kind", AggregateID: "orderId", Key: "customer", Type: "name", Payload: "body", ExpiresAt: "until",
	}, false)
	if problems != nil {
		t.Fatal(problems)
	}

	router, err := routing.New(routing.Config{Template: template, Mapping: m})
	if err != nil {
		t.Fatal(err)
	}

	s.op.Mapping, s.op.Router = m, router
	s.r = s.op.Replays()
	for i := range 10 {
		s.append(bson.D{
			{Key: "_id", Value: fmt.Sprint("e", i)},
			{Key: "kind", Value: "order"},
			{Key: "orderId", Value: int32(i)},
			{Key: "customer", Value: int64(i % 2)},
			{Key: "name", Value: fmt.Sprintf("Name%d", i%2)},
			{Key: "body", Value: "x"},
			{Key: "tenant", Value: "acme"},
			{Key: "ts", Value: bson.Timestamp{}},
			{Key: "type", Value: "not the type"},
		})
	}

	return s
}

// A replay selects and routes documents with other field names, and stores their ordering key for the relay.
func TestReplayOfMappedDocuments(t *testing.T) {
	t.Parallel()
	for template, topic := range map[string]string{"{aggregatetype}s": "orders", "{field:tenant}.{aggregatetype}": "acme.order"} {
		t.Run(topic, func(t *testing.T) {
			t.Parallel()
			s := mappedStand(t, template)
			s.moveWatcher(t.Context())
			plan, err := s.r.Plan(t.Context(), admin.ReplayOrder{
				From: time.Now().Add(-time.Hour), Keys: []string{"1"}, Types: []string{"Name1"},
			})
			if err != nil || plan.Found != 5 || len(plan.Topics) != 1 || plan.Topics[0].Name != topic {
				t.Fatalf("plan %+v, %v", plan, err)
			}

			s.startWatcher(s.newRelayStep(100))
			info, err := s.r.Order(t.Context(), plan, admin.ReplayOrder{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.r.Run(t.Context(), info.ID, admin.ReplayRun{}); err != nil {
				t.Fatal(err)
			}
			if _, err := s.r.Run(t.Context(), info.ID, admin.ReplayRun{Wait: admin.WaitUntilSent}); err != nil {
				t.Fatal(err)
			}
			for _, e := range s.sent() {
				if e.Key != "1" || e.Envelope.Lookup("body").StringValue() != "x" {
					t.Errorf("stored %+v", e)
				}
			}
			if n := len(s.sent()); n != 5 {
				t.Errorf("%d envelopes were sent", n)
			}
		})
	}
}

// Operators see the parts of mapped documents under the names of the contract.
func TestMappedDocumentsAreShown(t *testing.T) {
	t.Parallel()
	s := mappedStand(t, "orders")
	s.moveWatcher(t.Context())
	found, err := s.op.Lookup(t.Context(), admin.LookupQuery{Key: "1"})
	if err != nil || len(found.Envelopes) != 5 {
		t.Fatalf("lookup found %d, %v", len(found.Envelopes), err)
	}
	e := found.Envelopes[0]
	if e.Type != "Name1" || e.AggregateType != "order" || e.Key != "1" {
		t.Errorf("lookup shows %+v", e)
	}

	due := bson.NewDateTimeFromTime(time.Now().Add(time.Hour))
	if _, err := s.box.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "e3"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "dueAt", Value: due}}}}); err != nil {
		t.Fatal(err)
	}
	page, err := s.op.Schedule().List(t.Context(), admin.ScheduledFilter{Type: "Name1"}, 10, "")
	if err != nil || len(page.Items) != 1 || page.Items[0].Type != "Name1" || page.Items[0].AggregateID != "3" {
		t.Errorf("scheduled %+v, %v", page, err)
	}

	e5 := waiting.Entry{Watcher: "orders", NS: s.ns(), Raw: s.findEnvelope("e5"), Key: "1", Pos: "82", Reason: waiting.Retry, Attempts: 2}
	admintest.StoreWaiting(t, s.state.Collection("waiting"), e5)
	waits, err := s.op.Waiting().List(t.Context(), admin.WaitingFilter{Key: "1", Failed: true}, 10, "")
	if err != nil || len(waits.Items) != 1 || waits.Items[0].Type != "Name1" || waits.Items[0].Key != "1" {
		t.Errorf("waiting %+v, %v", waits, err)
	}
	if _, err := s.box.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "e1"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "sentAt", Value: time.Now()}}}}); err != nil {
		t.Fatal(err)
	}
	history, err := purge.SentHistory(t.Context(), s.box, purge.HistoryQuery{Key: "1", Mapping: s.op.Mapping})
	if err != nil || len(history.Envelopes) != 1 || history.Envelopes[0].Type != "Name1" {
		t.Errorf("history %+v, %v", history, err)
	}
	if !slices.ContainsFunc(found.Envelopes, func(e admin.FoundEnvelope) bool { return e.ID == "e5" }) {
		t.Error("e5 is missing")
	}
}
