package admin_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/pkg/consumer/deadletter"
)

// Writers without the library may append envelopes without a stamp. The purge stamps them after their delivery, so a letter from before has
// no stamp, and the stamp is no time of the append.
func TestAnEnvelopeThatThePurgeHasStampedIsOneEvent(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	now := time.Now()
	raw := letterOf("m2", planted)
	f.moveToDead(f.a, record.NotAllowed, raw)
	mustInsert(t, f.a, append(raw, bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(now.Add(time.Minute).Unix()), I: 1}}))
	mustInsert(t, f.a, letterOf("p1", planted))
	f.setAside(f.a, "g/h2", "7", 2, 3)
	f.giveUpAt(5, f.a, deadletter.DefaultCollection, "h3", "m2")
	markHandled(t, f.a.Database(), f.a, "billing/h1", "m2", 9, now)

	found, err := f.op.Lookup(t.Context(), admin.LookupQuery{Key: "7"})
	var ids []string
	for _, event := range found.Envelopes {
		ids = append(ids, event.ID)
	}
	slices.Sort(ids)
	if err != nil || !slices.Equal(ids, []string{"m2", "p1"}) {
		t.Fatalf("events of the key: got %q (%v), want m2 and p1: %+v", ids, err, found.Envelopes)
	}
	at := slices.IndexFunc(found.Envelopes, func(event admin.FoundEnvelope) bool { return event.ID == "m2" })
	event := found.Envelopes[at]
	what := map[string]int{}
	for _, entry := range event.Timeline {
		what[entry.What]++
	}
	if event.Written != nil || what["appended"] != 0 || what["dead"] != 2 || what["handled"] != 1 {
		t.Errorf("m2 was appended at %v: %+v", event.Written, event.Timeline)
	}

	// Only handlers have the places, and each of them is in the timeline before what its handler did.
	for _, text := range []string{"orders/1@2", "orders/0@5", "orders/1@9"} {
		sent := slices.IndexFunc(event.Timeline, func(entry admin.TimelineEntry) bool {
			return entry.What == "sent" && strings.HasPrefix(entry.Text, text)
		})
		used := slices.IndexFunc(event.Timeline, func(entry admin.TimelineEntry) bool { return strings.Contains(entry.Text, "("+text+")") })
		if sent < 0 || used < sent {
			t.Errorf("%s is entry %d, and its handler's is %d, of %+v", text, sent, used, event.Timeline)
		}
	}
}

// A canceled event leaves nothing but the entry of the audit log, which has its id.
func TestACanceledEventIsLookedUp(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	for _, id := range []string{"c1", "c2"} {
		mustInsert(t, f.a, append(letterOf(id, planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)}))
	}
	cancel := func(want int64, ids ...string) {
		t.Helper()
		if out, err := f.op.Schedule().Cancel(t.Context(), admin.ScheduledFilter{IDs: ids}, nil); err != nil || out.Cancelled != want {
			t.Fatalf("cancellation of %q: %+v, %v, want %d", ids, out, err, want)
		}
	}
	cancel(1, "c1")
	cancel(0, "c1")
	cancel(1, "c2", "other")

	for _, query := range []admin.LookupQuery{{Text: "c1"}, {ID: "c1"}} {
		found, err := f.op.Lookup(t.Context(), query)
		if text := found.DescribeMissing(); err != nil || found.Canceled == nil || !strings.Contains(text, "ann canceled it at 2") {
			t.Errorf("%+v: %+v, %v: %s", query, found.Canceled, err, text)
		}
	}
	// It is not known which of the two ids was canceled.
	for _, id := range []string{"other", "none"} {
		if found, err := f.op.Lookup(t.Context(), admin.LookupQuery{Text: id}); err != nil || found.Canceled != nil {
			t.Errorf("%s: %+v, %v", id, found.Canceled, err)
		}
	}
}

// The stamp of an event precedes its commit by up to the life of a transaction. The outbox as of the position shows whether the watcher has
// passed a recent event.
func TestAnEventBeforeThePositionIsDelivered(t *testing.T) {
	t.Parallel()
	f := openWard(t)
	setPosition := func(at bson.Timestamp) {
		t.Helper()
		change := bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: at}}}}
		if _, err := f.state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, change); err != nil {
			t.Fatal(err)
		}
	}
	stateOf := func(id string) string {
		t.Helper()
		found, err := f.op.Lookup(t.Context(), admin.LookupQuery{ID: id})
		conversation, errTree := f.op.Conversation(t.Context(), admin.ConversationQuery{ID: id})
		if err != nil || errTree != nil || len(found.Envelopes) != 1 || len(conversation.Events) != 1 {
			t.Fatalf("lookup of %s: %+v, %v; its conversation: %+v, %v", id, found, err, conversation, errTree)
		}
		if other := conversation.Events[0].State; other != found.Envelopes[0].State {
			t.Errorf("%s is %s in its conversation, and %s alone", id, other, found.Envelopes[0].State)
		}
		return found.Envelopes[0].State
	}

	// The next write has at least the time of the position, of which the watcher may have sent nothing.
	stamped := append(letterOf("passed", planted), bson.E{Key: "ts", Value: bson.Timestamp{T: uint32(time.Now().Unix()), I: 1}})
	mustInsert(t, f.a, stamped)
	mustInsert(t, f.a, letterOf("unstamped", planted))
	position, err := mongodb.SettledTime(t.Context(), f.a)
	if err != nil {
		t.Fatal(err)
	}
	position.I++
	mustInsert(t, f.a, letterOf("later", planted))
	setPosition(position)
	for id, want := range map[string]string{"passed": "delivered", "unstamped": "delivered", "later": "appended"} {
		if got := stateOf(id); got != want {
			t.Errorf("%s is %s, want %s", id, got, want)
		}
	}

	if err := f.owner.Release(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if found, err := f.op.Lookup(t.Context(), admin.LookupQuery{ID: "later"}); err != nil || !strings.Contains(found.Pause, "no process sends for watcher orders") {
		t.Errorf("note without an owner: %q, %v", found.Pause, err)
	}
	// The server keeps snapshots of some minutes.
	setPosition(bson.Timestamp{T: position.T - 3600})
	if got := stateOf("passed"); got != "appended" {
		t.Errorf("an event after a position of an hour ago is %s", got)
	}
}
