package admin_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
	"github.com/outrelay/outrelay/pkg/event"
)

// outboxNames makes collections that watcher orders is registered for, with its position at an hour.
func outboxNames(t *testing.T, names ...string) (admin.Operator, []*mongo.Collection) {
	t.Helper()
	db := stacktest.Database(t, stacktest.Client(t))
	registry := outboxes.NewRegistry(state.Of(db).Collection("collections"))
	var out []*mongo.Collection
	for _, name := range names {
		coll := db.Collection(name)
		if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
			t.Fatal(err)
		}
		found, err := outboxes.ListOutboxes(t.Context(), db.Client(), func(_, c []byte) bool { return string(c) == name }, db.Name())
		if err != nil || len(found) != 1 {
			t.Fatalf("%v, %v", found, err)
		}
		if _, err := registry.Register(t.Context(), found[0].UUID, found[0].NS(), "orders", bson.Timestamp{}); err != nil {
			t.Fatal(err)
		}
		out = append(out, coll)
	}

	setWatcher(t, state.Of(db), bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: 100_000}}})
	return admin.Operator{State: state.Of(db), Watcher: "orders", Actor: "ann"}, out
}

func setWatcher(t *testing.T, db state.Database, set bson.D) {
	t.Helper()
	if _, err := db.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$set", Value: set}}, options.UpdateOne().SetUpsert(true)); err != nil {
		t.Fatal(err)
	}
}

func insertAt(t *testing.T, coll *mongo.Collection, n int, second uint32) {
	t.Helper()
	docs := make([]any, n)
	for i := range docs {
		docs[i] = bson.D{{Key: "ts", Value: bson.Timestamp{T: second, I: uint32(i + 1)}}}
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
}

func lastEvents(t *testing.T, o admin.Operator) []nodes.AuditEntry {
	t.Helper()
	list, err := nodes.NewAuditLog(o.State.Collection("audit"), "", "").Latest(t.Context(), 10)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestPurgeByHand(t *testing.T) {
	t.Parallel()
	o, colls := outboxNames(t, "a_outbox", "b_outbox")
	insertAt(t, colls[0], 1200, 90_000)
	insertAt(t, colls[1], 30, 90_000)
	// This envelope is within the margin of five minutes.
	insertAt(t, colls[1], 7, 99_800)
	dry, err := o.Purge(t.Context(), admin.Purge{DryRun: true, OlderThan: time.Second})
	if err != nil || dry.Purgeable != 1230 || dry.Removed != 0 || dry.KeptS != 300 || len(dry.Collections) != 2 || !dry.Collections[0].Cut.Equal(time.Unix(99_700, 0)) {
		t.Fatalf("%+v, %v", dry, err)
	}
	if none, err := o.Purge(t.Context(), admin.Purge{OlderThan: 24 * time.Hour}); err != nil || none.Removed != 0 || len(lastEvents(t, o)) != 0 {
		t.Fatalf("%+v, %v", none, err)
	}

	var sums []int64
	one := admin.Purge{Collections: []string{mongodb.Namespace(colls[0])}, Progress: func(n int64) { sums = append(sums, n) }}
	if r, err := o.Purge(t.Context(), one); err != nil || r.Removed != 1200 || len(r.Collections) != 1 || len(sums) < 3 || sums[len(sums)-1] != 1200 {
		t.Fatalf("%+v, %v, %v", r, sums, err)
	}

	setWatcher(t, o.State, bson.D{{Key: "gap", Value: bson.D{{Key: "reason", Value: "286"}}}})
	if r, err := o.Purge(t.Context(), admin.Purge{}); err != nil || r.Removed != 0 || r.Collections[1].Held != "gap" || !strings.Contains(r.Collections[1].Reason, "until") && !strings.Contains(r.Collections[1].Reason, "gap") {
		t.Fatalf("%+v, %v", r, err)
	}

	setWatcher(t, o.State, bson.D{{Key: "gap", Value: nil}})
	begun := time.Now()
	if r, err := o.Purge(t.Context(), admin.Purge{Rate: 40, Batch: 10}); err != nil || r.Removed != 30 || time.Since(begun) < 300*time.Millisecond {
		t.Fatalf("%+v, %v after %v", r, err, time.Since(begun))
	}

	audit := lastEvents(t, o)
	if len(audit) != 2 || audit[0].Kind != "purged" || audit[0].Fields.Lookup("removed").AsInt64() != 30 || audit[0].Fields.Lookup("actor").StringValue() != "ann" {
		t.Errorf("%+v", audit)
	}
	if _, err := o.Purge(t.Context(), admin.Purge{Collections: []string{"x.y"}}); err == nil || !strings.Contains(err.Error(), "a_outbox") {
		t.Errorf("another's collection: %v", err)
	}

	for _, coll := range colls {
		if err := coll.Drop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := o.Purge(t.Context(), admin.Purge{}); err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("dropped collections: %v", err)
	}

	o.Watcher = "other"
	if _, err := o.Purge(t.Context(), admin.Purge{}); err == nil {
		t.Error("a watcher without collections purged something")
	}
}

func TestHistoryOverCollections(t *testing.T) {
	t.Parallel()
	o, colls := outboxNames(t, "a_outbox", "b_outbox")
	var ids []string
	for c, coll := range colls {
		for i := range 5 {
			id := uuid.New()
			ids = append(ids, id.String())
			if _, err := coll.InsertOne(t.Context(), bson.D{
				{Key: "_id", Value: event.NewID(id)},
				{Key: "aggregatetype", Value: "order"},
				{Key: "aggregateid", Value: int64(i % 2)},
				{Key: "type", Value: "Placed"},
				{Key: "ts", Value: bson.Timestamp{T: uint32(1000 + i), I: 1}},
				{Key: "sentAt", Value: time.Unix(2000, 0)},
				{Key: "sent", Value: bson.A{bson.D{{Key: "topic", Value: fmt.Sprint("t", c)}, {Key: "partition", Value: int32(1)}, {Key: "offset", Value: int64(i)}}}},
			}); err != nil {
				t.Fatal(err)
			}
		}
	}

	for _, limit := range []int{1, 3, 5, 10, 0} {
		var got []string
		for q := (admin.HistoryQuery{Limit: limit}); ; {
			page, err := o.History(t.Context(), q)
			if err != nil || limit > 0 && len(page.Items) > limit {
				t.Fatalf("%+v, %v", page, err)
			}
			for _, e := range page.Items {
				got = append(got, e.ID)
			}
			if q.After = page.Next; q.After == "" {
				break
			}
		}
		if strings.Join(got, " ") != strings.Join(ids, " ") {
			t.Errorf("pages of %d: %v, want %v", limit, got, ids)
		}
	}
	if page, err := o.History(t.Context(), admin.HistoryQuery{Key: "1", From: time.Unix(1002, 0), To: time.Unix(1004, 0)}); err != nil || len(page.Items) != 2 || page.Items[0].Key != "1" ||
		page.Items[0].State != "sent" || page.Items[1].Sent[0] != (outboxes.Place{Topic: "t1", Partition: 1, Offset: 3}) {
		t.Errorf("%+v, %v", page, err)
	}

	insertAt(t, colls[0], 1, 5000)
	waits := bson.D{{Key: "_id", Value: ids[0]}, {Key: "aggregatetype", Value: "order"}} // a string
	if _, err := colls[1].InsertOne(t.Context(), waits); err != nil {
		t.Fatal(err)
	}
	admintest.StoreWaiting(t, o.State.Collection("waiting"), admintest.Waits(t, mongodb.Namespace(colls[1]), waits, waiting.Parked, "orders"))
	if page, err := o.History(t.Context(), admin.HistoryQuery{IDs: []string{ids[0]}}); err != nil || len(page.Items) != 2 || page.Items[1].State != "waiting" {
		t.Errorf("%+v, %v", page, err)
	}

	for _, after := range []string{"x.y abc", mongodb.Namespace(colls[0]) + " abc"} {
		if _, err := o.History(t.Context(), admin.HistoryQuery{After: after}); !errors.Is(err, listing.ErrCursor) {
			t.Errorf("%q: %v", after, err)
		}
	}
}
