package admin_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/internal/service/inbox/mongostore"
	"github.com/outrelay/outrelay/internal/service/sagas"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// findLogged returns the entries of one kind. It checks that all entries are by ann and contain no payload.
func (f *office) findLogged(kind nodes.Kind) []nodes.AuditEntry {
	f.t.Helper()
	return slices.DeleteFunc(f.readLog(), func(e nodes.AuditEntry) bool { return e.Kind != kind })
}

func TestNodesAreJoinedWithTheirSlots(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	coll := f.state.Collection("nodes")
	for _, n := range []string{"n1", "n2"} {
		if _, err := nodes.NewNodes(coll).Heartbeat(t.Context(), nodes.Sign{Node: n, SinceAck: -1}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := coll.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "n2"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "seenAt", Value: time.Now().Add(-time.Hour)}}}}); err != nil {
		t.Fatal(err)
	}

	list, err := k.Nodes().List(t.Context())
	if err != nil || len(list) != 2 || list[0].Node != "n1" || list[0].Phase != "owner" || list[0].Stale || list[1].Phase != "standby" || !list[1].Stale {
		t.Fatalf("%+v, %v", list, err)
	}
	if err := k.Nodes().Remove(t.Context(), "n1", admin.IfStopped); !errors.Is(err, admin.ErrNodeAlive) {
		t.Errorf("%v", err)
	}
	if err := k.Nodes().Remove(t.Context(), "nobody", admin.IfStopped); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("%v", err)
	}
	if err := k.Nodes().Remove(t.Context(), "n2", admin.IfStopped); err != nil {
		t.Error(err)
	}

	slots, err := k.Nodes().Release(t.Context(), "n1", time.Minute)
	if err != nil || !slices.Equal(slots, []string{"orders/" + "0of1"}) {
		t.Errorf("%v, %v", slots, err)
	}

	waitYield(t, f.owner)
	if len(f.findLogged("node_removed")) != 1 || len(f.findLogged("node_released")) != 1 {
		t.Error("the audit log has no entry of this action")
	}
	if slots, err = k.Nodes().Release(t.Context(), "n7", time.Minute); !errors.Is(err, mongodb.ErrNotFound) || len(slots) != 0 {
		t.Errorf("%v, %v", slots, err)
	}
}

func TestTheEventsLogIsReadByPagesAndTrimmed(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	at := time.Now().Add(-time.Minute).Truncate(time.Millisecond)
	var docs []any
	// Some entries have the same time.
	for i := range 25 {
		docs = append(docs, bson.D{{Key: "at", Value: at.Add(time.Duration(i/4) * time.Second)}, {Key: "kind", Value: []string{"took_over", "paused"}[i%2]}, {Key: "watcher", Value: "orders"}, {Key: "node", Value: fmt.Sprint("n", i%3)}, {Key: "fields", Value: bson.D{{Key: "actor", Value: "ann"}, {Key: "i", Value: i}}}})
	}

	if _, err := f.state.Collection("audit").InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}

	seen, after := map[string]bool{}, ""
	for pages := 0; ; pages++ {
		p, err := k.Audit(t.Context(), admin.AuditFilter{Watcher: "orders"}, 7, after)
		if err != nil || p.Total != 25 || pages > 4 {
			t.Fatalf("%+v, %v", p, err)
		}
		for _, e := range p.Items {
			if seen[e.ID] || e.Actor != "ann" {
				t.Errorf("%+v", e)
			}
			seen[e.ID] = true
		}
		if after = p.Next; after == "" {
			break
		}
	}
	if len(seen) != 25 {
		t.Errorf("%d of 25", len(seen))
	}

	p, err := k.Audit(t.Context(), admin.AuditFilter{Kinds: []string{"paused"}, Node: "n1", Actor: "ann", From: at, To: at.Add(time.Hour)}, 0, "")
	if err != nil || len(p.Items) != 4 {
		t.Errorf("%d, %v", len(p.Items), err)
	}
	if _, err := k.Audit(t.Context(), admin.AuditFilter{}, 0, "bad"); !errors.Is(err, listing.ErrCursor) {
		t.Errorf("%v", err)
	}

	for keep, want := range map[int]int64{0: 0, -1: 0, 100: 0, 10: 15} {
		if n, err := k.TrimAudit(t.Context(), keep); err != nil || n != want {
			t.Errorf("keeping %d: %d, %v", keep, n, err)
		}
	}
	if n, err := k.ForWatcher("other").TrimAudit(t.Context(), 0); err != nil || n != 0 {
		t.Errorf("%d, %v", n, err)
	}
}

func TestWaitingEnvelopesAreListedByPages(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	for i := range 23 {
		f.insertWaiting([]*mongo.Collection{f.a, f.b}[i%2], fmt.Sprintf("e%02d", i), []string{"retry", "blocked", "parked"}[i%3], fmt.Sprint("k", i%4), []string{"orders", "audit"}[i%2])
	}

	seen, after := map[string]bool{}, ""
	for pages := 0; ; pages++ {
		p, err := k.Waiting().List(t.Context(), admin.WaitingFilter{}, 5, after)
		if err != nil || p.Total != int64(23-min(max(pages-1, 0), 1)) || pages > 6 {
			t.Fatalf("%+v, %v", p, err)
		}
		for _, e := range p.Items {
			if seen[e.ID] {
				t.Errorf("%s twice", e.ID)
			}
			seen[e.ID] = true
		}
		// If entries are settled between two pages, no other entry moves to another page.
		if pages == 1 {
			if _, err := f.state.Collection("waiting").DeleteOne(t.Context(), bson.D{{Key: "id", Value: p.Items[0].ID}}); err != nil {
				t.Fatal(err)
			}
		}
		if after = p.Next; after == "" {
			break
		}
	}
	if len(seen) != 23 {
		t.Errorf("%d of 23", len(seen))
	}

	p, err := k.Waiting().List(t.Context(), admin.WaitingFilter{Reason: "retry", Topic: "orders", Key: "k0"}, 0, "")
	if err != nil || p.Total < 1 || len(p.Items) != int(p.Total) {
		t.Errorf("%+v, %v", p, err)
	}
	if _, err := k.Waiting().List(t.Context(), admin.WaitingFilter{Reason: "dead"}, 0, ""); err == nil {
		t.Error("a reason that is none")
	}
	if _, err := k.Waiting().List(t.Context(), admin.WaitingFilter{}, 0, "e30"); !errors.Is(err, listing.ErrCursor) {
		t.Errorf("%v", err)
	}

	topics, err := k.Waiting().Topics(t.Context())
	var n int64
	for _, topic := range topics {
		n += topic.Retry + topic.Blocked + topic.Parked
	}
	if err != nil || len(topics) != 2 || n != 22 {
		t.Errorf("%+v, %v", topics, err)
	}
}

func TestAnEventIsLookedUpWithItsHistory(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	now := uint32(time.Now().Unix())
	sent := time.Now().Add(-time.Minute)
	mustInsert(t, f.a, append(letterOf("sent", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 120, I: 1}}, bson.E{Key: "sentAt", Value: sent},
		bson.E{Key: "sent", Value: bson.A{bson.D{{Key: "topic", Value: "orders"}, {Key: "partition", Value: 3}, {Key: "offset", Value: int64(77)}}}}))
	mustInsert(t, f.a, append(letterOf("young", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now, I: 2}}))
	// A field sentAt of a service is no mark of the relay.
	mustInsert(t, f.a, append(letterOf("own field", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now, I: 3}}, bson.E{Key: "sentAt", Value: sent}))
	mustInsert(t, f.b, append(letterOf("later", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 60, I: 3}}, bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}))
	mustInsert(t, f.b, bson.D{{Key: "_id", Value: "odd"}, {Key: "type", Value: 5}, {Key: "attempts", Value: "many"}, {Key: "payload", Value: planted}})
	// The service has removed one of the waiting envelopes from its outbox.
	waits := admintest.Waits(t, mongodb.Namespace(f.a), letterOf("waits", planted), waiting.Retry, "orders")
	waits.Attempts, waits.Error = 1, &record.Attempt{Class: "record_rejected", Reason: "no", Topic: "orders", At: sent, Node: "n1"}
	stopped := append(letterOf("stopped", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 90, I: 1}})
	mustInsert(t, f.a, stopped)
	// The event that waits had the same id as another in the outbox.
	reused := append(letterOf("reused", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 80, I: 1}})
	mustInsert(t, f.a, append(letterOf("reused", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 70, I: 1}}))
	admintest.StoreWaiting(t, f.state.Collection("waiting"), waits,
		admintest.Waits(t, mongodb.Namespace(f.a), stopped, waiting.Parked, "orders"),
		admintest.Waits(t, mongodb.Namespace(f.a), reused, waiting.Parked, "orders"))
	dead := append(letterOf("dead", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: now - 20, I: 1}})
	mustInsert(t, f.a, dead)
	f.moveToDead(f.a, record.RecordRejected, dead)
	// Another event with the same id, which is not in the outbox any more.
	f.moveToDead(f.b, record.RecordRejected, letterOf("dead", planted))
	// The owner sends this event now.
	claimed, err := bson.Marshal(append(letterOf("claimed", planted), bson.E{Key: "dueAt", Value: sent}))
	if err != nil {
		t.Fatal(err)
	}
	claim := &waiting.Claim{ID: waiting.NewClaimID(k.Watcher + "/0of1"), Envelopes: []waiting.Claimed{{NS: mongodb.Namespace(f.a), Key: "k", Pos: "82", Raw: claimed}}}
	if err := waiting.InsertClaim(t.Context(), f.state.Collection(waiting.ClaimsName), claim); err != nil {
		t.Fatal(err)
	}
	one := func(id string) admin.LookupResult {
		t.Helper()
		got, err := k.Lookup(t.Context(), admin.LookupQuery{ID: id})
		if err != nil || strings.Contains(fmt.Sprintf("%+v", got), planted) {
			t.Fatalf("%+v, %v", got, err)
		}
		return got
	}
	if e := one("sent").Envelopes[0]; e.State != "delivered" || len(e.Sent) != 1 || e.Sent[0].Offset != 77 || len(e.Timeline) != 2 || e.Timeline[1].What != "sent" || e.Timeline[1].Text != "orders/3@77" {
		t.Errorf("%+v", e)
	}
	if got := one("stopped").Envelopes; len(got) != 1 || got[0].State != "waiting" || got[0].Reason != "parked" || got[0].Written.Unix() != int64(now-90) {
		t.Errorf("%+v", got)
	}
	if got := one("reused").Envelopes; len(got) != 2 || got[0].State == "waiting" || got[1].State != "waiting" {
		t.Errorf("%+v", got)
	}
	for _, id := range []string{"young", "own field"} {
		if e := one(id).Envelopes[0]; e.State != "appended" || e.SentAt != nil {
			t.Errorf("%+v", e)
		}
	}
	if e := one("later").Envelopes[0]; e.State != "scheduled" || e.DueAt == nil {
		t.Errorf("%+v", e)
	}
	if e := one("claimed").Envelopes[0]; e.State != "waiting" || e.Reason != "queued" || e.Origin != "scheduled" || e.Key != "k" {
		t.Errorf("%+v", e)
	}
	if e := one("odd").Envelopes[0]; e.ID != "odd" {
		t.Errorf("%+v", e)
	}
	if e := one("waits").Envelopes[0]; e.State != "waiting" || e.Reason != "retry" || len(e.Timeline) != 1 || e.Timeline[0].Text != "orders: record_rejected: no" || !slices.Equal(e.Waits, []string{"orders"}) {
		t.Errorf("%+v", e)
	}
	if got := one("dead"); len(got.Envelopes) != 2 || got.Envelopes[0].State != "dead" || got.Envelopes[1].State != "dead" || len(got.Letters) != 2 || got.Letters[0].Letter == "" {
		t.Errorf("%+v", got)
	}
	f.requeueAndSend("dead")
	if e := one("dead").Envelopes[0]; len(e.Timeline) != 4 || e.State == "dead" || !slices.ContainsFunc(e.Timeline, func(m admin.TimelineEntry) bool { return m.What == "requeued" && strings.Contains(m.Text, "ann") }) {
		t.Errorf("%+v", e)
	}

	got, err := k.Lookup(t.Context(), admin.LookupQuery{Key: "7"})
	ids := map[string]bool{}
	for _, e := range got.Envelopes {
		ids[e.ID] = true
	}
	if err != nil || len(got.Letters) != 2 || !ids["sent"] || !ids["young"] || !ids["later"] || !ids["waits"] || !ids["dead"] || got.Since == nil || got.More {
		t.Errorf("%v %+v, %v", ids, got, err)
	}
	if got, err = k.Lookup(t.Context(), admin.LookupQuery{Key: "7", Limit: 2}); err != nil || len(got.Envelopes) != 2 || !got.More {
		t.Errorf("%+v, %v", got, err)
	}

	for _, q := range []admin.LookupQuery{{}, {ID: "a", Key: "b"}, {Text: "a", Key: "b"}, {Key: "a", From: time.Now(), To: time.Now().Add(-time.Hour)}, {ID: "a", Collection: "no.such"}} {
		if _, err := k.Lookup(t.Context(), q); err == nil {
			t.Errorf("%+v was accepted", q)
		}
	}
	if got := one("nobody"); len(got.Envelopes)+len(got.Letters) != 0 {
		t.Errorf("%+v", got)
	}
}

// The life of an event goes on in Kafka and at its handlers: its place, the marks of those that have handled it, the message that one
// retries, and the letter of one that gave it up. All of it is found by the id and by the key, without a flag.
func TestAnEventIsLookedUpAtItsHandlers(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	now := time.Now()
	ns := mongodb.Namespace(f.a)
	mustInsert(t, f.a, append(letterOf("m5", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(now.Add(-time.Hour).Unix()), I: 1}}))
	report := activity.Report{At: now, Events: []activity.Event{
		{ID: "m5", Type: "OrderPlaced", Key: "7", Collection: ns, Topic: "orders", Partition: 1, Offset: 5, AckedAt: now.Add(-50 * time.Minute)},
		{ID: "gone", Type: "OrderPlaced", Key: "7", Collection: ns, Topic: "orders", Partition: 1, Offset: 6, AckedAt: now.Add(-50 * time.Minute)},
	}}
	if err := nodes.NewHistory(f.state.Collection("history")).SaveActivity(t.Context(), "orders/0of1", report); err != nil {
		t.Fatal(err)
	}
	for offset, id := range map[int64]string{5: "m5", 6: "gone"} {
		markHandled(t, f.a.Database(), f.a, "billing/h1", id, offset, now.Add(-40*time.Minute))
	}
	f.setAside(f.a, "g/h2", "7", 5, 3)
	f.giveUpAt(5, f.a, deadletter.DefaultCollection, "h3", "m5")

	got, err := f.op.Lookup(t.Context(), admin.LookupQuery{Text: "m5"})
	if err != nil || len(got.Envelopes) != 1 || got.ByKey || len(got.Letters) != 1 || strings.Contains(fmt.Sprintf("%+v", got), planted) {
		t.Fatalf("%+v, %v", got, err)
	}
	e := got.Envelopes[0]
	var what []string
	for i, entry := range e.Timeline {
		what = append(what, entry.What)
		if i > 0 && entry.At.Before(e.Timeline[i-1].At) {
			t.Errorf("not in the order of time: %+v", e.Timeline)
		}
	}
	if want := []string{"appended", "sent", "handled", "failed", "set aside", "sent", "dead"}; !slices.Equal(what, want) {
		t.Errorf("got %q, want %q: %+v", what, want, e.Timeline)
	}
	states := map[string]string{}
	for _, h := range e.Handlers {
		states[h.Group+"/"+h.Handler] = h.State
	}
	if want := map[string]string{"billing/h1": "handled", "g/h2": "retried", "g/h3": "dead"}; !maps.Equal(states, want) {
		t.Errorf("got %v, want %v", states, want)
	}
	if e.State != "delivered" || !slices.Contains(e.Sent, outboxes.Place{Topic: "orders", Partition: 1, Offset: 5}) || got.Limits != "" {
		t.Errorf("%+v, %s", e, got.Limits)
	}

	// The clock of the relay is ahead of the handler's, which has taken the record before its ack was reported.
	markHandled(t, f.a.Database(), f.a, "billing/h1", "fast", 8, now.Add(-40*time.Minute))
	if err := nodes.NewHistory(f.state.Collection("history")).SaveActivity(t.Context(), "orders/2of3", activity.Report{At: now, Events: []activity.Event{
		{ID: "fast", Type: "OrderPlaced", Key: "9", Collection: ns, Topic: "orders", Partition: 1, Offset: 8, AckedAt: now.Add(-40*time.Minute + 300*time.Millisecond)},
	}}); err != nil {
		t.Fatal(err)
	}
	if got, err = f.op.Lookup(t.Context(), admin.LookupQuery{Text: "fast"}); err != nil || len(got.Envelopes) != 1 || len(got.Envelopes[0].Timeline) != 2 || got.Envelopes[0].Timeline[0].What != "sent" {
		t.Errorf("a record that is handled before its ack: %+v, %v; want sent before handled", got, err)
	}

	// An event that no outbox has any more is found as well. Its id shows when it was appended.
	removed := "0190b3c2-7a1d-7c55-9d3e-2f1f6c1c8f10"
	if err := nodes.NewHistory(f.state.Collection("history")).SaveActivity(t.Context(), "orders/1of2", activity.Report{At: now, Events: []activity.Event{
		{ID: removed, Type: "Due", Key: "8", Collection: ns, Topic: "orders", Partition: 1, Offset: 7, AckedAt: now},
	}}); err != nil {
		t.Fatal(err)
	}
	if got, err = f.op.Lookup(t.Context(), admin.LookupQuery{Text: removed}); err != nil || len(got.Envelopes) != 1 || len(got.Envelopes[0].Timeline) != 2 ||
		got.Envelopes[0].Timeline[0].What != "appended" || got.Envelopes[0].Timeline[0].At.Format(time.DateOnly) != "2024-07-15" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err = f.op.Lookup(t.Context(), admin.LookupQuery{Text: "gone"}); err != nil || len(got.Envelopes) != 1 || got.Envelopes[0].State != "delivered" || got.Envelopes[0].Timeline[0].Text != "orders/1@6" {
		t.Errorf("%+v, %v", got, err)
	}
	if got, err = f.op.Lookup(t.Context(), admin.LookupQuery{Text: "7"}); err != nil || !got.ByKey || len(got.Envelopes) != 2 {
		t.Errorf("%+v, %v", got, err)
	}
	// A mark has no key. The events of a key have their marks all the same, also one that no outbox has any more.
	for _, e := range got.Envelopes {
		isHandled := func(entry admin.TimelineEntry) bool { return entry.What == "handled" }
		if !slices.ContainsFunc(e.Timeline, isHandled) {
			t.Errorf("%s of the key is not handled: %+v", e.ID, e.Timeline)
		}
	}
}

func mustInsert(t *testing.T, coll *mongo.Collection, doc bson.D) {
	t.Helper()
	if _, err := coll.InsertOne(t.Context(), doc); err != nil {
		t.Fatal(err)
	}
}

func TestSagasAreListedAndTheirStateHidden(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	redact, err := admin.NewRedaction(nil, []string{"$.card"})
	if err != nil {
		t.Fatal(err)
	}

	k := admin.New(admin.Operator{State: f.state, Watcher: "orders", Redact: redact}).For(admin.Actor{Name: "ann"})
	db := f.a.Database()
	s := sagas.NewMongo(db)
	if _, err := s.Prepare(t.Context(), sagas.Type{Name: "pay_sagas", Owner: "x", ID: sagas.String}); err != nil {
		t.Fatal(err)
	}

	for i := range 5 {
		body, err := bson.Marshal(bson.D{{Key: "state", Value: bson.D{{Key: "card", Value: planted}, {Key: "step", Value: i}}}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Save(t.Context(), "pay_sagas", sagas.Record{ID: fmt.Sprint("s", i), Body: body}); err != nil {
			t.Fatal(err)
		}
	}

	types, err := k.Sagas().Types(t.Context())
	if err != nil || len(types) != 1 || types[0].Count != 5 || types[0].Database != db.Name() {
		t.Fatalf("%+v, %v", types, err)
	}

	var ids []string
	for after, n := "", 0; n == 0 || after != ""; n++ {
		p, err := k.Sagas().List(t.Context(), db.Name(), "pay_sagas", 2, after)
		if err != nil || p.Total != 5 || n > 3 {
			t.Fatalf("%+v, %v", p, err)
		}
		for _, one := range p.Items {
			ids = append(ids, one.ID)
		}
		after = p.Next
	}

	slices.Sort(ids)
	if !slices.Equal(ids, []string{"s0", "s1", "s2", "s3", "s4"}) {
		t.Errorf("%v", ids)
	}

	one, err := k.Sagas().Show(t.Context(), db.Name(), "pay_sagas", "s3", false)
	if err != nil || one.State != nil || one.Version != 1 {
		t.Errorf("%+v, %v", one, err)
	}
	if one, err = k.Sagas().Show(t.Context(), db.Name(), "pay_sagas", "s3", true); err != nil || string(one.State) != `{"card":"***","step":3}` {
		t.Errorf("%s, %v", one.State, err)
	}
	if shown := f.findLogged("payload_shown"); len(shown) != 1 {
		t.Errorf("the audit log has the entries %+v, want one of the state that was shown", shown)
	}

	for _, c := range [][3]string{{db.Name(), "pay_sagas", "none"}, {db.Name(), f.a.Name(), "s1"}, {"admin", "system.users", "x"}, {"", "pay_sagas", "s1"}} {
		if got, err := k.Sagas().Show(t.Context(), c[0], c[1], c[2], true); err == nil {
			t.Errorf("%v: %+v", c, got)
		}
	}
}

func TestTheInboxIsCountedPurgedAndReleased(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	db := f.a.Database()
	x, err := mongostore.Open(db, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := x.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}

	for i := range 4 {
		if err := x.Once(t.Context(), inbox.Entry{Key: inbox.Key{Consumer: "group/h", ID: fmt.Sprint("m", i)}}, func(context.Context) error { return nil }, inbox.OnceConfig{}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := x.Claim(t.Context(), inbox.Entry{Key: inbox.Key{Consumer: "group/h", ID: "held"}}, time.Minute); err != nil {
		t.Fatal(err)
	}

	list, err := k.Inboxes().List(t.Context())
	if err != nil || len(list) != 1 || list[0].Handled != 5 || list[0].Claimed != 1 || list[0].Expired != 0 {
		t.Fatalf("%+v, %v", list, err)
	}
	if _, err := k.Inboxes().Purge(t.Context(), admin.InboxPurge{Database: db.Name(), OlderThan: time.Second}); err == nil {
		t.Error("markers that are needed were purged")
	}
	if _, err := db.Collection("inbox").UpdateMany(t.Context(), bson.D{{Key: "_id.i", Value: bson.D{{Key: "$in", Value: bson.A{"m0", "m1", "held"}}}}}, bson.D{{Key: "$set", Value: bson.D{{Key: "at", Value: time.Now().Add(-time.Hour)}}}}); err != nil {
		t.Fatal(err)
	}

	p, err := k.Inboxes().Purge(t.Context(), admin.InboxPurge{Database: db.Name(), OlderThan: 10 * time.Minute, DryRun: true})
	if err != nil || p.Matched != 2 || p.Removed != 0 {
		t.Errorf("%+v, %v", p, err)
	}
	if p, err = k.Inboxes().Purge(t.Context(), admin.InboxPurge{Database: db.Name(), OlderThan: 10 * time.Minute}); err != nil || p.Removed != 2 || len(f.findLogged("inbox_purged")) != 1 {
		t.Errorf("%+v, %v", p, err)
	}
	if r, err := k.Inboxes().Release(t.Context(), db.Name(), "", false, false); !errors.Is(err, admin.ErrInUse) || r.Live != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := k.Inboxes().Release(t.Context(), db.Name(), "", true, false); err != nil || r.Released != 1 || len(f.findLogged("inbox_released")) != 1 {
		t.Errorf("%+v, %v", r, err)
	}
	if err := x.Once(t.Context(), inbox.Entry{Key: inbox.Key{Consumer: "group/h", ID: "held"}}, func(context.Context) error { return nil }, inbox.OnceConfig{NoWait: true}); err != nil {
		t.Errorf("a released message cannot be handled: %v", err)
	}
	if m, err := k.Inboxes().Marks(t.Context(), db.Name(), ""); err != nil || m == nil {
		t.Errorf("%v, %v", m, err)
	}

	for _, c := range [][2]string{{"admin", ""}, {db.Name(), "outbox"}, {"", ""}} {
		if _, err := k.Inboxes().Release(t.Context(), c[0], c[1], true, false); err == nil {
			t.Errorf("%v was released", c)
		}
	}
}

func TestClearEmptiesTheNamedCollectionsAlone(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	for i := range 3 {
		mustInsert(t, f.a, letterOf(fmt.Sprint("e", i), planted))
		f.moveToDead(f.a, record.Malformed, letterOf(fmt.Sprint("d", i), planted))
	}

	entities := f.a.Database().Collection("orders")
	mustInsert(t, entities, bson.D{{Key: "_id", Value: 1}})
	if _, err := k.Clear(t.Context(), admin.ClearOrder{What: []string{admin.ClearEnvelopes}}); !errors.Is(err, admin.ErrUnconfirmed) {
		t.Errorf("%v", err)
	}

	order := admin.ClearOrder{What: []string{admin.ClearEnvelopes}, Confirm: admin.ClearPhrase("orders")}
	if _, err := k.Clear(t.Context(), order); !errors.Is(err, admin.ErrInUse) {
		t.Errorf("%v", err)
	}
	if n := f.countEnvelopes(f.a); n != 3 {
		t.Fatalf("%d envelopes are left", n)
	}

	order.Force = true
	out, err := k.Clear(t.Context(), order)
	if err != nil || out.Removed != 3 || f.countEnvelopes(f.a) != 0 {
		t.Errorf("%+v, %v", out, err)
	}
	if n, err := k.Letters().Count(t.Context(), admin.DeadFilter{}); err != nil || n != 3 {
		t.Errorf("%d letters, %v", n, err)
	}
	if n, err := entities.CountDocuments(t.Context(), bson.D{}); err != nil || n != 1 {
		t.Errorf("%d entities, %v", n, err)
	}
	if out, err = k.Clear(t.Context(), admin.ClearOrder{What: admin.Clearable(), DryRun: true}); err != nil || out.Removed != 0 || out.Found < 3 || out.Confirm != "clear orders" {
		t.Errorf("%+v, %v", out, err)
	}

	for _, what := range [][]string{nil, {"all"}} {
		if _, err := k.Clear(t.Context(), admin.ClearOrder{What: what, Confirm: "clear orders", Force: true}); err == nil {
			t.Errorf("%v was cleared", what)
		}
	}
	if len(f.findLogged("clearing")) != 1 || len(f.findLogged("cleared")) != 1 {
		t.Error("the audit log has no entry of this action")
	}
	if p, err := k.Ping(t.Context()); err != nil || !p.MongoDB || !p.Storage || time.Since(p.Now).Abs() > time.Minute {
		t.Errorf("%+v, %v", p, err)
	}
}

// A clearing counts the documents that it removes: letters of other watchers and running replays stay.
func TestAClearingCountsWhatItRemoves(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	for i := range 5 {
		f.moveToDead(f.a, record.Malformed, letterOf(fmt.Sprint("d", i), planted), func(letter *letters.Letter) {
			if i < 3 {
				letter.Watcher = "other"
			}
		})
	}

	order := admin.ClearOrder{What: []string{"dead"}, DryRun: true, Force: true}
	if out, err := f.newDesk().Clear(t.Context(), order); err != nil || out.Found != 2 {
		t.Errorf("dry run: %+v, %v, want 2", out, err)
	}
	order.DryRun, order.Confirm = false, admin.ClearPhrase("orders")
	if out, err := f.newDesk().Clear(t.Context(), order); err != nil || out.Found != 2 || out.Removed != 2 {
		t.Errorf("%+v, %v, want 2", out, err)
	}
}

// Messages that handlers have set aside exist nowhere else.
func TestAClearedInboxKeepsMessagesThatAreSetAside(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	db := f.a.Database()
	store, err := mongostore.Open(db, inbox.Settings{})
	if err != nil {
		t.Fatal(err)
	}
	if err := store.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustInsert(t, db.Collection("inbox"), bson.D{{Key: "_id", Value: "mark"}})
	aside := []string{"inbox_waiting", "inbox_waiting_counts"}
	for _, name := range aside {
		mustInsert(t, db.Collection(name), bson.D{{Key: "_id", Value: "aside"}})
	}

	out, err := f.newDesk().Clear(t.Context(), admin.ClearOrder{What: []string{"inbox"}, Confirm: admin.ClearPhrase("orders"), Force: true})
	if err != nil || out.Removed != 1 {
		t.Errorf("%+v, %v", out, err)
	}
	for _, name := range aside {
		if n, err := db.Collection(name).CountDocuments(t.Context(), bson.D{}); err != nil || n != 1 {
			t.Errorf("%s has %d documents, %v", name, n, err)
		}
	}
}

func TestActionsWithoutTheirServersAreUnavailable(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := admin.New(admin.Operator{State: f.state, Watcher: "orders"}).For(admin.Actor{Name: "ann"})

	// This process has only the state database.
	if _, err := k.Replays().Start(t.Context(), admin.ReplayOrder{IDs: []string{"a"}}); !errors.Is(err, admin.ErrUnavailable) {
		t.Errorf("%v", err)
	}
}
