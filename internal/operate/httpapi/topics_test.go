package httpapi

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

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

// A topic is created by a request, after a dry run, and not twice.
func TestATopicIsCreated(t *testing.T) {
	t.Parallel()
	s := openSite(t)
	var created admin.TopicCreated
	s.mustCall(&created, "POST", "/api/v1/topics/create", `{"topic":"invoices","partitions":3,"dry_run":true}`)
	if !created.DryRun || created.Partitions != 3 || created.Command == "" {
		t.Errorf("dry run: %+v", created)
	}
	s.mustCall(&created, "POST", "/api/v1/topics/create", `{"topic":"invoices"}`)
	if created.DryRun || created.Topic != "invoices" {
		t.Errorf("%+v", created)
	}

	var log admin.Page[admin.AuditEntry]
	s.mustCall(&log, "GET", "/api/v1/audit?kind=topic_created", "")
	// The brokers have chosen the numbers, which are unknown.
	if len(log.Items) != 1 || strings.Contains(string(log.Items[0].Fields), "partitions") || strings.Contains(string(log.Items[0].Fields), "replication") {
		t.Errorf("audit log: %+v", log)
	}
	if response := s.call("POST", "/api/v1/topics/create", `{"topic":"taken"}`); response.status != 409 {
		t.Errorf("a topic that exists: %d %s", response.status, response.body)
	}
}

// The problem of a topic that was deleted has the number of partitions that it needs, and so has the slot that reports it.
func TestAProblemHasTheNeededPartitions(t *testing.T) {
	t.Parallel()
	s := openSite(t, func(options *AdminOptions) {
		options.Operator.TopicCommand = func(topic, kind string, partitions int) string { return fmt.Sprint(topic, " ", kind, " ", partitions) }
	})
	unwritable := bson.A{
		bson.D{{Key: "topic", Value: "invoices"}, {Key: "kind", Value: "missing"}, {Key: "partitions", Value: 6}, {Key: "since", Value: time.Now()}, {Key: "count", Value: 2}},
		bson.D{{Key: "topic", Value: "new"}, {Key: "kind", Value: "missing"}, {Key: "since", Value: time.Now()}, {Key: "count", Value: 1}},
	}
	_, err := s.state.Collection("watchers").UpdateMany(t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{
		{Key: "owner", Value: "n1/a"},
		{Key: "node", Value: "n1"},
		{Key: "expiresAt", Value: time.Now().Add(time.Hour)},
		{Key: "stats", Value: bson.D{{Key: "at", Value: time.Now()}, {Key: "state", Value: "live"}, {Key: "unwritable", Value: unwritable}}},
	}}})
	if err != nil {
		t.Fatal(err)
	}

	var listed struct{ Problems []map[string]any }
	s.mustCall(&listed, "GET", "/api/v1/problems", "")
	found := map[any]any{}
	for _, problem := range listed.Problems {
		if problem["kind"] == "topic_unwritable" {
			found[problem["object"]] = fmt.Sprint(problem["partitions"], ", ", problem["command"])
		}
	}
	if want := map[any]any{"invoices": "6, invoices missing 6", "new": "<nil>, new missing 0"}; !maps.Equal(found, want) {
		t.Errorf("got the problems %v, want %v", found, want)
	}

	var status struct {
		Slots []struct{ Unwritable []map[string]any }
	}
	s.mustCall(&status, "GET", "/api/v1/watchers", "")
	if len(status.Slots) != 1 || len(status.Slots[0].Unwritable) != 2 || status.Slots[0].Unwritable[0]["partitions"] != 6.0 || status.Slots[0].Unwritable[1]["partitions"] != nil {
		t.Errorf("got %+v, want 6 partitions of the first topic alone", status)
	}
}
