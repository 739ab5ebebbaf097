//go:build unix

package fault

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/test/kit"
)

// insertForeign inserts envelopes without a timestamp, like a writer that does not use outrelay.
func insertForeign(t *testing.T, s *kit.Scene, n int, id func(i int) any) {
	t.Helper()
	for i := range n {
		doc, entry := newForeign(t, s, id(i), "order", fmt.Sprintf("foreign-k%d", i%7))
		_, err := s.Outbox().InsertOne(t.Context(), doc)
		mustSucceed(t, err)
		s.Ledger.Add(entry)
	}
}

// newForeign returns an envelope without a timestamp, and its entry in the ledger.
func newForeign(t *testing.T, s *kit.Scene, id any, aggregateType, key string) (bson.D, kit.Entry) {
	t.Helper()
	text := textOfID(t, id)
	doc := bson.D{
		{Key: "_id", Value: id},
		{Key: "aggregatetype", Value: aggregateType},
		{Key: "aggregateid", Value: key},
		{Key: "type", Value: "Changed"},
		{Key: "payload", Value: bson.Binary{Data: []byte(text)}},
	}
	return doc, kit.Entry{NS: s.DB.Name() + ".outbox", ID: text, Key: key, Topics: s.Route(aggregateType), Payload: []byte(text)}
}

// The kinds of ids of other writers. The first two contain a time.
var idKinds = []string{"ObjectId", "UUIDv7", "UUIDv4", "text"}

// foreignID returns an id of the kind i modulo four, made at a time.
func foreignID(i int, at time.Time, prefix string) any {
	switch idKinds[i%len(idKinds)] {
	case "ObjectId":
		id, fresh := outboxes.FirstObjectID(at), bson.NewObjectID()
		copy(id[4:], fresh[4:])
		return id
	case "UUIDv7":
		id, fresh := outboxes.FirstUUID(at), uuid.New()
		copy(id.Data[6:], fresh[6:])
		id.Data[6] = 0x70 | id.Data[6]&0x0f
		return id
	case "UUIDv4":
		fresh := uuid.New()
		return bson.Binary{Subtype: bson.TypeBinaryUUID, Data: fresh[:]}
	}

	return fmt.Sprintf("%s-%d", prefix, i)
}

// textOfID returns an id in the format of the record header.
func textOfID(t *testing.T, id any) string {
	t.Helper()
	typ, val, err := bson.MarshalValue(id)
	mustSucceed(t, err)
	return idText(bson.RawValue{Type: typ, Value: val})
}

// mergeForeign copies 60 old envelopes without a timestamp from another collection into the outbox by $merge.
func mergeForeign(t *testing.T, s *kit.Scene, name, aggregateType string, age time.Duration) {
	t.Helper()
	archive := s.DB.Collection("archive_" + name)
	for i := range 60 {
		key := fmt.Sprintf("%s-%s-%d", name, idKinds[i%len(idKinds)], i)
		doc, entry := newForeign(t, s, foreignID(i, time.Now().Add(-age), name), aggregateType, key)
		_, err := archive.InsertOne(t.Context(), doc)
		mustSucceed(t, err)
		s.Ledger.Add(entry)
	}

	cur, err := archive.Aggregate(t.Context(), mongo.Pipeline{{{Key: "$merge", Value: bson.D{{Key: "into", Value: "outbox"}}}}})
	mustSucceed(t, err)
	mustSucceed(t, cur.Close(t.Context()))
}

// Envelopes without a timestamp that $merge copies into the outbox have ids that look old. They are delivered once, while the relay
// runs and after it did not run. The purge removes the envelopes with a time in their ids, but none that the stream has not read. An
// envelope that waits for its topic is delivered although the purge has removed it from the outbox.
func TestN25_OldCopiesAreReadBeforeThePurge(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"retention": "1m", "purge.interval": "1s", "purge.batch": 10})})
	history := s.FollowWatcher()
	topics := s.ReadTopics("order", "late")
	count := func(name, kinds string) int {
		return s.CountOutbox(bson.D{{Key: "aggregateid", Value: bson.Regex{Pattern: "^" + name + "-(" + kinds + ")-"}}})
	}
	const timed = "ObjectId|UUIDv7"
	waitPurged := func(name string) {
		t.Helper()
		stacktest.Eventually(t, "the copies "+name+" are purged", func() bool { return count(name, timed) == 0 })
	}

	// The topic of the first copies does not exist yet.
	p := s.StartRelay()
	p.WaitTookOver()
	mergeForeign(t, s, "held", "late", 3*time.Hour)
	mergeForeign(t, s, "running", "order", 3*time.Hour)
	waitPurged("running")
	waitPurged("held")
	s.CreateTopic("late", 3, 1)
	t.Log(s.CheckDelivery(topics))

	p.Terminate()
	p.WaitExit()
	mergeForeign(t, s, "down", "order", 3*time.Hour)
	p = s.StartRelay()
	p.WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	waitPurged("down")

	// Ids that are days old count as without a time, so the purge gives these envelopes a stamp, and the retention counts from it.
	p.Terminate()
	p.WaitExit()
	mergeForeign(t, s, "days", "order", 1000*time.Hour)
	s.StartRelay().WaitTookOver()
	t.Log(s.CheckDelivery(topics))
	if n := count("days", ".*"); n != 60 {
		t.Errorf("%d of 60 copies with an irregular id are left within their retention", n)
	}
	s.WaitNoneHeld()
	history.CheckHistory()
}

// If the history is lost before the relay reads such copies, the sweep delivers them, although the times in their ids are older than any
// that it would repeat: the purge has recorded up to which time it has removed envelopes.
func TestN25_OldCopiesInALostHistoryAreSwept(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"retention": "1m", "purge.interval": "1s"})})
	topics := s.ReadTopics("order")
	p := s.StartRelay()
	p.WaitTookOver()
	insertForeign(t, s, 20, func(i int) any { return foreignID(i, time.Now(), "before") })
	s.CheckDelivery(topics)
	stacktest.Eventually(t, "the purge has recorded where it has come", func() bool {
		recorded := bson.D{{Key: "purgedIds", Value: bson.D{{Key: "$gt", Value: bson.Timestamp{}}}}}
		n, err := s.State.Collection("collections").CountDocuments(t.Context(), recorded)
		return err == nil && n == 1
	})
	p.Terminate()
	p.WaitExit()

	mergeForeign(t, s, "lost", "order", 1000*time.Hour)
	startAfterLostHistory(t, s)
	checkSwept(t, s, topics)
	stacktest.Eventually(t, "the copies with a time in their ids are purged", func() bool {
		return s.CountOutbox(bson.D{{Key: "aggregateid", Value: bson.Regex{Pattern: "^lost-(ObjectId|UUIDv7)-"}}}) == 0
	})
}

// startAfterLostHistory starts a relay that finds neither its token nor the time of its position, and blocks until it has closed the gap.
func startAfterLostHistory(t *testing.T, s *kit.Scene) *kit.Process {
	t.Helper()
	node := "n2-" + s.Prefix[len(s.Prefix)-8:]
	lost := stacktest.FailCommand(t, "outrelay stream "+node, bson.D{{Key: "times", Value: 2}},
		bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 286}})
	p := s.StartRelay()
	p.WaitForLog("the gap is closed")
	lost()
	return p
}

// With a retention that is longer than the margin for clocks, the purge has not come to the ids of such copies when the history is lost. The
// sweep delivers them, because the purge will remove them. Without a purge they stay, and a warning names the command that delivers them.
func TestN25_OldCopiesWithinTheRetention(t *testing.T) {
	t.Parallel()
	for _, retention := range []string{"2000h", "0"} {
		t.Run(retention, func(t *testing.T) {
			t.Parallel()
			s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"retention": retention})})
			topics := s.ReadTopics("order")
			p := s.StartRelay()
			p.WaitTookOver()
			insertForeign(t, s, 20, func(i int) any { return foreignID(i, time.Now(), "before") })
			s.CheckDelivery(topics)
			p.Terminate()
			p.WaitExit()

			if retention == "0" {
				startAfterLostHistory(t, s).WaitForLog("the sweep leaves out envelopes without ts")
				return
			}
			mergeForeign(t, s, "lost", "order", 1000*time.Hour)
			startAfterLostHistory(t, s)
			checkSwept(t, s, topics)
		})
	}
}
