//go:build unix

package integration

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/test/kit"
)

// mustRun runs a command of the scene, which has to succeed.
func mustRun(t *testing.T, s *kit.Scene, args ...string) {
	t.Helper()
	if code, out, errOut := s.RunCommand(args...); code != 0 {
		t.Errorf("outrelay %s: exit code %d\n%s%s", strings.Join(args, " "), code, out, errOut)
	}
}

// stopRelay stops a relay as SIGTERM does.
func stopRelay(t *testing.T, p *kit.Process) {
	t.Helper()
	p.Terminate()
	if code := p.WaitExit(); code != 0 {
		t.Errorf("exit code %d of %s", code, p.Node)
	}
}

// newEvents returns events of one aggregate type and a few keys.
func newEvents(name string, n int) (list []event.Event) {
	for i := range n {
		list = append(list, kit.NewEvent("order", name, i, 30))
	}
	return list
}

// checkOnlyOnce checks that the records are exactly the events, each once and in order, and returns how many are flagged as repeats.
func checkOnlyOnce(t *testing.T, records []*kit.Record, events ...event.Event) (flagged int) {
	t.Helper()
	if len(records) != len(events) {
		t.Errorf("%d records, want %d", len(records), len(events))
	}

	want := map[string]int{}
	for i, e := range events {
		want[e.ID().String()] = i + 1
	}

	last := map[string]int{} // by key
	for _, r := range records {
		at := want[r.Header(record.HeaderID)]
		if at == 0 || at <= last[string(r.Key)] {
			t.Errorf("record %s@%d of key %s is none of the events, or out of order", r.Topic, r.Offset, r.Key)
		}

		last[string(r.Key)] = at
		if r.Header(record.HeaderRedelivered) != "" {
			flagged++
		}
	}
	return flagged
}

// The steps of "Another Kafka cluster" in docs/operate/moving.md: the new cluster gets the events that the old one does not have,
// each once.
func TestAWatcherMovesToAnotherKafkaCluster(t *testing.T) {
	t.Parallel()
	next := stacktest.Own(t, devstack.Options{Brokers: 1, Quick: true})
	s := kit.New(t, kit.Options{})
	// The doctor compares the retention with the oplog of the shared server.
	s.SetConfig("retention", "1m")
	onOld := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	before, during := newEvents("before", 200), newEvents("during", 50)
	s.AppendEvents(s.Outbox(), before...)
	onOld.WaitDistinct(len(before))

	stacktest.CreateTopicOn(t, next.Brokers(), s.TopicOf("order"), 6, 1)
	mustRun(t, s, "pause")
	s.WaitForStatus("the watcher is paused and nothing is in flight", func(st kit.Status) bool { return st.State == "paused" && st.Unresolved == 0 })
	s.AppendEvents(s.Outbox(), during...)
	stopRelay(t, p)

	s.SetConfig("kafka.brokers", next.Brokers())
	onNew := kit.ReadTopics(t, next.Brokers(), s.TopicOf("order"))
	p = s.StartRelay()
	p.WaitForLog("standing by")
	mustRun(t, s, "doctor")
	mustRun(t, s, "resume")
	onNew.WaitDistinct(len(during))
	after := newEvents("after", 50)
	s.AppendEvents(s.Outbox(), after...)
	onNew.WaitDistinct(len(during) + len(after))
	if bad := problemsAtStart(p.ReadLines(0)); len(bad) != 1 || !strings.Contains(bad[0].Message, "and this is cluster") {
		t.Errorf("the relay logs %q, want the change of the cluster in one line", bad)
	}

	stopRelay(t, p)
	onOld.WaitForEnd()
	onNew.WaitForEnd()
	if flagged := checkOnlyOnce(t, onOld.AllRecords(), before...) + checkOnlyOnce(t, onNew.AllRecords(), append(during, after...)...); flagged != 0 {
		t.Errorf("%d records are flagged as repeats", flagged)
	}
}

// The steps of "With a copy" in docs/operate/moving.md: the relay halts at the copy until it is adopted. Then it sends new events once,
// and may repeat the envelopes of the copy with the flag of repeats.
func TestAWatcherMovesToACopyOfItsReplicaSet(t *testing.T) {
	stacktest.OnlyWith(t, "it starts two replica sets", "slow")
	t.Parallel()
	next := stacktest.Own(t, devstack.Options{Mongods: 1, Quick: true})
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	before, after := newEvents("before", 50), newEvents("after", 50)
	s.AppendEvents(s.Outbox(), before...)
	topics.WaitDistinct(len(before))
	stopRelay(t, p)

	client, err := mongo.Connect(options.Client().ApplyURI(next.MongoURI()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Disconnect(t.Context()) })
	copyDatabase(t, s.DB, client)
	copyDatabase(t, s.State.Mongo(), client)
	s.SetConfig("mongodb.uri", next.MongoURI())

	p = s.StartRelay()
	p.WaitForLog("written on")
	var planned struct{ Envelopes int }
	if code, out, errOut := s.RunCommand("recover", "--accept-copy", "--dry-run", "--json"); code != 0 || json.Unmarshal([]byte(out), &planned) != nil {
		t.Errorf("exit code %d\n%s%s", code, out, errOut)
	}
	mustRun(t, s, "recover", "--accept-copy", "--yes")
	p.WaitTookOver()
	if line := p.WaitForLog("the gap is closed"); planned.Envelopes == 0 || !strings.Contains(line, fmt.Sprintf(" swept=%d ", planned.Envelopes)) {
		t.Errorf("the dry run has counted %d envelopes, and the owner logs %q", planned.Envelopes, line)
	}
	s.AppendEvents(client.Database(s.DB.Name()).Collection("outbox"), after...)
	topics.WaitDistinct(len(before) + len(after))

	stopRelay(t, p)
	topics.WaitForEnd()
	var later []*kit.Record
	delivered := map[string]int{}
	for _, r := range topics.AllRecords() {
		delivered[r.Header(record.HeaderID)]++
		if string(r.Key) == "after" {
			later = append(later, r)
		} else if again := delivered[r.Header(record.HeaderID)] > 1; (r.Header(record.HeaderRedelivered) == "true") != again {
			t.Errorf("event %s, delivery %d: the flag of repeats is %q", r.Header(record.HeaderID), delivered[r.Header(record.HeaderID)], r.Header(record.HeaderRedelivered))
		}
	}
	if flagged := checkOnlyOnce(t, later, after...); flagged != 0 {
		t.Errorf("%d new events are flagged as repeats", flagged)
	}
	for _, e := range before {
		if n := delivered[e.ID().String()]; n < 1 || n > 2 {
			t.Errorf("event %s was delivered %d times", e.ID(), n)
		}
	}
}

// "Restore the same cluster" in docs/operate/backup.md, of the state database only: the position is older than the records in Kafka, and
// the owner finds them by the read-back.
func TestARestoredPositionRepeatsNothingThatIsReadBack(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{})
	topics := s.ReadTopics()
	p := s.StartRelay()
	p.WaitTookOver()
	s.AppendEvents(s.Outbox(), newEvents("a", 100)...)
	topics.WaitDistinct(100)
	stopRelay(t, p)
	backup := s.WatcherDocument()

	p = s.StartRelay()
	p.WaitTookOver()
	s.AppendEvents(s.Outbox(), newEvents("b", 100)...)
	topics.WaitDistinct(200)
	stopRelay(t, p)
	if _, err := s.State.Collection("watchers").ReplaceOne(t.Context(), bson.D{{Key: "_id", Value: kit.WatcherID}}, backup); err != nil {
		t.Fatal(err)
	}

	s.StartRelay().WaitTookOver()
	s.AppendEvents(s.Outbox(), newEvents("c", 20)...)
	s.CheckDelivery(topics)
}

// copyDatabase copies all collections with their documents.
func copyDatabase(t *testing.T, from *mongo.Database, to *mongo.Client) {
	t.Helper()
	names, err := from.ListCollectionNames(t.Context(), bson.D{})
	if err != nil {
		t.Fatal(err)
	}

	for _, name := range names {
		cursor, err := from.Collection(name).Find(t.Context(), bson.D{})
		if err != nil {
			t.Fatal(err)
		}

		var all []bson.Raw
		if err := cursor.All(t.Context(), &all); err != nil {
			t.Fatal(err)
		}

		if len(all) == 0 {
			continue
		}

		if _, err := to.Database(from.Name()).Collection(name).InsertMany(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
}
