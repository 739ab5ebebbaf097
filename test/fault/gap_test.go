//go:build unix

package fault

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/pkg/event"
	"github.com/outrelay/outrelay/pkg/outbox"
	"github.com/outrelay/outrelay/test/kit"
)

// The relay was stopped for so long that the oplog has neither its token nor its time. It sweeps the outbox
// without an order, while services continue to write and a transaction spans the end of the gap. Other writers, whose
// envelopes have no timestamp, lose nothing either.
func TestLostHistoryIsSwept(t *testing.T) {
	t.Parallel()
	n := chooseRounds(8_000, 200_000)
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Mongo: devstack.MongoOptions{
		// The server truncates the oplog only up to a checkpoint.
		OplogMB: 4, Args: []string{"--syncdelay", "1"},
	}})
	s := kit.New(t, kit.Options{Stack: stack})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	first := s.StartRelay()
	first.WaitTookOver()
	s.StartLoad(kit.Load{Events: 500}).WaitDone()
	s.CheckDelivery(topics)
	first.Terminate()
	first.WaitExit()

	s.StartLoad(kit.Load{Events: n, PerTx: 40}).WaitDone()
	unstamped := startUnstampedScenes(t, stack)
	at, i := unstamped[len(unstamped)-1].WatcherDocument().Lookup("clusterTime").Timestamp()
	rollOverOplog(t, s, bson.Timestamp{T: at, I: i})
	for _, x := range unstamped {
		x.checkUnstamped(t)
	}
	live := s.StartLoad(kit.Load{Rate: steadyRate()})
	live.WaitCommitted(100)
	// The server aborts the transaction after a minute.
	slow := beginTransaction(t, s)
	second := s.StartRelay()
	second.WaitForLog("sweeping the outbox")
	slow.commit()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "slow", 3, 10))
	second.WaitForLog("the gap is closed")
	live.Stop()
	s.AppendEvents(s.Outbox(), kit.NewEvent("order", "slow", 4, 10))
	checkSwept(t, s, topics)
	history.CheckHistory()
	if gap := s.WatcherDocument().Lookup("gap"); gap.Type != 0 {
		t.Errorf("the watcher document still has the gap %s", gap)
	}
	// Operators see what was lost, until they acknowledge it.
	var stored struct{ Incidents []lease.Incident }
	if err := bson.Unmarshal(s.WatcherDocument(), &stored); err != nil {
		t.Fatal(err)
	}
	if len(stored.Incidents) != 1 || stored.Incidents[0].Lost == nil {
		t.Fatalf("incidents: %+v", stored.Incidents)
	}
	if lost := stored.Incidents[0].Lost; lost.Reason != "history_lost" || lost.Swept < int64(n) || lost.Repeats > lost.Swept-int64(n) || !lost.To.After(lost.From) {
		t.Errorf("lost history: %+v", lost)
	}
	for _, kind := range []string{"gap_found", "gap_closed"} {
		if c, err := s.State.Collection("audit").CountDocuments(t.Context(), bson.D{{Key: "kind", Value: kind}}); err != nil || c == 0 {
			t.Errorf("the audit log has no %s (%v)", kind, err)
		}
	}
	_, body := second.Get("/metrics")
	for _, want := range []string{`outrelay_gaps_total{reason="history_lost"} 1`, `outrelay_reconciled_total{class="swept"}`} {
		if !strings.Contains(body, want) {
			t.Errorf("the metrics do not contain %s", want)
		}
	}
}

// N25: writers insert envelopes without a timestamp, with ids of every kind. The clocks of some writers are hours off:
// only events of the last day are repeated. The clocks of others are days off: the relay notices that, and repeats
// everything.
func startUnstampedScenes(t *testing.T, stack *devstack.Stack) (scenes []*unstampedScene) {
	t.Helper()
	for _, c := range []struct {
		behind    []time.Duration
		irregular int64
	}{{[]time.Duration{0, 5 * time.Hour, -5 * time.Hour}, 0}, {[]time.Duration{0, 1000 * time.Hour}, 1}} {
		s := kit.New(t, kit.Options{Stack: stack})
		x := &unstampedScene{Scene: s, behind: c.behind, topics: s.ReadTopics()}
		scenes = append(scenes, x)
		p := s.StartRelay()
		p.WaitTookOver()
		x.insert(t, "before")
		s.CheckDelivery(x.topics)
		p.Terminate()
		p.WaitExit()

		irregular, err := s.State.Collection("collections").CountDocuments(t.Context(), bson.D{{Key: "irregularIds", Value: true}})
		if err != nil || irregular != c.irregular {
			t.Errorf("clocks behind by %v: %d collections with irregular ids, want %d (%v)", c.behind, irregular, c.irregular, err)
		}
		x.insert(t, "within")
	}
	return scenes
}

// checkUnstamped starts a relay after the history was lost.
func (x *unstampedScene) checkUnstamped(t *testing.T) {
	t.Helper()
	p := x.StartRelay()
	p.WaitForLog("the gap is closed")
	x.insert(t, "after")
	checkSwept(t, x.Scene, x.topics)
	p.Terminate()
	p.WaitExit()
}

// unstampedScene has writers whose clocks are behind by different times.
type unstampedScene struct {
	*kit.Scene
	behind []time.Duration
	topics *kit.Topics
}

func (x *unstampedScene) insert(t *testing.T, phase string) {
	t.Helper()
	insertForeign(t, x.Scene, 60, func(i int) any {
		return foreignID(i, time.Now().Add(-x.behind[i/4%len(x.behind)]), phase)
	})
}

// checkSwept checks the effects of a gap: no event is lost or out of order, and all duplicates are flagged.
func checkSwept(t *testing.T, s *kit.Scene, topics *kit.Topics) {
	t.Helper()
	v := s.CompareAtEnd(topics)
	t.Logf("%d events, %d records, %d duplicates", v.Events, v.Records, len(v.Duplicates))
	v.Duplicates = nil
	if !v.OK() {
		t.Errorf("promises are violated: %s", v)
	}
	checkRepeatsFlagged(t, topics)
}

// checkRepeatsFlagged fails the test for each record that repeats an event without the header for it. If a topic has grown, the
// copy may be in another partition, and the records of two partitions have no order.
func checkRepeatsFlagged(t *testing.T, topics *kit.Topics) {
	t.Helper()
	unflagged := map[string]bool{} // by id
	type place struct {
		id, topic string
		partition int32
	}
	copied := map[place]bool{}
	for _, r := range topics.AllRecords() {
		id := r.Header("id")
		at := place{id, r.Topic, r.Partition}
		if r.Header(record.HeaderRedelivered) == "true" {
			copied[at] = true
			continue
		}
		if unflagged[id] || copied[at] {
			t.Errorf("%s of key %s is repeated at %s/%d@%d without a flag", id, r.Key, r.Topic, r.Partition, r.Offset)
		}
		unflagged[id] = true
	}
}

// cappedPositionLost is a code of the server.
const cappedPositionLost = 136

// rollOverOplog writes to another collection until the oplog does not reach back to a position.
func rollOverOplog(t *testing.T, s *kit.Scene, position bson.Timestamp) {
	t.Helper()
	noise := s.Client.Database(s.Prefix + "_noise").Collection("noise")
	oplog := s.Client.Database("local").Collection("oplog.rs")

	stacktest.Eventually(t, "the oplog has lost the position", func() bool {
		for range 4 {
			if _, err := noise.InsertOne(t.Context(), bson.D{{Key: "bytes", Value: make([]byte, 512<<10)}}); err != nil {
				t.Fatal(err)
			}
		}

		var oldest struct {
			TS bson.Timestamp `bson:"ts"`
		}

		err := oplog.FindOne(t.Context(), bson.D{}, options.FindOne().SetSort(bson.D{{Key: "$natural", Value: 1}})).Decode(&oldest)
		// The server has removed the entry while it read it.
		if mongodb.HasCode(err, cappedPositionLost) {
			return false
		}
		mustSucceed(t, err)
		return oldest.TS.After(position)
	})
}

// open is a transaction that has appended and is not committed yet.
type open struct {
	t      *testing.T
	s      *kit.Scene
	sess   *mongo.Session
	events []event.Event
}

func beginTransaction(t *testing.T, s *kit.Scene) *open {
	t.Helper()
	o := &open{t: t, s: s, events: []event.Event{kit.NewEvent("order", "slow", 1, 10), kit.NewEvent("order", "slow", 2, 10)}}
	box, err := outbox.New(s.DB)
	if err == nil {
		o.sess, err = s.Client.StartSession()
	}
	if err == nil {
		t.Cleanup(func() { o.sess.EndSession(context.WithoutCancel(t.Context())) })
		err = o.sess.StartTransaction()
	}
	if err == nil {
		err = box.Append(mongo.NewSessionContext(t.Context(), o.sess), o.events...)
	}
	if err != nil {
		t.Fatal(err)
	}

	return o
}

func (o *open) commit() {
	o.t.Helper()
	if err := o.sess.CommitTransaction(o.t.Context()); err != nil {
		o.t.Fatal(err)
	}

	for _, e := range o.events {
		raw, err := e.MarshalBSON()
		if err != nil {
			o.t.Fatal(err)
		}
		_, payload := bson.Raw(raw).Lookup("payload").Binary()
		o.s.Ledger.Add(kit.Entry{
			NS: o.s.DB.Name() + ".outbox", ID: e.ID().String(), Key: e.Key(), Topics: []string{o.s.TopicOf("order")},
			Payload: payload, Headers: e.Headers(),
		})
	}
}

// operationTime returns the server's time after all writes so far.
func operationTime(t *testing.T, s *kit.Scene) bson.Timestamp {
	t.Helper()
	raw, err := s.Client.Database("admin").RunCommand(t.Context(), bson.D{{Key: "ping", Value: 1}}).Raw()
	if err != nil {
		t.Fatal(err)
	}
	at, i := raw.Lookup("operationTime").Timestamp()
	return bson.Timestamp{T: at, I: i}
}

// setGap changes the watcher document to that of an owner that died after it had written a gap.
func setGap(t *testing.T, s *kit.Scene, from bson.Timestamp) {
	t.Helper()
	gap := lease.Gap{Reason: "history_lost", From: from, To: operationTime(t, s), Since: time.Now()}
	if _, err := s.State.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: kit.WatcherID}},
		bson.D{{Key: "$set", Value: bson.D{{Key: "gap", Value: gap}}}}); err != nil {
		t.Fatal(err)
	}
}

// deliverSome runs a relay until some events are delivered, and stops it.
func deliverSome(t *testing.T, s *kit.Scene, topics *kit.Topics) {
	t.Helper()
	p := s.StartRelay()
	p.WaitTookOver()
	s.StartLoad(kit.Load{Events: 200}).WaitDone()
	s.CheckDelivery(topics)
	p.Terminate()
	p.WaitExit()
}

// An owner that is killed during a sweep leaves the gap in the watcher document. The next owner continues the
// sweep.
func TestSweepGoesOnAfterAKill(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: shortLeases(map[string]any{"lease.checkpoint": "10ms"})})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	deliverSome(t, s, topics)
	from, i := s.WatcherDocument().Lookup("clusterTime").Timestamp()
	s.StartLoad(kit.Load{Events: 8_000, PerTx: 60}).WaitDone()
	insertForeign(t, s, 200, func(i int) any { return foreignID(i, time.Now(), "swept") })
	setGap(t, s, bson.Timestamp{T: from, I: i})
	live := s.StartLoad(kit.Load{Rate: steadyRate()})
	dies := func(at string) (placed bool) {
		p := s.StartCrashing(at)
		if !p.Killed() {
			t.Fatalf("the relay did not die at %s\n%s", at, p.ReadLog())
		}
		gap, ok := s.WatcherDocument().Lookup("gap").DocumentOK()
		if !ok {
			t.Fatal("the watcher document has no gap")
		}
		if at, _ := s.WatcherDocument().Lookup("clusterTime").Timestamp(); at != from {
			t.Errorf("the position moved to %d while the gap %s is open", at, gap)
		}
		place, _ := gap.Lookup("cursor").Timestamp()
		return place >= from
	}

	dies("mid-sweep")
	// The second death is among the envelopes without a timestamp, which come first.
	dies("mid-sweep:100")
	// The cursor of the sweep is saved every 40 ms. A fast sweep ends before. In that case, sweep more
	// envelopes.
	for n := 4500; !dies(fmt.Sprintf("mid-sweep:%d", n)); n *= 2 {
		if n > 40_000 {
			t.Fatalf("a sweep of %d envelopes saved no cursor", n)
		}
		s.StartLoad(kit.Load{Events: 2 * n, PerTx: 60, Prefix: fmt.Sprintf("more-%d-", n)}).WaitDone()
		setGap(t, s, bson.Timestamp{T: from, I: i})
	}

	dies("mid-sweep:1500")
	last := s.StartRelay()
	last.WaitForLog("continuing the sweep")
	last.WaitForLog("the gap is closed")
	live.Stop()
	checkSwept(t, s, topics)
	cursor := bson.Timestamp{}
	for _, v := range history.Versions() {
		if v.Gap == nil {
			continue
		}
		if v.ClusterTime.T != from || v.ClusterTime.I != i {
			t.Errorf("epoch %d: the position is %v while the gap after %d.%d is open", v.Epoch, v.ClusterTime, from, i)
		}
		if v.Gap.Cursor.Before(cursor) {
			t.Errorf("epoch %d: the cursor of the sweep went back from %v to %v", v.Epoch, cursor, v.Gap.Cursor)
		}
		cursor = v.Gap.Cursor
	}

	if twice := len(topics.AllRecords()) - s.Ledger.CountCommitted(); twice > 2000 {
		t.Errorf("%d records are repeated: each sweep started from the beginning", twice)
	}
}

// With the policy halt, an operator decides.
func TestLostHistoryMayHalt(t *testing.T) {
	t.Parallel()
	s := kit.New(t, kit.Options{Set: map[string]any{"lost_history": "halt"}})
	topics := s.ReadTopics()
	deliverSome(t, s, topics)

	node := "n2-" + s.Prefix[len(s.Prefix)-8:]
	lost := stacktest.FailCommand(t, "outrelay stream "+node, "alwaysOn", bson.D{{Key: "failCommands", Value: bson.A{"aggregate"}}, {Key: "errorCode", Value: 286}})

	p := s.StartRelay()
	p.WaitForLog("set lost_history: sweep")
	lost()
	s.WaitForStatus("halted", func(st kit.Status) bool { return st.State == "halted" })

	p.Terminate()
	p.WaitExit()

	s.StartLoad(kit.Load{Events: 50}).WaitDone()
	// The oplog reaches back to the position, so the relay continues there.
	s.StartRelay()
	s.CheckDelivery(topics)
}

// The stream that is paused at the end of the gap is lost too, before all of the gap is delivered. The next
// round continues the sweep from there, and skips the envelopes that the first round has sent.
func TestHeldStreamIsLostToo(t *testing.T) {
	t.Parallel()
	stack := stacktest.Own(t, devstack.Options{Mongods: 1, Brokers: 1, Quick: true, Mongo: devstack.MongoOptions{
		OplogMB: 4, Args: []string{"--syncdelay", "1"},
	}})

	s := kit.New(t, kit.Options{Stack: stack})
	history := s.FollowWatcher()
	topics := s.ReadTopics()
	deliverSome(t, s, topics)
	p := s.StartRelay()
	p.WaitTookOver()
	before := s.Ledger.CountCommitted()
	broker := stack.Kafkas()[0]
	mustSucceed(t, broker.Pause())
	stacktest.FailTimes(t, s.Client, "outrelay stream "+p.Node, 2, bson.D{{Key: "failCommands", Value: bson.A{"getMore", "aggregate"}}, {Key: "errorCode", Value: int32(286)}})
	p.WaitForLog("sweeping the outbox")
	s.WaitForStatus("sweeping", func(st kit.Status) bool { return st.State == "sweeping" && st.Reason != "" })
	s.StartLoad(kit.Load{Events: 2000, PerTx: 40}).WaitDone()
	end, i := s.WatcherDocument().Lookup("gap", "to").Timestamp()
	rollOverOplog(t, s, bson.Timestamp{T: end, I: i})
	mustSucceed(t, broker.Resume())
	stacktest.Eventually(t, "two closed gaps", func() bool {
		n, err := s.State.Collection("audit").CountDocuments(t.Context(), bson.D{{Key: "kind", Value: "gap_closed"}})
		return err == nil && n == 2
	})

	s.StartLoad(kit.Load{Events: 100}).WaitDone()
	checkSwept(t, s, topics)
	history.CheckHistory()
	if known := fmt.Sprintf("known=%d ", before); !p.HasLogged(known) {
		t.Errorf("the second round does not skip the %d events of the first:\n%s", before, p.ReadLog())
	}
}
