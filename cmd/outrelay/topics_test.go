package main

import (
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

func TestTopicsCommands(t *testing.T) {
	t.Parallel()
	d := newDeployment(t)
	expectTexts(t, d.runCommand(nil, exitOK, "topics", "recent"), "no delivered event is known")

	now := time.Now()
	if err := nodes.NewHistory(d.state.Collection("history")).SaveActivity(t.Context(), "default/0of1", activity.Report{
		At: now, Others: activity.Others{Topics: 3, Rate: 2},
		Topics: []activity.Topic{{Topic: "orders", Rate: 12.34, Bytes: 2048, Records: 740, P50MS: 1.5, P99MS: 2500, LastAt: now, Partition: 2, Offset: 41}, {Topic: "quiet", LastAt: now}},
		Events: []activity.Event{
			{ID: "e-2", Type: "OrderPlaced", Key: "customer-7", Topic: "orders", Partition: 2, Offset: 41, CommittedAt: now.Add(-3 * time.Millisecond), AckedAt: now},
			{ID: "e-1", Topic: "audit", AckedAt: now},
		},
	}); err != nil {
		t.Fatal(err)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "topics"), "orders  12.3/s  2.0 KiB/s  1.5 ms  2.5 s", "2@41", "3 more topics, 2.0/s")
	var list admin.TopicList
	d.runCommand(&list, exitOK, "topics")
	if len(list.Topics) != 2 || list.Topics[0].LastOffset != 41 {
		t.Errorf("%+v", list)
	}

	expectTexts(t, d.runCommand(nil, exitOK, "topics", "recent"), "e-2", "customer-7", "2@41", " 3 ms", "e-1")
	if text := d.runCommand(nil, exitOK, "topics", "recent", "--topic", "audit"); strings.Contains(text, "e-2") || !strings.Contains(text, "e-1") {
		t.Errorf("only one topic: %s", text)
	}
}
