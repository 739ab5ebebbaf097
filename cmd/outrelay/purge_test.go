package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/statetest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

func TestPurgeAndHistoryCommands(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	state, shop := statetest.New(t, client), stacktest.Database(t, client)
	coll := shop.Collection("outbox")
	if err := outboxes.EnsureIndexes(t.Context(), coll); err != nil {
		t.Fatal(err)
	}
	found, err := outboxes.ListOutboxes(t.Context(), client, func(_, _ []byte) bool { return true }, shop.Name())
	if err != nil || len(found) != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	if _, err := outboxes.NewRegistry(state.Collection("collections")).Register(t.Context(), found[0].UUID, found[0].NS(), "default", bson.Timestamp{}); err != nil {
		t.Fatal(err)
	}
	now := uint32(time.Now().Unix())
	if _, err := state.Collection("watchers").InsertOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of1"}, {Key: "clusterTime", Value: bson.Timestamp{T: now}}}); err != nil {
		t.Fatal(err)
	}
	var docs []any
	for i := range 1234 {
		docs = append(docs, bson.D{
			{Key: "_id", Value: "id-" + formatThousands(int64(i))},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: int32(i % 3)},
			{Key: "type", Value: "Placed"},
			{Key: "ts", Value: bson.Timestamp{T: now - 1800, I: uint32(i + 1)}},
			{Key: "sentAt", Value: time.Now()},
			{Key: "sent", Value: bson.A{bson.D{{Key: "topic", Value: "orders"}, {Key: "partition", Value: int32(2)}, {Key: "offset", Value: int64(i)}}}},
		})
	}
	if _, err := coll.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	env := []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_STATE_DATABASE=" + state.Name(), "OUTRELAY_WATCH=" + shop.Name() + ".outbox", "OUTRELAY_NODE=n1", "OUTRELAY_PURGE_RATE=0",
	}
	expect := func(wantCode int, want string, args ...string) string {
		t.Helper()
		code, out, errOut := runCommand(t, env, args...)
		if code != wantCode || !strings.Contains(out+errOut, want) {
			t.Errorf("%v: code %d, want %d with %q in: %s", args, code, wantCode, want, errOut)
		}
		return out
	}
	var h admin.History
	if out := expect(0, "", "history", "--key", "1", "--limit", "5", "--json"); json.Unmarshal([]byte(out), &h) != nil || len(h.Items) != 5 || h.Next == "" || h.Items[1].Sent[0].Offset != 4 {
		t.Errorf("history: %s", out)
	}
	if out := expect(0, "", "history", "--key", "1", "--limit", "5", "--after", h.Next, "--json"); json.Unmarshal([]byte(out), &h) != nil || h.Items[0].ID != "id-16" {
		t.Errorf("history, second page: %s", out)
	}
	expect(0, "orders/2@7", "history", "--id", "id-7")
	expect(0, "orders/2@1233", "history", "--id", "id-1,233")
	expect(0, "there may be more: --after", "history", "--limit", "2")
	expect(0, "only with recording: mark", "history", "--from", "10m")
	expect(exitConfig, "--from must be before --to", "history", "--from", "1m", "--to", "2m")
	expect(exitConfig, "from 1 to 10000", "history", "--limit", "0")
	expect(exitConfig, "id", "history", "--id", "x", "--key", "y")
	expect(exitConfig, "invalid cursor", "history", "--after", "nonsense")

	expect(0, "nothing to remove is older than 24h0m0s", "purge")
	expect(exitConfig, `--older-than "soon"`, "purge", "--older-than", "soon")
	expect(exitConfig, "pass -1 for no limit", "purge", "--rate", "0")
	expect(exitConfig, "is not registered for a.b", "purge", "--collection", "a.b")
	expect(0, "1,234 envelopes would be removed; nothing was done", "purge", "--older-than", "10m", "--dry-run")
	expect(exitConfig, "remove 1,234 envelopes of watcher default that were delivered; pass --yes", "purge", "--older-than", "10m")
	var r admin.PurgeReport
	out := expect(0, "", "purge", "--older-than", "10m", "--collection", found[0].NS(), "--json", "-y", "--actor", "ann", "--rate", "-1")
	if err := json.Unmarshal([]byte(out), &r); err != nil || r.Removed != 1234 || r.Purgeable != 1234 || r.DryRun || r.Collections[0].Watcher != "default/0of1" {
		t.Errorf("%v, %s", err, out)
	}
	if n, err := coll.CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 {
		t.Errorf("%d left, %v", n, err)
	}
	env = append(env, "OUTRELAY_RETENTION=0s")
	expect(exitConfig, "retention is 0, which keeps envelopes forever", "purge")
}
