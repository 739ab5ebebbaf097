package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

// newScheduledShop creates a watcher with one outbox. Its envelopes are due in an hour and in two hours.
func newScheduledShop(t *testing.T) (env []string, coll *mongo.Collection) {
	t.Helper()
	client := stacktest.Client(t)
	state, shop := statetest.New(t, client), stacktest.Database(t, client)
	coll = shop.Collection("outbox")
	ns := shop.Name() + ".outbox"
	if _, err := state.Collection("collections").InsertOne(t.Context(), bson.D{{Key: "_id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: make([]byte, 16)}}, {Key: "ns", Value: ns}, {Key: "watcher", Value: "default"}}); err != nil {
		t.Fatal(err)
	}

	for i, typ := range []string{"Reminder", "Reminder", "Invoice"} {
		if _, err := coll.InsertOne(t.Context(), bson.D{
			{Key: "_id", Value: typ + "-" + string(rune('1'+i))},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "o"},
			{Key: "type", Value: typ},
			{Key: "dueAt", Value: time.Now().Add(time.Duration(i+1) * time.Hour)},
		}); err != nil {
			t.Fatal(err)
		}
	}
	return []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_STATE_DATABASE=" + state.Name(), "OUTRELAY_WATCH=" + ns,
	}, coll
}

func TestScheduledCommands(t *testing.T) {
	t.Parallel()
	env, coll := newScheduledShop(t)
	run := func(v any, want int, args ...string) string {
		t.Helper()
		code, out, errOut := runCommand(t, env, append([]string{"scheduled"}, args...)...)
		if code != want {
			t.Fatalf("%v: exit code %d: %s", args, code, errOut)
		}
		if v != nil {
			if err := json.Unmarshal([]byte(out), v); err != nil {
				t.Fatalf("%v: %v: %q", args, err, out)
			}
		}
		return out + errOut
	}

	left := func(want int64) {
		t.Helper()
		if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != want {
			t.Errorf("%d are left, %v; want %d", n, err, want)
		}
	}

	var page admin.Page[admin.Scheduled]
	run(&page, 0, "list", "--json", "--limit", "2")
	if page.Total != 3 || len(page.Items) != 2 || page.Items[0].ID != "Reminder-1" || page.Next == "" {
		t.Errorf("unexpected result %+v", page)
	}

	var rest admin.Page[admin.Scheduled]
	run(&rest, 0, "list", "--json", "--limit", "2", "--after", page.Next)
	if len(rest.Items) != 1 || rest.Items[0].ID != "Invoice-3" || rest.Next != "" {
		t.Errorf("unexpected result %+v", rest)
	}
	if text := run(nil, 0, "list", "--due-before", "90m"); !strings.Contains(text, "Reminder-1") || strings.Contains(text, "Reminder-2") || !strings.Contains(text, "1 of 1 scheduled envelope\n") {
		t.Error(text)
	}

	var g scheduledGroups
	run(&g, 0, "summary", "--json")
	if g.Count != 3 || len(g.Groups) != 2 || g.Groups[0].Type != "Invoice" || g.Groups[1].Count != 2 {
		t.Errorf("unexpected result %+v", g)
	}
	if text := run(nil, exitConfig, "cancel"); !strings.Contains(text, "no envelopes selected") {
		t.Error(text)
	}
	if text := run(nil, exitConfig, "cancel", "--type", "Reminder"); !strings.Contains(text, "cancel 2 scheduled envelopes") {
		t.Error(text)
	}

	run(&g, 0, "cancel", "--all", "--dry-run", "--json")
	left(3)
	var done admin.Cancelled
	run(&done, 0, "cancel", "Reminder-1", "--yes", "--json")
	if left(2); done.Cancelled != 1 {
		t.Errorf("unexpected result %+v", done)
	}

	var r admin.Rescheduled
	run(&r, exitConfig, "reschedule", "Reminder-1", "Reminder-2", "--to", "5h", "--json")
	if r.Moved != 1 || len(r.NotScheduled) != 1 || time.Until(r.To) < 4*time.Hour {
		t.Errorf("unexpected result %+v", r)
	}

	run(&page, 0, "list", "Reminder-2", "--json")
	if len(page.Items) != 1 || !page.Items[0].DueAt.Equal(r.To.Truncate(time.Millisecond)) {
		t.Errorf("unexpected result %+v", page)
	}

	if text := run(nil, exitConfig, "reschedule", "--to", "6h"); !strings.Contains(text, "no envelopes selected") {
		t.Error(text)
	}
	if text := run(nil, exitConfig, "reschedule", "--type", "Invoice", "--to", "6h"); !strings.Contains(text, "move 1 scheduled envelope to 20") {
		t.Error(text)
	}
	run(&r, 0, "reschedule", "--type", "Invoice", "--to", "6h", "--yes", "--json")
	if r.Moved != 1 || len(r.NotScheduled) != 0 {
		t.Errorf("unexpected result %+v", r)
	}

	run(&done, 0, "cancel", "--all", "--yes", "--json")
	if left(0); done.Cancelled != 2 {
		t.Errorf("unexpected result %+v", done)
	}
	if text := run(nil, 0, "list"); !strings.Contains(text, "no scheduled envelope matches") {
		t.Error(text)
	}

	for _, args := range [][]string{{"list", "--limit", "0"}, {"list", "--due-from", "soon"}, {"list", "--after", "x"}, {"list", "--collection", "a.b"}, {"reschedule", "x"}, {"reschedule", "--to", "1h"}, {"list", "--due-from", "2h", "--due-before", "1h"}} {
		run(nil, exitConfig, args...)
	}
}

// The exit code of a cancellation is 0 only if each of the named envelopes is canceled in each outbox, however often the ids are named and
// however many outboxes have one of them.
func TestACancellationNamesWhatItDidNotCancel(t *testing.T) {
	t.Parallel()
	env, coll := newScheduledShop(t)
	other := stacktest.Database(t, coll.Database().Client()).Collection("outbox")
	stateName := strings.TrimPrefix(env[2], "OUTRELAY_STATE_DATABASE=")
	registered := coll.Database().Client().Database(stateName).Collection("outrelay_collections")
	if _, err := registered.InsertOne(t.Context(), bson.D{{Key: "_id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: append(make([]byte, 15), 1)}}, {Key: "ns", Value: other.Database().Name() + ".outbox"}, {Key: "watcher", Value: "default"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := other.InsertOne(t.Context(), bson.D{{Key: "_id", Value: "Reminder-1"}, {Key: "aggregatetype", Value: "order"}, {Key: "aggregateid", Value: "o"}, {Key: "type", Value: "Reminder"}, {Key: "dueAt", Value: time.Now().Add(time.Hour)}}); err != nil {
		t.Fatal(err)
	}

	code, out, errOut := runCommand(t, env, "scheduled", "cancel", "Reminder-1", "typo", "--yes")
	if code != exitConfig || !strings.Contains(out, "typo is not scheduled") || !strings.Contains(out, "canceled 2 scheduled envelopes") {
		t.Errorf("exit code %d: %s%s", code, out, errOut)
	}
	if code, out, errOut = runCommand(t, env, "scheduled", "cancel", "Reminder-2", "Reminder-2", "--yes"); code != 0 || !strings.Contains(out, "canceled 1 scheduled envelope") {
		t.Errorf("exit code %d: %s%s", code, out, errOut)
	}
	if code, out, _ = runCommand(t, env, "scheduled", "cancel", "Invoice-3", "--type", "Reminder", "--yes"); code != exitConfig || !strings.Contains(out, "Invoice-3 is not scheduled") {
		t.Errorf("of another type: exit code %d: %s", code, out)
	}
}
