package main

import (
	"fmt"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

func TestWaitingCommands(t *testing.T) {
	t.Parallel()
	g := newGraveyard(t, 3)
	for i, reason := range []string{"parked", "blocked", "blocked"} {
		e := admintest.Waits(t, mongodb.Namespace(g.outbox), bson.D{
			{Key: "_id", Value: fmt.Sprint("w", i)},
			{Key: "aggregatetype", Value: "order"},
			{Key: "aggregateid", Value: "7"},
			{Key: "type", Value: "OrderPlaced"},
			{Key: "payload", Value: plantedSecret},
			{Key: "key", Value: "seven"},
		}, waiting.Reason(reason), "orders")
		e.Pos = fmt.Sprintf("82%08X%08X", 1_700_000_000+i, 1)
		admintest.StoreWaiting(t, g.state.Collection("waiting"), e)
	}

	if text := g.runCommand(0, nil, "waiting", "summary"); !strings.Contains(text, "1      parked") || !strings.Contains(text, "2      blocked") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var sum struct{ Groups []admin.WaitingGroup }
	if g.runCommand(0, &sum, "waiting", "summary"); len(sum.Groups) != 2 || sum.Groups[0].Oldest == nil {
		t.Errorf("unexpected result %+v", sum)
	}
	if text := g.runCommand(0, nil, "waiting", "list", "--key", "seven", "--limit", "2"); !strings.Contains(text, "w0") || !strings.Contains(text, "w1") || strings.Contains(text, "w2") {
		t.Errorf("unexpected output:\n%s", text)
	}

	var page admin.Page[admin.WaitingEnvelope]
	if g.runCommand(0, &page, "waiting", "list", "--reason", "blocked", "--topic", "orders"); len(page.Items) != 2 || page.Items[0].ID != "w1" || page.Items[0].Key != "seven" {
		t.Errorf("unexpected result %+v", page)
	}
	if text := g.runCommand(0, nil, "waiting", "list", "--topic", "other"); text != "no envelope waits\n" {
		t.Errorf("unexpected output:\n%s", text)
	}

	for _, args := range [][]string{{"--reason", "dead"}, {"--limit", "0"}} {
		if text := g.runCommand(exitConfig, nil, append([]string{"waiting", "list"}, args...)...); !strings.Contains(text, strings.TrimPrefix(args[0], "--")) && !strings.Contains(text, "1000") {
			t.Errorf("%v: %s", args, text)
		}
	}
}
