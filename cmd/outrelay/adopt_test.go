package main

import (
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/adopt"
)

// internal/lab/adopt tests the checks, and test/migrate the hand-over.
func TestAdoptCommand(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	if text := g.runCommand(exitConfig, nil, "adopt"); !strings.Contains(text, "offsets-file") {
		t.Errorf("without a source:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "adopt", "--at", "2026-11-20T08:00"); !strings.Contains(text, "has no time zone") {
		t.Errorf("a time without a zone:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "adopt", "--at", "2001-11-20T08:00:00Z", "--yes"); !strings.Contains(text, "the oplog begins at") {
		t.Errorf("a time before the oplog:\n%s", text)
	}

	at := time.Now().UTC().Format(time.RFC3339)
	g.insertDocument(g.outbox, bson.D{{Key: "_id", Value: "e1"}})
	var r adopt.Report
	if g.runCommand(0, &r, "adopt", "--at", at, "--dry-run"); r.Done || !r.DryRun || r.MaxRepeats != 1 || r.Source != "time" {
		t.Errorf("unexpected result %+v", r)
	}
	if text := g.runCommand(exitConfig, nil, "adopt", "--at", at); !strings.Contains(text, "up to 1 event a second time") || !strings.Contains(text, "--yes") {
		t.Errorf("without a confirmation:\n%s", text)
	}
	if text := g.runCommand(0, nil, "adopt", "--at", at, "--yes"); !strings.Contains(text, "repeats: at most 1 event\n") || !strings.Contains(text, "start outrelay run") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "adopt", "--at", at, "--yes"); !strings.Contains(text, "--replace") {
		t.Errorf("a second time:\n%s", text)
	}
}
