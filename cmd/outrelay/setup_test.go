package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/setup"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// The application's own database contains the outbox and the state.
func TestSetupCommand(t *testing.T) {
	t.Parallel()
	shop := stacktest.Database(t, stacktest.Client(t))
	for _, name := range []string{"outbox", "orders"} {
		if err := shop.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}
	env := []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_STATE_DATABASE=" + shop.Name(), "OUTRELAY_WATCH=" + shop.Name() + ".*", "OUTRELAY_NODE=n1",
	}
	run := func(want int, args ...string) (r setup.Report) {
		t.Helper()
		code, out, errOut := runCommand(t, env, append([]string{"setup", "--json"}, args...)...)
		if code != want || json.Unmarshal([]byte(out), &r) != nil {
			t.Fatalf("%v: %d %s %s", args, code, out, errOut)
		}
		return r
	}

	// Two indexes on each of the two outboxes, and all of the state.
	before := run(exitConfig, "--dry-run")
	if text := strings.Join(before.Created, "\n"); !strings.Contains(text, `createCollection("outrelay_watchers"`) || strings.Count(text, `"ts":1`) != 2 {
		t.Errorf("%s", text)
	}
	if r := run(exitOK); len(r.Created) != len(before.Created) || len(r.Rejected) != 0 {
		t.Errorf("%+v", r)
	}
	for range 2 {
		if r := run(exitOK, "--dry-run"); len(r.Created) != 0 {
			t.Errorf("something is missing: %q", r.Created)
		}
	}

	// A collection of others with one of the names is rejected by every command.
	if err := state.Of(shop).Collection("marker").Drop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"setup"}, {"status"}, {"pause"}} {
		if code, _, errOut := runCommand(t, env, args...); code != exitConfig || !strings.Contains(errOut, "was not created by outrelay") {
			t.Errorf("%v: %d %s", args, code, errOut)
		}
	}
}
