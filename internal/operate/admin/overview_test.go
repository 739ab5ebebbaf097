package admin_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/event"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/operate/admin/admintest"
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
	f.moveToDead(f.a, record.RecordRefused, letterOf("dead2", planted))
	f.requeueAndSend("dead2")
	if _, err := f.a.InsertOne(t.Context(), append(letterOf("later", planted), bson.E{Key: "dueAt", Value: time.Now().Add(time.Hour)})); err != nil {
		t.Fatal(err)
	}
	if _, err := nodes.NewNodes(f.state.Collection("nodes")).Heartbeat(t.Context(), nodes.Sign{Node: "n1", Watchers: []string{"orders"}, KafkaReachable: true, SinceAck: -1}); err != nil {
		t.Fatal(err)
	}

	o, err := k.Overview(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	c := o.Counts
	if c.Retry != 1 || c.Blocked != 1 || c.Parked != 2 || c.Scheduled != 1 || c.Dead != 1 || c.DeadAll != 2 || c.BlockedKeys != 3 {
		t.Errorf("%+v", c)
	}

	at := slices.IndexFunc(o.WaitingTopics, func(p admin.WaitingTopic) bool { return p.Topic == "orders" })
	if at < 0 || o.WaitingTopics[at].Retry != 1 || o.WaitingTopics[at].Blocked != 1 || o.WaitingTopics[at].Parked != 1 || o.WaitingTopics[at].Keys != 2 || len(o.WaitingTopics[at].Collections) != 2 ||
		o.WaitingTopics[at].OldestAgeS < 50 || o.OldestS < 50 {
		t.Errorf("%+v", o.WaitingTopics)
	}
	if len(o.Slots) != 1 || o.Slots[0].Node != "n1" || len(o.Nodes) != 1 || o.Nodes[0].Role != "owner" || !slices.Equal(o.Nodes[0].Slots, []string{"orders/" + "0of1"}) {
		t.Errorf("%+v %+v", o.Slots, o.Nodes)
	}
	if c := findCheck(t, o.Checks, "nodes"); c.Status != admin.CheckWarn || !strings.Contains(c.Detail, "no standby") {
		t.Errorf("%+v", c)
	}
	if c := findCheck(t, o.Checks, "slot orders/"+"0of1"); c.Status != admin.CheckOK {
		t.Errorf("%+v", c)
	}
	if err := k.Lease().Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	if o, err = k.Overview(t.Context()); err != nil || findCheck(t, o.Checks, "slot orders/"+"0of1").Status != admin.CheckWarn || !o.Slots[0].Paused {
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
		{Key: "stats", Value: bson.D{{Key: "at", Value: time.Now()}, {Key: "state", Value: "live"}, {Key: "lagMs", Value: int64(250)}}},
	}}}); err != nil {
		t.Fatal(err)
	}

	o, err := f.newDesk().Overview(t.Context())
	if err != nil || o.LagS != 0.25 || o.Slots[0].LagS != o.LagS || o.OldestS < 50 {
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

	docs := make([]any, 10_001)
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
	if _, err := f.a.InsertMany(t.Context(), docs[:10_000]); err != nil {
		t.Fatal(err)
	}
	if c := pending(); c.Pending != 9_999 || c.PendingMore {
		t.Errorf("%+v", c)
	}
	if _, err := f.b.InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	if c := pending(); c.Pending != 19_999 || !c.PendingMore {
		t.Errorf("%+v", c)
	}
}

func findCheck(t *testing.T, list []admin.Check, id string) admin.Check {
	t.Helper()
	for _, c := range list {
		if c.ID == id {
			return c
		}
	}
	t.Fatalf("no check %s among %+v", id, list)
	return admin.Check{}
}

func TestFiguresAreCountedOnceForAllWhoLook(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	d := admin.New(admin.Operator{State: f.state, Watcher: "orders"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = d.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	k := d.For(admin.Actor{Name: "ann"})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if _, err := k.Overview(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}

	wg.Wait()
	f.insertWaiting(f.a, "1", "retry", "k1", "orders")

	// The figures are counted again while an operator reads them.
	stacktest.Eventually(t, "the new envelope is counted", func() bool {
		o, err := k.Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return o.Counts.Retry == 1
	})

	gone, cancelled := context.WithCancel(t.Context())
	cancelled()
	if _, err := k.Overview(gone); !errors.Is(err, context.Canceled) {
		t.Errorf("who went away got %v", err)
	}
	if _, err := k.Overview(t.Context()); err != nil {
		t.Errorf("and the next one %v", err)
	}
}

// TestOverviewDoesNotGrowWithTheOutbox asserts in the normal run that overviews are served while figures are counted behind
// them; with -admin.long it measures the promise of 50 ms at its full size.
func TestOverviewDoesNotGrowWithTheOutbox(t *testing.T) {
	f := openOffice(t)
	envelopes, dead, looks := 5000, 500, 200
	if *long {
		envelopes, dead, looks = 1_000_000, 100_000, 2000
	}

	admintest.Fill(t, f.a, envelopes, f.state.Collection("letters"), dead)
	d := admin.New(admin.Operator{State: f.state, Watcher: "orders"})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = d.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	k := d.For(admin.Actor{Name: "ann"})
	first := time.Now()
	if _, err := k.Overview(t.Context()); err != nil {
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

// A step that the owner repeats for more than 30 seconds fails the check of its slot.
func TestALastingProblemFailsTheCheck(t *testing.T) {
	t.Parallel()
	f := openOffice(t)
	now := time.Now()
	for _, c := range []struct {
		age    time.Duration
		status string
	}{{10 * time.Second, admin.CheckOK}, {90 * time.Second, admin.CheckFail}} {
		problem := bson.D{{Key: "part", Value: "ledger"}, {Key: "text", Value: "MongoDB rejects it"}, {Key: "since", Value: now.Add(-c.age)}}
		stats := bson.D{{Key: "at", Value: now}, {Key: "state", Value: "live"}, {Key: "problems", Value: bson.A{problem}}}
		if _, err := f.state.Collection("watchers").UpdateByID(t.Context(), "orders/0of1", bson.D{{Key: "$set", Value: bson.D{{Key: "stats", Value: stats}}}}); err != nil {
			t.Fatal(err)
		}

		o, err := f.newDesk().Overview(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		check := findCheck(t, o.Checks, "slot orders/0of1")
		if check.Status != c.status || c.status == admin.CheckFail && check.Detail != "ledger, for 1m30s: MongoDB rejects it" {
			t.Errorf("%v: %+v", c.age, check)
		}
	}
}
