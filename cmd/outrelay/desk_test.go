package main

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// deployment is a state database with a watcher, whose owner is node one and whose standby is node two, and the
// database of a service.
type deployment struct {
	t        *testing.T
	env      []string
	state    state.Database
	shop     *mongo.Database
	one, two *nodes.Member
}

func newDeployment(t *testing.T) *deployment {
	t.Helper()
	env, coll := newScheduledShop(t)
	d := &deployment{t: t, env: env, shop: coll.Database()}
	d.state = state.Of(coll.Database().Client().Database(envValue(env, "OUTRELAY_STATE_DATABASE")))
	d.insertDocument(d.state.Collection("watchers"), bson.D{
		{Key: "_id", Value: "default/0of1"},
		{Key: "owner", Value: "one/x"},
		{Key: "node", Value: "one"},
		{Key: "epoch", Value: int64(7)},
		{Key: "expiresAt", Value: time.Now().Add(time.Hour)},
		{Key: "stats", Value: bson.D{{Key: "at", Value: time.Now()}, {Key: "state", Value: "live"}, {Key: "lagMs", Value: int64(120)}, {Key: "rate", Value: 40.0}}},
	})

	d.one, d.two = d.startNode("one"), d.startNode("two")
	return d
}

func (d *deployment) startNode(node string) *nodes.Member {
	d.t.Helper()
	m := nodes.New(nodes.Config{State: d.state, Node: node, Address: node + ":9464", Version: "1.4.0", Watcher: "default", Tasks: []nodes.Task{nodes.Relay, nodes.Cleaner}, Fingerprint: "abcdef012345"})
	if err := m.SendHeartbeat(d.t.Context(), nodes.Vitals{KafkaReachable: true, SinceAck: -1}); err != nil {
		d.t.Fatal(err)
	}
	// There are no further heartbeats, so this heartbeat must count for the duration of the test.
	d.setHeartbeat(node, time.Now().Add(time.Hour))
	return m
}

// setHeartbeat sets the time of the last heartbeat of a node.
func (d *deployment) setHeartbeat(node string, at time.Time) {
	d.t.Helper()
	res, err := d.state.Collection("nodes").UpdateOne(d.t.Context(), bson.D{{Key: "_id", Value: node}}, bson.D{{Key: "$set", Value: bson.D{{Key: "seenAt", Value: at}}}})
	if err != nil || res.MatchedCount != 1 {
		d.t.Fatalf("%s: %+v, %v", node, res, err)
	}
}

// tryWatcher writes the documents of a watcher that ran once.
func (d *deployment) tryWatcher(name string) {
	d.t.Helper()
	past := time.Now().Add(-time.Hour)
	d.insertDocument(d.state.Collection("watchers"), bson.D{{Key: "_id", Value: name + "/0of1"}, {Key: "node", Value: "gone"}, {Key: "epoch", Value: int64(1)}, {Key: "expiresAt", Value: past}})
	d.insertDocument(d.state.Collection("slots"), bson.D{{Key: "_id", Value: name}, {Key: "of", Value: 1}})
	d.insertDocument(d.state.Collection("history"), bson.D{{Key: "_id", Value: name + "/0of1"}})
	d.insertDocument(d.state.Collection("collections"), bson.D{
		{Key: "_id", Value: bson.Binary{Subtype: bson.TypeBinaryUUID, Data: bytes.Repeat([]byte{7}, 16)}},
		{Key: "ns", Value: "tried.outbox"},
		{Key: "watcher", Value: name},
	})
}

func (d *deployment) insertDocument(coll *mongo.Collection, doc bson.D) {
	d.t.Helper()
	if _, err := coll.InsertOne(d.t.Context(), doc); err != nil {
		d.t.Fatal(err)
	}
}

// runCommand runs a command and decodes its JSON into v, unless v is nil. It returns all output.
func (d *deployment) runCommand(v any, want int, args ...string) string {
	d.t.Helper()
	if v != nil {
		args = append(args, "--json")
	}

	code, out, errOut := runCommand(d.t, d.env, args...)
	if code != want {
		d.t.Fatalf("%v: exit code %d, want %d: %s", args, code, want, errOut)
	}
	if v != nil {
		if err := json.Unmarshal([]byte(out), v); err != nil {
			d.t.Fatalf("%v: %v: %q %q", args, err, out, errOut)
		}
	}
	return out + errOut
}

// expectTexts fails the test unless text contains each of want.
func expectTexts(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("no %q in:\n%s", w, text)
		}
	}
}

func TestNodesCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	var l struct{ Nodes []admin.Node }
	d.runCommand(&l, exitOK, "nodes", "--check")
	if len(l.Nodes) != 2 || l.Nodes[0].Node != "one" || l.Nodes[0].Phase != "owner" || !slices.Equal(l.Nodes[0].Slots, []string{"default/0of1"}) ||
		l.Nodes[1].Phase != "standby" || !slices.Equal(l.Nodes[1].Tasks, []string{"relay", "cleaner"}) || l.Nodes[1].Stale {
		t.Errorf("unexpected result %+v", l.Nodes)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "nodes"), "NODE", "one", "owner", "default/0of1", "two", "standby", "relay cleaner", "1.4.0", "abcdef ")

	if code, out, _ := runCommand(t, d.env, "__complete", "nodes", "release", ""); code != 0 || !strings.Contains(out, "one\n") || !strings.Contains(out, "two\n") {
		t.Errorf("completion: %d %q", code, out)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "nodes", "release", "one", "--dry-run"), "would release default/0of1")
	var r releasedNode
	d.runCommand(&r, exitOK, "nodes", "release", "one", "--hold", "5s", "--actor", "ann")
	if !slices.Equal(r.Slots, []string{"default/0of1"}) {
		t.Errorf("unexpected result %+v", r)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "nodes", "release", "two"), "owns no slots")
	d.runCommand(nil, exitConfig, "nodes", "release", "one", "--hold", "0s")

	expectTexts(t, d.runCommand(nil, exitConfig, "nodes", "remove", "two", "--yes"), "heartbeat")
	expectTexts(t, d.runCommand(nil, exitConfig, "nodes", "remove", "nobody", "--yes"), "nobody")
	d.setHeartbeat("two", time.Now().Add(-time.Hour))
	expectTexts(t, d.runCommand(nil, exitOK, "nodes"), "stale")
	expectTexts(t, d.runCommand(nil, exitConfig, "nodes", "remove", "two"), "pass --yes")
	d.runCommand(&r, exitOK, "nodes", "remove", "two", "--yes")
	d.runCommand(&l, exitOK, "nodes")
	if len(l.Nodes) != 1 || r.Node != "two" {
		t.Errorf("unexpected results %+v and %+v", l.Nodes, r)
	}
	if err := d.one.SendHeartbeat(t.Context(), nodes.Vitals{}); err != nil {
		t.Fatal(err)
	}
	d.setHeartbeat("one", time.Now().Add(time.Hour))
	// Node one does not reach Kafka.
	d.runCommand(nil, exitConfig, "nodes", "--check")
	if err := d.one.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	expectTexts(t, d.runCommand(nil, exitConfig, "nodes", "--check"), "no process runs")
}

func TestStorageCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	var counts admin.Counts
	d.runCommand(&counts, exitOK, "storage", "counts")
	if counts.Envelopes != 3 || counts.Scheduled != 3 {
		t.Errorf("unexpected result %+v", counts)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "storage", "counts"), "scheduled")

	var c admin.Cleared
	d.runCommand(&c, exitOK, "storage", "clear", "envelopes", "--dry-run")
	if c.Found != 3 || c.Removed != 0 || c.Confirm != "clear default" {
		t.Errorf("unexpected result %+v", c)
	}

	expectTexts(t, d.runCommand(nil, exitConfig, "storage", "clear", "envelopes", "--yes"), `pass --confirm "clear default"`)
	expectTexts(t, d.runCommand(nil, exitConfig, "storage", "clear", "envelopes", "--confirm", "yes"), "nothing was done", `"clear default"`)
	expectTexts(t, d.runCommand(nil, exitConfig, "storage", "clear", "envelopes", "--confirm", "clear default"), "owns slot")
	expectTexts(t, d.runCommand(nil, exitConfig, "storage", "clear", "everything", "--dry-run"), "cannot be cleared")
	d.runCommand(nil, exitConfig, "storage", "clear")
	d.runCommand(&c, exitOK, "storage", "clear", "envelopes", "audit", "--confirm", "clear default", "--force")
	if n, err := d.shop.Collection("outbox").CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 || c.Removed < 3 {
		t.Errorf("%d are left, %v: %+v", n, err, c)
	}
}

func TestWordsAreTyped(t *testing.T) {
	t.Parallel()
	var errOut bytes.Buffer
	a := &operatorCommand{p: &program{in: strings.NewReader(" clear orders \n"), errOut: &errOut}, interactive: true}
	if got, err := a.askForWords(t.Context(), "remove 7 documents", "clear orders"); err != nil || got != "clear orders" || !strings.Contains(errOut.String(), "This will remove 7 documents. Type clear orders to continue") {
		t.Errorf("%q, %v: %q", got, err, errOut.String())
	}
}
