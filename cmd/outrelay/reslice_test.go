package main

import (
	"context"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/offline"
)

// The parts that need no Kafka: the plan, its rejections, and a watcher that has never run. internal/relay/process and
// test/fault test the division itself.
func TestResliceCommand(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	g.runCommand(exitConfig, nil, "reslice")
	for _, n := range []string{"0", "65", "-1"} {
		if text := g.runCommand(exitConfig, nil, "reslice", "--slots", n, "--yes"); !strings.Contains(text, "from 1 to 64") {
			t.Errorf("%s: %s", n, text)
		}
	}

	g.runCommand(exitConfig, nil, "reslice", "--slots", "2", "--wait", "0s")
	if text := g.runCommand(exitConfig, nil, "reslice", "--slots", "2", "--yes"); !strings.Contains(text, "slot orders/0of1 has no position yet") {
		t.Errorf("unexpected output:\n%s", text)
	}

	docs := g.state.Collection("watchers")
	set := func(fields bson.D) {
		if _, err := docs.UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$set", Value: fields}}); err != nil {
			t.Fatal(err)
		}
	}

	set(bson.D{{Key: "clusterTime", Value: bson.Timestamp{T: 1_700_000_000, I: 1}}, {Key: "gap", Value: bson.D{{Key: "reason", Value: "x"}}}})
	if text := g.runCommand(exitConfig, nil, "reslice", "--slots", "2", "--yes"); !strings.Contains(text, "let it finish first") {
		t.Errorf("unexpected output:\n%s", text)
	}

	set(bson.D{{Key: "gap", Value: nil}})
	var r offline.ResliceReport
	if g.runCommand(0, &r, "reslice", "--slots", "2", "--dry-run"); r.Done || !r.DryRun || r.From != 1 || r.To != 2 || len(r.Slots) != 1 || r.Slots[0].Position == nil {
		t.Errorf("unexpected result %+v", r)
	}
	if text := g.runCommand(0, nil, "reslice", "--slots", "2", "--dry-run"); !strings.Contains(text, "nothing was done") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "reslice", "--slots", "2"); !strings.Contains(text, "divide it into 2 slots instead of 1") || !strings.Contains(text, "--yes") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "reslice", "--slots", "1"); !strings.Contains(text, "already has 1 slot") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if n, _ := docs.CountDocuments(t.Context(), bson.D{{Key: "control.paused", Value: true}}); n != 0 {
		t.Error("it was paused")
	}

	// A writer without slot: more slots would not divide its envelopes.
	box := g.state.Client().Database(g.state.Name() + "_shop").Collection("outbox")
	t.Cleanup(func() { _ = box.Database().Drop(context.WithoutCancel(t.Context())) })
	g.insertDocument(box, bson.D{{Key: "_id", Value: "a"}, {Key: "slot", Value: 7}})
	g.insertDocument(box, bson.D{{Key: "_id", Value: "b"}})
	ns := mongodb.Namespace(box)
	g.insertDocument(g.state.Collection("collections"), bson.D{{Key: "_id", Value: bson.Binary{Subtype: 4, Data: []byte("0123456789abcdef")}}, {Key: "ns", Value: ns}, {Key: "watcher", Value: "orders"}})
	if text := g.runCommand(exitConfig, nil, "reslice", "--slots", "2", "--yes"); !strings.Contains(text, "1 of the newest 2 envelopes of "+ns+" have no field slot") || !strings.Contains(text, "--allow-undivided") {
		t.Errorf("unexpected output:\n%s", text)
	}
	r = offline.ResliceReport{}
	if g.runCommand(0, &r, "reslice", "--slots", "2", "--dry-run", "--allow-undivided"); len(r.Undivided) != 1 || r.Undivided[0].Envelopes != 1 {
		t.Errorf("unexpected result %+v", r)
	}

	// A tenth of the envelopes may lack a slot, such as a malformed envelope that no watcher has
	// sent yet.
	for i := range 8 {
		g.insertDocument(box, bson.D{{Key: "_id", Value: i}, {Key: "slot", Value: 7}})
	}
	r = offline.ResliceReport{}
	if g.runCommand(0, &r, "reslice", "--slots", "2", "--dry-run"); len(r.Undivided) != 1 || r.Undivided[0].Newest != 10 {
		t.Errorf("unexpected result %+v", r)
	}

	g.insertDocument(docs, bson.D{{Key: "_id", Value: "orders/1of3"}})
	if text := g.runCommand(exitConfig, nil, "reslice", "--slots", "2", "--yes"); !strings.Contains(text, "run outrelay recover") {
		t.Errorf("unexpected output:\n%s", text)
	}

	g.env = append(g.env, "OUTRELAY_WATCHER=fresh")
	r = offline.ResliceReport{}
	if g.runCommand(0, &r, "reslice", "--slots", "3", "--yes"); !r.Done || r.From != 0 || r.To != 3 {
		t.Errorf("unexpected result %+v", r)
	}
}
