package httpapi

import (
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/activity"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

// A process that owns no slot serves the report of the owner.
func TestTopicsAndRecentEvents(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	now := time.Now().UTC().Truncate(time.Millisecond)
	if err := nodes.NewHistory(s.state.Collection("history")).SaveActivity(t.Context(), "orders/"+"0of1", activity.Report{
		At: now, Topics: []activity.Topic{{Topic: "outbox.event.order", Rate: 12, P50MS: 2, P99MS: 9, LastAt: now, Partition: 1, Offset: 42}},
		Events: []activity.Event{
			{ID: "e-2", Topic: "outbox.event.order", Partition: 1, Offset: 42, CommittedAt: now.Add(-2 * time.Millisecond), AckedAt: now},
			{ID: "e-1", Topic: "audit", AckedAt: now.Add(-time.Second)},
		},
	}); err != nil {
		t.Fatal(err)
	}
	s.insertDead("letter")

	var list admin.TopicList
	s.mustCall(&list, "GET", "/api/v1/topics", "")
	// The topic with a dead letter comes first.
	at := slices.IndexFunc(list.Topics, func(topic admin.TopicFigures) bool { return topic.Topic == "outbox.event.order" })
	if at != 1 || list.Topics[at].Rate != 12 || list.Topics[at].LastOffset != 42 {
		t.Errorf("%d: %+v", at, list)
	}
	var dead int64
	for _, one := range list.Topics {
		dead += one.Dead
	}
	if dead != 1 {
		t.Errorf("%d dead letters in %+v", dead, list.Topics)
	}

	var recent admin.RecentEvents
	s.mustCall(&recent, "GET", "/api/v1/topics/recent", "")
	if len(recent.Events) != 2 || recent.Events[0].ID != "e-2" || *recent.Events[0].LatencyMS != 2 {
		t.Errorf("%+v", recent)
	}
	s.mustCall(&recent, "GET", "/api/v1/topics/recent?topic=audit", "")
	if len(recent.Events) != 1 || recent.Events[0].ID != "e-1" {
		t.Errorf("%+v", recent)
	}
}
