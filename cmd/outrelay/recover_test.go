package main

import (
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
)

func TestRecoverCommand(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	ns := g.outbox.Database().Name() + ".outbox"
	for _, id := range []string{"a", "b"} {
		g.insertDocument(g.outbox, bson.D{{Key: "_id", Value: id}, {Key: "payload", Value: plantedSecret}})
	}

	gap := func() bool {
		n, err := g.state.Collection("watchers").CountDocuments(t.Context(), bson.D{{Key: "gap.reason", Value: bson.D{{Key: "$exists", Value: true}}}})
		if err != nil {
			t.Fatal(err)
		}
		return n == 1
	}

	if text := g.runCommand(0, nil, "recover", "--dry-run"); !strings.Contains(text, ns+": 2 envelopes") || !strings.Contains(text, "nothing was done") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "recover", "--from", "1h"); !strings.Contains(text, "deliver 2 envelopes again") || !strings.Contains(text, "--yes") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "recover", "--from", "yesterday", "--yes"); !strings.Contains(text, "--from") {
		t.Errorf("unexpected output:\n%s", text)
	}

	// The first two times have no zone, and the last time is in the future.
	for _, from := range []string{"2026-11-20T09:45", "2026-11-20", "2199-01-01T00:00:00Z"} {
		for _, how := range []string{"--dry-run", "--yes"} {
			if text := g.runCommand(exitConfig, nil, "recover", "--from", from, how); !strings.Contains(text, "zone") {
				t.Errorf("recover --from %s %s: %s", from, how, text)
			}
		}
	}

	skip := []string{"recover", "--skip", "--collection", ns, "--id", "a"}
	if text := g.runCommand(exitConfig, nil, skip...); !strings.Contains(text, "pass over the event a of "+ns) || !strings.Contains(text, "--yes") {
		t.Errorf("unexpected output:\n%s", text)
	}
	var skipped recoverResult
	if g.runCommand(0, &skipped, append(skip, "--yes")...); skipped.Skipped == nil || skipped.Skipped.ID != "a" || skipped.Skipped.Letter == "" {
		t.Errorf("unexpected result %+v", skipped)
	}
	g.runCommand(exitConfig, nil, "recover", "--collection", ns, "--id", "a", "--yes")

	g.runCommand(exitConfig, nil, "recover", "--accept-copy", "--release", ns)
	if gap() {
		t.Fatal("a sweep is ordered already")
	}

	var r recoverResult
	if g.runCommand(0, &r, "recover", "--yes", "--actor", "ann"); !r.Done || r.Action != "sweep" || r.Watcher != "orders" || !gap() {
		t.Errorf("unexpected result %+v", r)
	}

	n, err := g.state.Collection("audit").CountDocuments(t.Context(), bson.D{{Key: "kind", Value: "recover_ordered"}, {Key: "fields.actor", Value: "ann"}})
	if err != nil || n != 1 {
		t.Errorf("%d entries in the audit log, %v", n, err)
	}

	// The sweep that accepting a copy orders is counted like any other.
	if text := g.runCommand(0, nil, "recover", "--accept-copy", "--dry-run"); !strings.Contains(text, ns+": 2 envelopes") || !strings.Contains(text, "nothing was done") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "recover", "--accept-copy"); !strings.Contains(text, "accept the copied state and deliver 2 envelopes again") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var dry recoverResult
	if g.runCommand(0, &dry, "recover", "--release", ns, "--dry-run"); dry.Done || dry.Released != ns {
		t.Errorf("unexpected result %+v", dry)
	}
	if text := g.runCommand(0, nil, "recover", "--release", ns); text != "watcher orders: "+ns+" is released\n" {
		t.Errorf("unexpected output:\n%s", text)
	}

	g.runCommand(exitConfig, nil, "recover", "--release", ns)
	// There is nothing to count, but a sweep can still be ordered.
	if text := g.runCommand(exitConfig, nil, "recover"); !strings.Contains(text, "deliver all envelopes of the watcher again") {
		t.Errorf("unexpected output:\n%s", text)
	}
}
