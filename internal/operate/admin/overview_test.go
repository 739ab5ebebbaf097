package admin_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/base/health"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
	"github.com/outrelay/outrelay/internal/relay/figures"
	"github.com/outrelay/outrelay/internal/relay/problems"
	"github.com/outrelay/outrelay/internal/relay/stored/lease"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

var long = flag.Bool("admin.long", false, "measure the overview with a million envelopes and a hundred thousand dead letters")

// newDesk returns a desk of the office, without work in the background.
func (f *office) newDesk() admin.Operator {
	d := admin.New(admin.Operator{State: f.state, Watcher: "orders", Outboxes: f.outboxes})
	return d.For(admin.Actor{Name: "ann", Source: "test"})
}

func (f *office) outboxes(context.Context) ([]outboxes.Outbox, error) {
	return []outboxes.Outbox{{DB: f.a.Database().Name(), Coll: f.a.Name()}}, nil
}

// insertWaiting stores an envelope that waits after one failed attempt.
func (f *office) insertWaiting(coll *mongo.Collection, id, reason, key string, topics ...string) {
	f.t.Helper()
	doc := append(letterOf(id, planted), bson.E{Key: "key", Value: key})
	e := admintest.Waits(f.t, mongodb.Namespace(coll), doc, waiting.Reason(reason), topics...)
	e.Attempts = 1
	admintest.StoreWaiting(f.t, f.state.Collection("waiting"), e)
}

func TestOverviewCountsEverythingThatWaits(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	f.insertWaiting(f.a, "1", "retry", "k1", "orders")
	f.insertWaiting(f.a, "2", "blocked", "k1", "orders")
	f.insertWaiting(f.b, "3", "parked", "k2", "audit", "orders")
	f.moveToDead(f.a, record.Malformed, letterOf("dead1", planted))
	f.moveToDead(f.a, record.RecordRejected, letterOf("dead2", planted))
	f.requeueAndSend("dead2")
	if _, err := f.a.InsertOne(t.Context(), append(letterOf("later", planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)})); err != nil {
		t.Fatal(err)
	}
	// Two of three claimed envelopes are not sent yet.
	mustInsert(t, f.state.Collection(waiting.ClaimsName), bson.D{{Key: "_id", Value: "orders/0of1/1"}, {Key: "envelopes", Value: bson.A{1, 2, 3}}, {Key: "done", Value: bson.A{1}}})
	if _, err := nodes.NewNodes(f.state.Collection("nodes")).Heartbeat(t.Context(), nodes.Sign{Node: "n1", Watchers: []string{"orders"}, KafkaReachable: true, SinceAck: -1}); err != nil {
		t.Fatal(err)
	}

	o, err := k.Overview(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	c := o.Counts
	if c.Retry != 1 || c.Blocked != 1 || c.Parked != 2 || c.Scheduled != 3 || c.Dead != 1 || c.DeadAll != 2 || c.BlockedKeys != 3 {
		t.Errorf("%+v", c)
	}

	at := slices.IndexFunc(o.WaitingTopics, func(p admin.WaitingTopic) bool { return p.Topic == "orders" })
	if at < 0 || o.WaitingTopics[at].Retry != 1 || o.WaitingTopics[at].Blocked != 1 || o.WaitingTopics[at].Parked != 1 || o.WaitingTopics[at].Keys != 2 || len(o.WaitingTopics[at].Collections) != 2 ||
		o.WaitingTopics[at].OldestAgeS < 50 || o.OldestS < 50 {
		t.Errorf("%+v", o.WaitingTopics)
	}
	if len(o.Slots) != 1 || o.Slots[0].Node != "n1" || len(o.Nodes) != 1 || o.Nodes[0].Phase != "owner" || !slices.Equal(o.Nodes[0].Slots, []string{"orders/" + "0of1"}) {
		t.Errorf("%+v %+v", o.Slots, o.Nodes)
	}
	if p := findProblem(t, o.Problems, problems.NoStandby); p.Severity != problems.Warn || p.Object != "orders" {
		t.Errorf("%+v", p)
	}
	if p := findProblem(t, o.Problems, problems.DeadLetters); p.Severity != problems.Warn || p.Count != 1 || p.Since == nil ||
		p.Title != "Dead letters of orders need a decision" || p.Unit != "dead letter" || p.Detail != "1 of the relay, 0 of handlers, neither requeued nor discarded" {
		t.Errorf("%+v", p)
	}
	if err := k.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if o, err = k.Overview(t.Context()); err != nil || findProblem(t, o.Problems, problems.Paused).Severity != problems.Warn || !o.Slots[0].Paused {
		t.Errorf("%+v, %v", o.Slots, err)
	}

	none := k.ForWatcher("nobody")
	if o, err = none.Overview(t.Context()); err != nil || o.Counts != (admin.Counts{}) || len(o.Slots) != 1 {
		t.Errorf("%+v, %v", o, err)
	}
}

// A parked envelope is old, and does not raise the lag: those are two figures.
func TestLagIsNotTheAgeOfWaitingEnvelopes(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	f.insertWaiting(f.a, "1", "parked", "k1", "orders") // for a minute
	if _, err := f.state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$set", Value: bson.D{
		// The owner has renewed, and reports.
		{Key: "expiresAt", Value: time.Now().Add(2 * time.Hour)},
		{Key: "stats", Value: bson.D{{Key: "at", Value: time.Now()}, {Key: "state", Value: "live"}, {Key: "lagMs", Value: int64(250)}}},
	}}}); err != nil {
		t.Fatal(err)
	}

	o, err := f.newDesk().Overview(t.Context())
	if err != nil || o.LagS == nil || *o.LagS != 0.25 || *o.Slots[0].LagS != *o.LagS || o.OldestS < 50 {
		t.Errorf("lag %v, of the slot %+v, oldest waiting %v, %v", o.LagS, o.Slots, o.OldestS, err)
	}
}

// A backlog is counted up to a limit. The overview reports that it is larger.
func TestOverviewOfABacklog(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	at := bson.Timestamp{T: uint32(time.Now().Unix())}
	if _, err := f.state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "orders/0of1"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "clusterTime", Value: at}}}}); err != nil {
		t.Fatal(err)
	}

	// A collection of this size is counted only by its index.
	if err := outboxes.EnsureIndexes(t.Context(), f.b); err != nil {
		t.Fatal(err)
	}

	docs := make([]any, figures.Limit+1)
	for i := range docs {
		// The first envelope is before the position.
		docs[i] = bson.D{{Key: "_id", Value: i}, {Key: "ts", Value: bson.Timestamp{T: at.T, I: uint32(i)}}}
	}

	for _, coll := range []*mongo.Collection{f.a, f.b} {
		// Without the index of the purge, a large outbox is not counted.
		if err := mongodb.EnsureIndexSet(t.Context(), coll, outboxes.Indexes{Purge: true}.List()); err != nil {
			t.Fatal(err)
		}
	}

	pending := func() admin.Counts {
		t.Helper()
		o, err := f.newDesk().Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return o.Counts
	}
	if _, err := f.a.InsertMany(t.Context(), docs[:figures.Limit]); err != nil {
		t.Fatal(err)
	}
	if c := pending(); c.Pending != figures.Limit-1 || c.PendingMore {
		t.Errorf("%+v", c)
	}
	if _, err := f.b.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	if c := pending(); c.Pending != 2*figures.Limit-1 || !c.PendingMore {
		t.Errorf("%+v", c)
	}
}

func findProblem(t *testing.T, list []admin.Problem, kind problems.Kind) admin.Problem {
	t.Helper()
	for _, p := range list {
		if p.Kind == kind {
			return p
		}
	}
	t.Fatalf("no problem %s among %+v", kind, list)
	return admin.Problem{}
}

// Readers show the figures that a process has stored, and do not count. Figures that are out of date, or from before an action of an
// operator, are counted again.
func TestStoredFiguresAreShown(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	f.insertWaiting(f.a, "1", "parked", "k1", "orders")
	stored := figures.Figures{
		At: time.Now(), Counts: figures.Counts{Parked: 3}, Topics: []waiting.Topic{{Topic: "orders", Parked: 3, Oldest: time.Now().Add(-time.Minute)}},
		Health: &health.Report{Checks: []health.Check{{ID: health.WaitingRule, Status: health.Degraded, Detail: "3, without a decrease", N: 3}}},
	}
	actions := int64(0)
	save := func(valid time.Duration) {
		t.Helper()
		var err error
		if actions, err = figures.Save(t.Context(), f.state, "orders", stored, valid, actions); err != nil {
			t.Fatal(err)
		}
	}
	expect := func(when string, parked int64, stuck bool) {
		t.Helper()
		view, err := k.Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		isStuck := slices.ContainsFunc(view.Problems, func(p admin.Problem) bool { return p.Kind == problems.WaitingStuck && p.Since != nil })
		if view.Counts.Parked != parked || isStuck != stuck || len(view.WaitingTopics) != 1 || view.OldestS < 50 {
			t.Errorf("%s: %+v, %+v, %+v", when, view.Counts, view.WaitingTopics, view.Problems)
		}
	}

	expect("nothing is stored", 1, false)
	save(time.Hour)
	expect("stored", 3, true)
	if err := k.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	expect("after an action", 1, true)
	// The count of this call may have begun before the action.
	save(time.Hour)
	expect("after a count that began before", 1, true)
	save(time.Hour)
	expect("after a count that began later", 3, true)
	save(-time.Second)
	expect("out of date", 1, false)
}

// A reader that goes away while the documents are counted gets its error at once, and the next one gets the counts.
func TestACountDoesNotHoldAReader(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	release := make(chan struct{})
	oplog := func(context.Context) (problems.Oplog, error) {
		leave()
		<-release
		return problems.Oplog{}, nil
	}

	k := admin.New(admin.Operator{State: f.state, Watcher: "orders", Oplog: oplog})
	if _, err := k.Overview(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("the reader that went away got %v", err)
	}
	close(release)
	if _, err := k.Overview(t.Context()); err != nil {
		t.Errorf("the next one got %v", err)
	}
}

// TestOverviewDoesNotGrowWithTheOutbox asserts in the normal run that overviews show stored figures; with -admin.long it measures the promise
// of 50 ms at its full size.
func TestOverviewDoesNotGrowWithTheOutbox(t *testing.T) {
	f := openOffice(t)
	envelopes, dead, looks := 5000, 500, 200
	if *long {
		envelopes, dead, looks = 1_000_000, 100_000, 2000
	}

	admintest.Fill(t, f.a, envelopes, f.state.Collection("letters"), dead)
	k := f.newDesk()
	first := time.Now()
	counter := figures.Counter{State: f.state, Watcher: "orders", Now: time.Now}
	counted, err := counter.Count(t.Context())
	if err == nil {
		_, err = figures.Save(t.Context(), f.state, "orders", counted, time.Hour, 0)
	}
	if err != nil {
		t.Fatal(err)
	}

	counting := time.Since(first)
	took := make([]time.Duration, looks)
	var oldest time.Duration
	for i := range took {
		began := time.Now()
		o, err := k.Overview(t.Context())
		took[i] = time.Since(began)
		if err != nil || o.Counts.Envelopes != int64(envelopes) || o.Counts.Dead != int64(dead) {
			t.Fatalf("%+v, %v", o.Counts, err)
		}
		oldest = max(oldest, time.Since(o.CountedAt))
		if *long {
			<-time.After(10 * time.Millisecond)
		}
	}

	slices.Sort(took)
	p99 := took[len(took)*99/100]
	t.Logf("%d envelopes, %d dead letters: first %v, then p50 %v p99 %v max %v of %d looks; figures at most %v old", envelopes, dead, counting, took[looks/2], p99, took[looks-1], looks, oldest)
	if *long && p99 > 50*time.Millisecond {
		t.Errorf("p99 %v", p99)
	}
}

// TestOverviewOfThousandsOfOutboxes: neither the first overview nor a later one makes queries for each outbox of a watcher.
func TestOverviewOfThousandsOfOutboxes(t *testing.T) {
	t.Parallel()
	const tenants, most = 3000, 400
	f := openOffice(t)
	entries := make([]any, tenants)
	for i := range entries {
		id := bson.Binary{Subtype: bson.TypeBinaryUUID, Data: []byte(fmt.Sprintf("%016d", i))}
		entries[i] = bson.D{{Key: "_id", Value: id}, {Key: "ns", Value: fmt.Sprintf("tenant%d.outbox", i)}, {Key: "watcher", Value: "orders"}}
	}
	if _, err := f.state.Collection("collections").InsertMany(t.Context(), entries); err != nil {
		t.Fatal(err)
	}
	f.insertWaiting(f.a, "1", "parked", "k1", "orders")
	later := append(letterOf("later", planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)})
	mustInsert(t, f.b, later)
	listed := bson.D{{Key: "_id", Value: "orders/" + mongodb.Namespace(f.b)}, {Key: "watcher", Value: "orders"}, {Key: "ns", Value: mongodb.Namespace(f.b)}}
	mustInsert(t, f.state.Collection("schedules"), listed)

	var commands atomic.Int64
	monitor := &event.CommandMonitor{Started: func(context.Context, *event.CommandStartedEvent) { commands.Add(1) }}
	d := admin.New(admin.Operator{State: f.state.On(stacktest.Client(t, options.Client().SetMonitor(monitor))), Watcher: "orders"})
	for range 2 {
		commands.Store(0)
		o, err := d.Overview(t.Context())
		if err != nil || o.Counts.Parked != 1 || o.Counts.Scheduled != 1 {
			t.Errorf("%+v, %v", o.Counts, err)
		}
		if n := commands.Load(); n > most {
			t.Errorf("%d commands for %d outboxes, want at most %d", n, tenants, most)
		}
	}
	if groups, err := d.Waiting().Summary(t.Context(), ""); err != nil || len(groups) != 2 {
		t.Errorf("%+v, %v", groups, err)
	}
}

// The reports of owners are in the list: a step that is repeated for long, each topic that cannot be written, and lost history until an
// operator acknowledges it.
func TestReportsOfOwnersAreProblems(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	k := f.newDesk()
	now := time.Now()
	topic := func(name string, age time.Duration, n int) bson.D {
		return bson.D{{Key: "topic", Value: name}, {Key: "reason", Value: fmt.Sprintf("topic %q does not exist", name)}, {Key: "since", Value: now.Add(-age)}, {Key: "count", Value: n}, {Key: "parked", Value: true}}
	}
	step := func(part string, age time.Duration) bson.D {
		return bson.D{{Key: "part", Value: part}, {Key: "text", Value: "MongoDB rejects it"}, {Key: "since", Value: now.Add(-age)}}
	}
	lost := func(age time.Duration) lease.Incident {
		return lease.Incident{ID: bson.NewObjectID(), At: now.Add(-age), Lost: &lease.LostHistory{
			Reason: "oplog", From: bson.Timestamp{T: 100}, To: bson.Timestamp{T: 103}, Swept: 55, Repeats: 52,
		}}
	}
	recent, old := lost(time.Hour), lost(8*24*time.Hour)
	discarded := lease.Incident{ID: bson.NewObjectID(), At: now.Add(-time.Hour), Discarded: &lease.Discarded{NS: "shop.outbox", Events: 7}}
	set := bson.D{
		{Key: "owner", Value: "n1/1"},
		{Key: "expiresAt", Value: now.Add(time.Hour)},
		{Key: "incidents", Value: bson.A{old, recent, discarded}},
		{Key: "stats", Value: bson.D{
			{Key: "at", Value: now},
			{Key: "state", Value: "live"},
			{Key: "lagMs", Value: int64(60_000)},
			{Key: "problems", Value: bson.A{step("ledger", 90*time.Second), step("stream", 10*time.Second)}},
			{Key: "unwritable", Value: bson.A{topic("short", time.Minute, 3), topic("long", 6*time.Minute, 48)}},
		}},
	}
	if _, err := f.state.Collection("watchers").UpdateByID(t.Context(), "orders/0of1", bson.D{{Key: "$set", Value: set}}); err != nil {
		t.Fatal(err)
	}

	read := func() (list []string, byObject map[string]admin.Problem) {
		t.Helper()
		o, err := k.Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		byObject = map[string]admin.Problem{}
		for _, p := range o.Problems {
			if p.Kind == problems.NoOwner {
				continue // the office has no nodes
			}
			list = append(list, string(p.Severity)+" "+p.ID)
			byObject[p.Object] = p
			if p.Consequence == "" || p.Fix == "" || p.Title == "" || p.Detail == "" {
				t.Errorf("a text is missing: %+v", p)
			}
		}
		return list, byObject
	}
	list, byObject := read()
	want := []string{"fail write_rejected/orders", "fail topic_unwritable/long", "warn topic_unwritable/short", "warn lost_history/" + recent.ID.Hex(), "warn events_discarded/" + discarded.ID.Hex()}
	if !slices.Equal(list, want) {
		t.Errorf("got %q, want %q", list, want)
	}
	if p := byObject["long"]; p.Count != 48 || p.ForS < 350 || p.Detail != "it does not exist" {
		t.Errorf("%+v", p)
	}
	if p := byObject["orders"]; p.Count != 52 || !strings.Contains(p.Detail, "discarded 3s of history (oplog); 55 events were sent from the outboxes; repeats are flagged") {
		t.Errorf("%+v", p)
	}

	if p := byObject["shop.outbox"]; p.Count != 7 || p.Unit != "events were discarded" || p.ForS < 3500 {
		t.Errorf("%+v", p)
	}

	for _, incident := range []lease.Incident{discarded, recent} {
		// A problem is also known by its kind and this id.
		if err := k.Acknowledge(t.Context(), "lost_history/"+incident.ID.Hex()); err != nil {
			t.Fatal(err)
		}
	}
	if list, _ := read(); !slices.Equal(list, want[:3]) {
		t.Errorf("after the acknowledgement: %q", list)
	}
	if err := k.Acknowledge(t.Context(), recent.ID.Hex()); !errors.Is(err, mongodb.ErrNotFound) {
		t.Errorf("a second time: %v", err)
	}
	if err := k.Acknowledge(t.Context(), "x"); !strings.Contains(err.Error(), "is not the id of a problem") {
		t.Errorf("no id: %v", err)
	}
	audit, err := k.Audit(t.Context(), admin.AuditFilter{Kinds: []string{"problem_acknowledged"}}, 10, "")
	if err != nil || audit.Total != 2 || audit.Items[0].Actor != "ann" || !strings.Contains(string(audit.Items[0].Fields), recent.ID.Hex()) {
		t.Errorf("%+v, %v", audit, err)
	}
}
