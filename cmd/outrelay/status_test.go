package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
)

func TestStatusCommand(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	var s statusReport
	d.runCommand(&s, exitOK, "status", "--check")
	if len(s.Slots) != 1 || s.Slots[0].Node != "one" || s.Slots[0].State != "live" || len(s.Nodes) != 2 || s.Counts.Scheduled != 3 || s.CountsProblem != "" || s.Problems == nil {
		t.Errorf("unexpected result %+v", s)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "status"), "default  0of1  one", "40/s", "default · lag 0.1 s · waiting 0 (oldest 0.0 s)", "scheduled 3", "dead 0 (0 of the relay, 0 of handlers)", "2 nodes, 0 stale", "no problems")
	d.runCommand(nil, exitOK, "pin", "one")
	expectTexts(t, d.runCommand(nil, exitConfig, "step-down"), "no other live node can take over default/0of1", "nothing of it is sent for 30s", "pass --force")
	d.runCommand(nil, exitOK, "step-down", "--force")
	d.runCommand(nil, exitOK, "pin", "two")
	var result controlResult
	d.runCommand(&result, exitOK, "step-down", "--hold", "10m", "--actor", "ann")
	if result.Watcher != "default" || !strings.Contains(result.Done, "does not acquire it") {
		t.Errorf("unexpected result %+v", result)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "status"), "pinned to node two", "node one does not take over until")
	// The next owner is not the node on hold.
	if _, err := d.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "node", Value: "two"}}}}); err != nil {
		t.Fatal(err)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "status"), "default  0of1  two", "node one does not take over until")
	d.runCommand(nil, exitOK, "pause", "--actor", "ann")
	expectTexts(t, d.runCommand(nil, exitOK, "status"), "WARN paused default is paused (for 0", "): ann paused it", "fix: outrelay resume")
	d.runCommand(nil, exitOK, "status", "--check")
	d.runCommand(nil, exitConfig, "status", "--check=warn")
	d.runCommand(nil, exitConfig, "status", "--check=bad")
	if _, err := d.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.Now().Add(-time.Minute)}}}, {Key: "$unset", Value: bson.D{{Key: "control", Value: ""}}},
	}); err != nil {
		t.Fatal(err)
	}

	expectTexts(t, d.runCommand(nil, exitConfig, "status", "--check"), "no-owner  -    0/s", "default · lag - · waiting", "FAIL no_owner No node sends for default (for ", "no process has its lease; live nodes: one, two", "fix: wait some seconds for a takeover")
	d.runCommand(nil, exitConfig, "status", "--every", "1ms")
	d.runCommand(nil, exitConfig, "status", "--follow", "--check")
}

func TestStatusIsWatched(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	out, _, end := d.startCommand("status", "--follow", "--every", "100ms", "--json")
	lines, _, endLines := d.startCommand("status", "-f", "--every", "100ms")
	first, _, _ := strings.Cut(out.waitForText(t, "\n", 2), "\n")
	var s statusReport
	if err := json.Unmarshal([]byte(first), &s); err != nil || len(s.Slots) != 1 {
		t.Errorf("%v: %q", err, first)
	}

	text := lines.waitForText(t, "default/0of1 owner=one epoch=7 state=live", 2)
	if strings.Contains(text, "\x1b") {
		t.Errorf("drawn where there is no terminal: %q", text)
	}

	expectTexts(t, text, "lag=0.12s rate=40/s waiting=0 scheduled=3 dead_relay=0 dead_handlers=0\n")
	for _, f := range []func() int{end, endLines} {
		if code := f(); code != exitOK {
			t.Errorf("exit code %d, want 0", code)
		}
	}
}

// If a server goes away, the status shows the error and tries again.
func TestAWatchBearsAServerThatDoesNotRespond(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	s := statusReport{Overview: admin.Overview{Watcher: "orders", Slots: []admin.SlotStatus{{Name: "orders", Slot: "0of1", State: "live"}}}}
	f := &screen{out: &b}
	for _, problem := range []error{nil, errors.New("MongoDB does not\nrespond"), nil} {
		if err := f.drawFrame(s.formatFrame(problem)); err != nil {
			t.Fatal(err)
		}
	}

	text := b.String()
	if strings.Count(text, "\x1b[2J") != 1 || strings.Count(text, "\x1b[H") != 3 || strings.Count(text, "\x1b[J") != 3 || !strings.Contains(text, "MongoDB does not respond\x1b[K\n") || strings.Count(text, "0of1") != 2 {
		t.Errorf("unexpected output %q", text)
	}
}

func TestPing(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	// No process listens on the port of the configured broker.
	expectTexts(t, d.runCommand(nil, exitTemporary, "ping"), "MongoDB responds, and Kafka does not: kafka: 127.0.0.1:1")

	d.env = append(d.env, "OUTRELAY_KAFKA_BROKERS="+strings.Join(stacktest.Brokers(t), ","))
	var pong admin.Pong
	d.runCommand(&pong, exitOK, "ping")
	if !pong.MongoDB || !pong.Storage || pong.RoundTripS <= 0 || !pong.Kafka || pong.KafkaRoundTripS <= 0 {
		t.Errorf("unexpected result %+v", pong)
	}
	expectTexts(t, d.runCommand(nil, exitOK, "ping"), "MongoDB responds in", "the state database exists", "Kafka accepts the login in")
	d.env = append(d.env, "OUTRELAY_STATE_DATABASE="+stacktest.Database(t, d.shop.Client()).Name())
	expectTexts(t, d.runCommand(nil, exitOK, "ping"), "no watcher has run")
	d.env = append(d.env, "OUTRELAY_MONGODB_URI=mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200")
	expectTexts(t, d.runCommand(nil, exitTemporary, "ping"), "MongoDB cannot be used: 127.0.0.1:1: connection refused")
}

// The figures of the owner are some seconds old, and status shows their age.
func TestStatusShowsTheAgeOfItsCounts(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for age, want := range map[time.Duration]string{0: "0 stale\n", 4 * time.Second: "0 stale · counted 4.0 s ago\n"} {
		var out strings.Builder
		statusReport{Overview: admin.Overview{At: now, CountedAt: now.Add(-age)}}.writeCounts(&out)
		if !strings.HasSuffix(out.String(), want) {
			t.Errorf("counts that are %v old: %q, want the end %q", age, out.String(), want)
		}
	}
}

// A node of another watcher is no node of this one.
func TestStatusCountsTheNodesOfItsWatcher(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	expectTexts(t, d.runCommand(nil, exitOK, "status"), "2 nodes, 0 stale")
	d.env = append(d.env, "OUTRELAY_WATCHER=other")
	expectTexts(t, d.runCommand(nil, exitOK, "status"), "other · lag", "0 nodes, 0 stale")
}
