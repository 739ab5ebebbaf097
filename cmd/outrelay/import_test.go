package main

import (
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/importing"
)

// internal/lab/importing tests the sources.
func TestImportCommand(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 0)
	if text := g.runCommand(exitConfig, nil, "import"); !strings.Contains(text, "from") {
		t.Errorf("without a source:\n%s", text)
	}
	if text := g.runCommand(exitConfig, nil, "import", "--from", "cap"); !strings.Contains(text, "slimmessagebus, koan") {
		t.Errorf("an unknown source:\n%s", text)
	}
	for _, id := range []string{"m1", "m2"} {
		g.insertDocument(g.outbox.Database().Collection("outbox.messages"), bson.D{
			{Key: "MessageId", Value: id},
			{Key: "ContentType", Value: "application/json"},
			{Key: "MessageType", Value: "urn:message:Shop:Paid"},
			{Key: "Body", Value: "{}"},
			{Key: "SentTime", Value: time.Now()},
			{Key: "SequenceNumber", Value: int64(1)},
		})
	}

	var r importing.Report
	if g.runCommand(0, &r, "import", "--from", "masstransit", "--dry-run"); r.Done || !r.DryRun || r.Pending != 2 {
		t.Errorf("unexpected result %+v", r)
	}
	if text := g.runCommand(exitConfig, nil, "import", "--from", "masstransit"); !strings.Contains(text, "import 2 rows into") || !strings.Contains(text, "--yes") {
		t.Errorf("without a confirmation:\n%s", text)
	}
	if text := g.runCommand(0, nil, "import", "--from", "masstransit", "--yes"); !strings.Contains(text, "2 rows imported into") {
		t.Errorf("unexpected output:\n%s", text)
	}
	if text := g.runCommand(0, nil, "import", "--from", "masstransit", "--yes"); !strings.Contains(text, "imported before: 2") {
		t.Errorf("a second time:\n%s", text)
	}

	// A row that is left out is named, and the exit code is 1.
	g.insertDocument(g.outbox.Database().Collection("outbox.messages"), bson.D{
		{Key: "MessageId", Value: "bad"},
		{Key: "Headers", Value: "no JSON"},
		{Key: "ContentType", Value: "application/json"},
		{Key: "MessageType", Value: "urn:message:Shop:Paid"},
		{Key: "Body", Value: "{}"},
		{Key: "SentTime", Value: time.Now()},
		{Key: "SequenceNumber", Value: int64(2)},
	})
	expectTexts(t, g.runCommand(exitConfig, nil, "import", "--from", "masstransit", "--yes"), ": cannot be converted: the headers are not a JSON object")
}
