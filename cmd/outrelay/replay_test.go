package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go"
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestReplayCommands(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	state, shop := statetest.New(t, client), stacktest.Database(t, client)
	plain, compacted := stacktest.Topic(t, 1), stacktest.Name(t)
	stacktest.CreateTopic(t, compacted, 1, kafka.ConfigEntry{ConfigName: "cleanup.policy", ConfigValue: "compact"})
	// Envelopes from an hour ago, and a watcher with a position after them.
	at := time.Now().Add(-time.Hour)
	for i, topic := range []string{plain, plain, compacted} {
		if _, err := shop.Collection("outbox").InsertOne(t.Context(), bson.D{
			{Key: "_id", Value: string(rune('a' + i))},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "7"},
			{Key: "type", Value: "Placed"},
			{Key: "payload", Value: nil},
			{Key: "topic", Value: topic},
			{Key: "ts", Value: bson.Timestamp{T: uint32(at.Unix()), I: uint32(i + 1)}},
		}); err != nil {
			t.Fatal(err)
		}
	}

	if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of1"}, {Key: "clusterTime", Value: bson.Timestamp{T: uint32(time.Now().Unix())}}}); err != nil {
		t.Fatal(err)
	}

	ns := shop.Name() + ".outbox"
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), [16]byte{1}, ns, "default", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}

	env := []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=" + strings.Join(stacktest.Brokers(t), ","),
		"OUTRELAY_STATE_DATABASE=" + state.Name(), "OUTRELAY_WATCH=" + ns, "OUTRELAY_NODE=n1",
	}

	decode := func(out string, v any) {
		t.Helper()
		if err := json.Unmarshal([]byte(out), v); err != nil {
			t.Fatalf("%v: %q", err, out)
		}
	}

	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--type", "Placed"}, "pass --from TIME"},
		{[]string{"--from", "soon"}, "--from"},
		{[]string{"--from", "1h", "--to", "2h"}, "--from must be before --to"},
		{[]string{"--from", "2h", "--rate", "-1"}, "--rate"},
		{[]string{"--from", "2h", "--resume", "x"}, "resume"},
		{[]string{"--resume", "x"}, "replay x: not found; outrelay replay list"},
		{[]string{"--from", "2h"}, "send 3 envelopes of watcher default again; pass --yes"},
		{[]string{"--from", "2h", "--yes"}, "compacted topics (" + compacted + ")"},
		{[]string{"--from", "2h", "--collection", "a.b"}, "a.b is not one of watcher default"},
	} {
		if code, out, errOut := runCommand(t, env, append([]string{"replay"}, c.args...)...); code != exitConfig || out != "" || !strings.Contains(errOut, c.want) {
			t.Errorf("%v: %d %q %q", c.args, code, out, errOut)
		}
	}

	var plan admin.ReplayPlan
	code, out, errOut := runCommand(t, env, "replay", "--from", "2h", "--dry-run", "--json")
	if decode(out, &plan); code != 0 || plan.Found != 3 || len(plan.Topics) != 2 || plan.Collections[0].Name != ns {
		t.Fatalf("%d %+v %s", code, plan, errOut)
	}
	if code, out, errOut = runCommand(t, env, "replay", "--from", "2h", "--dry-run"); code != 0 || !strings.Contains(out+errOut, "compacted: needs --force") || !strings.Contains(out+errOut, "3 envelopes would be sent again") {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}

	var i admin.ReplayInfo
	code, out, errOut = runCommand(t, env, "replay", "--from", "2h", "--topic", plain, "--yes", "--wait=false", "--json", "--actor", "ann")
	if decode(out, &i); code != 0 || i.Queued != 2 || i.State != "done" || i.Actor != "ann" {
		t.Fatalf("%d %+v %s", code, i, errOut)
	}
	if n, err := state.Collection("waiting").CountDocuments(t.Context(), bson.D{{Key: "reason", Value: "queued"}, {Key: "replayOf", Value: i.ID}, {Key: "delivery", Value: 1000}}); err != nil || n != 2 {
		t.Errorf("%d are queued, %v", n, err)
	}

	var list struct {
		Replays []admin.ReplayInfo `json:"replays"`
	}
	code, out, errOut = runCommand(t, env, "replay", "list", "--json")
	if decode(out, &list); code != 0 || len(list.Replays) != 1 || list.Replays[0].ID != i.ID {
		t.Errorf("%d %+v %s", code, list, errOut)
	}
	if code, out, errOut = runCommand(t, env, "replay", "list"); code != 0 || !strings.Contains(out+errOut, i.ID) {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	// The replay has queued everything. Resuming it only waits, and it cannot be canceled.
	if code, out, errOut = runCommand(t, env, "replay", "--resume", i.ID, "--wait=false"); code != 0 || !strings.Contains(out+errOut, "2 envelopes queued") {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	if code, _, _ = runCommand(t, env, "replay", "cancel", i.ID); code != exitConfig {
		t.Errorf("a replay that is done was cancelled: %d", code)
	}
	if code, out, errOut = runCommand(t, env, "replay", "--from", "2h", "--force", "--yes", "--wait=false"); code != 0 || !strings.Contains(out+errOut, "1 envelope queued") {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
}
