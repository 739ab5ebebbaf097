package admin_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// causedBy returns an envelope of the conversation "first", written so many seconds ago.
func causedBy(id, cause string, age uint32) bson.D {
	return append(letterOf(id, planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()) - age, I: 1}},
		bson.E{Key: "headers", Value: bson.A{
			bson.D{{Key: "k", Value: "correlation-id"}, {Key: "v", Value: []byte("first")}},
			bson.D{{Key: "k", Value: "causation-id"}, {Key: "v", Value: []byte(cause)}},
		}})
}

func TestAConversationIsATreeOfAllStores(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	mustInsert(t, f.a, append(letterOf("first", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()) - 100, I: 1}}))
	mustInsert(t, f.a, causedBy("late child", "first", 50))
	mustInsert(t, f.b, causedBy("early child", "first", 90))
	// Another producer stores headers as a document.
	mustInsert(t, f.b, append(letterOf("grandchild", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()) - 60, I: 2}},
		bson.E{Key: "headers", Value: bson.D{{Key: "correlation-id", Value: "first"}, {Key: "causation-id", Value: "early child"}}}))
	// Their services have removed them from the outbox.
	admintest.StoreWaiting(t, f.state.Collection("waiting"),
		admintest.Waits(t, mongodb.Namespace(f.a), causedBy("waits", "late child", 40), waiting.Parked, "orders"))
	f.moveToDead(f.a, record.RecordRejected, causedBy("dead", "late child", 30))
	mustInsert(t, f.a, causedBy("orphan", "gone", 20))
	// Events that name each other must not make a loop.
	mustInsert(t, f.a, causedBy("egg", "hen", 15))
	mustInsert(t, f.a, causedBy("hen", "egg", 10))
	mustInsert(t, f.a, append(letterOf("stranger", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()) - 30, I: 1}},
		bson.E{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: "correlation-id"}, {Key: "v", Value: []byte("other")}}}}))
	f.giveUp(f.a, deadletter.DefaultCollection, "h", "grandchild")
	// The position of the watcher is before these, and Kafka has them.
	markHandled(t, f.a.Database(), f.b, "billing/h1", "early child", 9, time.Now())
	f.storeReport("orders/0of1", activity.Report{At: time.Now(), Events: []activity.Event{
		{ID: "late child", Key: "7", Collection: mongodb.Namespace(f.a), CorrelationID: "first", Topic: "orders", AckedAt: time.Now()},
	}})

	got, err := f.op.Conversation(t.Context(), admin.ConversationQuery{ID: "first"})
	if err != nil || strings.Contains(fmt.Sprintf("%+v", got), planted) || got.More {
		t.Fatalf("%+v, %v", got, err)
	}
	var tree []string
	for _, e := range got.Events {
		line := strings.Repeat(".", e.Depth) + e.ID + " " + e.State
		for _, l := range e.Handlers {
			line += " " + l.Source.Handler
		}
		tree = append(tree, line)
	}
	want := "first appended|.early child delivered|..grandchild delivered h|.late child delivered|..waits waiting|..dead dead|orphan appended|egg appended|.hen appended"
	if text := strings.Join(tree, "|"); text != want {
		t.Errorf("tree:\n%s\nwant:\n%s", text, want)
	}

	for name, c := range map[string]struct {
		query admin.ConversationQuery
		want  int
	}{
		"one outbox":    {admin.ConversationQuery{ID: "first", Collection: mongodb.Namespace(f.b)}, 2},
		"a window":      {admin.ConversationQuery{ID: "first", From: time.Now().Add(-70 * time.Second), To: time.Now().Add(-45 * time.Second)}, 5},
		"another one":   {admin.ConversationQuery{ID: "other"}, 1},
		"nothing known": {admin.ConversationQuery{ID: "nothing"}, 0},
	} {
		if got, err := f.op.Conversation(t.Context(), c.query); err != nil || len(got.Events) != c.want {
			t.Errorf("%s: %+v, %v; want %d", name, got, err, c.want)
		}
	}
	if got, err := f.op.Conversation(t.Context(), admin.ConversationQuery{ID: "first", Limit: 1}); err != nil || !got.More {
		t.Errorf("with a limit: %+v, %v", got, err)
	}
	if _, err := f.op.Conversation(t.Context(), admin.ConversationQuery{}); err == nil {
		t.Error("an empty id was accepted")
	}
}

// A scheduled event leaves its outbox when it is sent. The recent deliveries keep its conversation and its aggregate.
func TestASentScheduledEventStaysInItsConversation(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	ns, due := mongodb.Namespace(f.a), time.Now().Add(-time.Minute)
	mustInsert(t, f.a, append(letterOf("first", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(due.Unix()) - 100, I: 1}}))
	f.storeReport("orders/0of1", activity.Report{At: time.Now(), Events: []activity.Event{
		{ID: "due", Type: "LoanDue", Key: "7", Collection: ns, AggregateType: "loan", AggregateID: "7", CorrelationID: "first", CausationID: "first", Topic: "loan", Offset: 5, AckedAt: due},
		{ID: "alone", Type: "LoanDue", Key: "8", Collection: ns, Topic: "loan", Offset: 6, AckedAt: due},
		{ID: "other", Type: "LoanDue", Key: "9", Collection: ns, CorrelationID: "another", Topic: "loan", Offset: 7, AckedAt: due},
	}})

	for id, want := range map[string]string{"due": "first loan 7", "alone": "alone  "} {
		got, err := f.op.Lookup(t.Context(), admin.LookupQuery{ID: id})
		if err != nil || len(got.Envelopes) != 1 {
			t.Fatalf("%s: %+v, %v", id, got, err)
		}
		if e := got.Envelopes[0]; e.ConversationID()+" "+e.AggregateType+" "+e.AggregateID != want {
			t.Errorf("%s: conversation %s, aggregate %s %s; want %s", id, e.ConversationID(), e.AggregateType, e.AggregateID, want)
		}
	}

	got, err := f.op.Conversation(t.Context(), admin.ConversationQuery{ID: "first"})
	if err != nil || len(got.Events) != 2 || !strings.Contains(got.Limits, "recent deliveries") {
		t.Fatalf("%+v, %v; want both events and the limit of the search", got, err)
	}
	if e := got.Events[1]; e.ID != "due" || e.Depth != 1 || e.State != "delivered" || e.AggregateType != "loan" || e.CausationID != "first" {
		t.Errorf("%+v", e)
	}
	if got, err := f.op.Conversation(t.Context(), admin.ConversationQuery{ID: "alone", Collection: "other.outbox"}); err == nil && len(got.Events) > 0 {
		t.Errorf("an event of another outbox: %+v", got)
	}
}

// A watcher without any outbox has no conversation.
func TestAConversationOfAnUnknownWatcherIsEmpty(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	got, err := f.op.ForWatcher("other").Conversation(t.Context(), admin.ConversationQuery{ID: "first"})
	if err != nil || len(got.Events) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
}
