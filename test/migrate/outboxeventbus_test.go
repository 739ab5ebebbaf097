//go:build unix

package migrate

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/lab/importing"
)

// again is the number of events that outbox-event-bus has sent and outrelay sends as well.
const again = 50

// TestMoveFromOutboxEventBus moves services and pending rows as the guide describes, under load, and goes back.
func TestMoveFromOutboxEventBus(t *testing.T) {
	t.Parallel()
	stacktest.OnlyWith(t, "fetches outbox-event-bus with npm", "migrate.peers")
	s := newScene(t)
	s.ignoredHeaders = []string{"id", "type"} // outrelay's own
	s.writeConfig("topics:", "  template: "+s.topic)
	s.followTopic(s.topic, func(r *kgo.Record) string { return string(r.Key) })
	if err := os.CopyFS(s.dir, os.DirFS("outboxeventbus")); err != nil {
		t.Fatal(err)
	}
	s.runProgram("npm", "install", "--no-audit", "--no-fund")
	old := s.startPublisher("publisher")
	stopOld := s.writeEvents(s.insertRow)
	s.waitArrived("records of outbox-event-bus", func(events, _ int) bool { return events >= 1000 })

	// Instances of both versions run for a while: outrelay sends the envelopes, the publisher the rows.
	s.startRelay()
	s.writeEvents(s.insertEvent)
	more := s.countWritten() + 500
	s.waitArrived("records of both", func(events, _ int) bool { return events >= more })

	// The publisher stops first, so that there are rows to import. The services of the new version go on.
	s.endProgram(old, syscall.SIGTERM)
	s.waitWritten(s.countWritten() + 400)
	stopOld()
	s.forgetCompletion()
	var plan, r importing.Report
	s.runOutrelay(&plan, "import", "--from", "outbox-event-bus", "--dry-run")
	s.runOutrelay(&r, "import", "--from", "outbox-event-bus", "--yes")
	if !plan.DryRun || !r.Done || plan.Pending != r.Pending || r.Pending <= again || r.Rejected != 0 {
		t.Errorf("planned %+v, imported %+v", plan, r)
	}
	s.stopWriting()
	if repeats := s.checkRecords(again, false); repeats != again {
		t.Errorf("%d repeats instead of %d", repeats, again)
	}
	t.Logf("%d events, %d of them imported, %d repeats that were sent before", s.countWritten(), r.Pending, again)

	s.completeImported()
	s.writeEvents(s.insertRow)
	s.startPublisher("publisher-again")
	more = s.countWritten() + 500
	s.waitArrived("events after the way back", func(events, _ int) bool { return events >= more })
	s.stopWriting()
	if repeats := s.checkRecords(again, false); repeats != again {
		t.Errorf("the way back: %d repeats more", repeats-again)
	}
	t.Logf("after the way back: %d events, no further repeats", s.countWritten())
}

func (s *scene) startPublisher(name string) *exec.Cmd {
	s.t.Helper()
	return s.startProgram(name, []string{
		"MONGODB_URI=" + stacktest.MongoURI(s.t), "MONGODB_DATABASE=" + s.db.Name(), "BROKERS=" + strings.Join(stacktest.Brokers(s.t), ","), "TOPIC=" + s.topic,
	}, "node", "publisher.mjs")
}

// waitWritten blocks until n events are committed.
func (s *scene) waitWritten(n int) {
	s.t.Helper()
	s.waitArrived("inserts", func(int, int) bool { return len(s.written) >= n })
}

// insertRow inserts a row of outbox-event-bus. The adapter runs completed rows again when they expire, so they live longer than the test.
func (s *scene) insertRow(ctx context.Context, key string, n int) (string, error) {
	id, now := fmt.Sprintf("%s-%d", key, n), time.Now()
	_, err := s.db.Collection("outbox_events").InsertOne(ctx, bson.D{
		{Key: "eventId", Value: id},
		{Key: "type", Value: "order.created"},
		{Key: "payload", Value: bson.D{{Key: "number", Value: n}, {Key: "price", Value: 1.5}, {Key: "text", Value: "é <&>\u2028"}}},
		{Key: "occurredAt", Value: now},
		{Key: "status", Value: "created"},
		{Key: "retryCount", Value: int32(0)},
		{Key: "nextRetryAt", Value: now},
		{Key: "expireInSeconds", Value: int32(3600)},
		{Key: "keepAlive", Value: now},
	})
	return id, err
}

// insertEvent inserts the envelope of a service after the switch: its payload is the whole event.
func (s *scene) insertEvent(ctx context.Context, key string, n int) (string, error) {
	id := fmt.Sprintf("new-%s-%d", key, n)
	value, err := json.Marshal(map[string]any{"id": id, "type": "order.created", "payload": map[string]any{"number": n}, "occurredAt": time.Now()})
	if err != nil {
		return "", err
	}

	_, err = s.db.Collection("outbox").InsertOne(ctx, bson.D{
		{Key: "_id", Value: id},
		{Key: "aggregatetype", Value: "order"},
		{Key: "aggregateid", Value: id},
		{Key: "type", Value: "order.created"},
		{Key: "payload", Value: string(value)},
		{Key: "headers", Value: bson.A{bson.D{{Key: "k", Value: "eventType"}, {Key: "v", Value: "order.created"}}}},
		{Key: "ts", Value: bson.Timestamp{}},
	})
	return id, err
}

// forgetCompletion resets rows that the publisher has sent, so that outrelay sends them again and the records can be compared.
func (s *scene) forgetCompletion() {
	s.t.Helper()
	rows := s.db.Collection("outbox_events")

	cur, err := rows.Find(s.t.Context(), bson.D{{Key: "status", Value: "completed"}}, options.Find().SetLimit(again))
	if err != nil {
		s.t.Fatal(err)
	}

	var sent []struct {
		ID any `bson:"_id"`
	}
	if err := cur.All(s.t.Context(), &sent); err != nil {
		s.t.Fatal(err)
	}

	ids := bson.A{}
	for _, row := range sent {
		ids = append(ids, row.ID)
	}

	reset := bson.D{{Key: "$set", Value: bson.D{{Key: "status", Value: "created"}}}}
	if res, err := rows.UpdateMany(s.t.Context(), bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}, reset); err != nil || res.ModifiedCount != again {
		s.t.Fatalf("%+v, %v", res, err)
	}
}

// completeImported marks the imported rows as completed, by the commands of the guide. The rows of the publisher are old by then.
func (s *scene) completeImported() {
	s.t.Helper()

	rows := s.db.Collection("outbox_events")
	if _, err := rows.UpdateMany(s.t.Context(), bson.D{}, bson.D{{Key: "$set", Value: bson.D{{Key: "expireInSeconds", Value: int32(0)}}}}); err != nil {
		s.t.Fatal(err)
	}

	cur, err := s.state.Collection("imports").Find(s.t.Context(), bson.D{{Key: "_id.ns", Value: s.db.Name() + ".outbox_events"}})
	if err != nil {
		s.t.Fatal(err)
	}

	var marks []struct {
		ID struct {
			ID any `bson:"id"`
		} `bson:"_id"`
	}
	if err := cur.All(s.t.Context(), &marks); err != nil {
		s.t.Fatal(err)
	}

	ids := bson.A{}
	for _, m := range marks {
		ids = append(ids, m.ID.ID)
	}

	taken := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: ids}}}}
	filter := bson.D{{Key: "$or", Value: bson.A{taken, bson.D{{Key: "status", Value: "completed"}}}}}
	completed := bson.D{{Key: "$set", Value: bson.D{
		{Key: "status", Value: "completed"}, {Key: "keepAlive", Value: time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC)},
	}}}

	res, err := rows.UpdateMany(s.t.Context(), filter, completed)
	if err != nil || len(ids) == 0 || res.ModifiedCount < int64(len(ids)) {
		s.t.Fatalf("%d marks, %+v, %v", len(ids), res, err)
	}
}
