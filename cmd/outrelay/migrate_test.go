package main

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/state"
)

func TestMigrateCommands(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	state, shop := state.Of(stacktest.Database(t, client)), stacktest.Database(t, client)
	for _, name := range []string{"outbox", "orders"} {
		if err := shop.CreateCollection(t.Context(), name); err != nil {
			t.Fatal(err)
		}
	}

	env := []string{
		"OUTRELAY_MONGODB_URI=" + stacktest.MongoURI(t), "OUTRELAY_KAFKA_BROKERS=127.0.0.1:1",
		"OUTRELAY_STATE_DATABASE=" + state.Name(), "OUTRELAY_WATCH=" + shop.Name() + ".outbox", "OUTRELAY_NODE=n1",
	}

	decode := func(out string, v any) {
		t.Helper()
		if err := json.Unmarshal([]byte(out), v); err != nil {
			t.Fatalf("%v: %q", err, out)
		}
	}

	var s admin.MigrationStatus
	code, out, errOut := runCommand(t, env, "migrate", "status", "--json")
	if decode(out, &s); code != 0 || len(s.Steps) == 0 || s.Steps[0].State != "pending" {
		t.Fatalf("%d %+v %s", code, s, errOut)
	}

	var v admin.Verification
	code, out, errOut = runCommand(t, env, "migrate", "verify", "--json")
	if decode(out, &v); code != exitConfig || len(v.Drift) == 0 || v.OK() {
		t.Fatalf("before: %d %+v %s", code, v, errOut)
	}
	if code, out, errOut = runCommand(t, env, "migrate", "up", "--dry-run", "--json"); code != 0 {
		t.Fatalf("exit code %d, stderr %s", code, errOut)
	}
	if decode(out, &s); s.Steps[0].State != "pending" {
		t.Errorf("the dry run did it: %+v", s)
	}

	var r admin.MigrationReport
	code, out, errOut = runCommand(t, env, "migrate", "up", "--json", "--actor", "ann")
	if decode(out, &r); code != 0 || !r.OK() || len(r.Applied) != len(s.Steps) {
		t.Fatalf("%d %+v %s", code, r, errOut)
	}
	if code, out, errOut = runCommand(t, env, "migrate", "status"); code != 0 || !strings.Contains(out+errOut, "applied") || !strings.Contains(out+errOut, "n1") {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	if err := shop.Collection("outbox").Indexes().DropOne(t.Context(), "ts_1"); err != nil {
		t.Fatal(err)
	}
	if code, out, errOut = runCommand(t, env, "migrate", "verify"); code != exitConfig || !strings.Contains(out+errOut, "ts_1") || !strings.Contains(out+errOut, `createIndex({"ts":1})`) {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	if code, out, errOut = runCommand(t, env, "migrate", "verify", "--repair"); code != exitConfig || !strings.Contains(out+errOut, "repair 1 index difference; pass --yes") {
		t.Errorf("without a question: %d %s", code, errOut)
	}
	if code, out, errOut = runCommand(t, env, "migrate", "verify", "--repair", "--yes"); code != 0 || !strings.Contains(out+errOut, "repaired") {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	if code, _, errOut = runCommand(t, env, "migrate", "verify"); code != 0 {
		t.Errorf("exit code %d, stderr %s", code, errOut)
	}
	if specs, err := shop.Collection("orders").Indexes().ListSpecifications(t.Context()); err != nil || len(specs) != 1 {
		t.Errorf("a collection that is not watched has %d indexes, %v", len(specs), err)
	}
}
