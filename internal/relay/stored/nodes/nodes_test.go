package nodes

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

func newState(t *testing.T) state.Database {
	t.Helper()
	return state.Of(stacktest.Database(t, stacktest.Client(t)))
}

func newMember(db state.Database, node string, change func(*Config)) *Member {
	c := Config{
		State: db, Node: node, Address: node + ":9464", Version: "1.4.0", Watcher: "orders", Tasks: []Task{Relay, Cleaner},
		Capabilities: []string{"recording:position"},
	}
	if change != nil {
		change(&c)
	}
	return New(c)
}

func mustBeat(t *testing.T, m *Member, v Vitals) {
	t.Helper()
	if err := m.SendHeartbeat(t.Context(), v); err != nil {
		t.Fatal(err)
	}
}

func listNodes(t *testing.T, db state.Database) []Node {
	t.Helper()
	all, err := NewNodes(db.Collection("nodes")).List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(all, func(a, b Node) int { return strings.Compare(a.Node, b.Node) })
	return all
}

// listKinds returns the kinds of the entries of the audit log about a node, in their order.
func listKinds(t *testing.T, db state.Database, node string) []string {
	t.Helper()
	all, err := NewAuditLog(db.Collection("audit"), "", "").Latest(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}
	out := []string{}
	for _, e := range slices.Backward(all) {
		if e.Node == node {
			out = append(out, string(e.Kind))
		}
	}
	return out
}

// ageHeartbeat moves the last heartbeat of a node into the past, by the clock of the server.
func ageHeartbeat(t *testing.T, db state.Database, node string, d time.Duration) {
	t.Helper()
	res, err := db.Collection("nodes").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: node}}, mongo.Pipeline{{{Key: "$set", Value: bson.D{
		{Key: "seenAt", Value: bson.D{{Key: "$subtract", Value: bson.A{"$$NOW", d.Milliseconds()}}}},
	}}}})
	if err != nil || res.MatchedCount != 1 {
		t.Fatalf("%v, %+v", err, res)
	}
}

// renewHeartbeats moves the last heartbeat of nodes into the future, so that they respond on a slow machine, too.
func renewHeartbeats(t *testing.T, db state.Database, nodes ...string) {
	t.Helper()
	for _, n := range nodes {
		ageHeartbeat(t, db, n, -time.Hour)
	}
}

func TestAMemberIsListedFromItsFirstHeartbeatToItsLeave(t *testing.T) {
	t.Parallel()
	db := newState(t)
	if got := listNodes(t, db); len(got) != 0 {
		t.Fatalf("on a blank slate: %+v", got)
	}

	m := newMember(db, "a", nil)
	mustBeat(t, m, Vitals{KafkaReachable: true, SinceAck: time.Second, Holds: []string{"orders/0of1"}})
	got := listNodes(t, db)
	if len(got) != 1 {
		t.Fatalf("%+v", got)
	}

	n := got[0]
	if n.Node != "a" || n.Address != "a:9464" || n.Version != "1.4.0" || n.Instance == "" || !n.KafkaReachable || n.LastAck == nil ||
		!slices.Equal(n.Watchers, []string{"orders"}) || !slices.Equal(n.Tasks, []string{"relay", "cleaner"}) ||
		!slices.Equal(n.Capabilities, []string{"recording:position"}) || !slices.Equal(n.Holds, []string{"orders/0of1"}) {
		t.Errorf("%+v", n)
	}

	mustBeat(t, m, Vitals{SinceAck: -1})
	again := listNodes(t, db)[0]
	if !again.StartedAt.Equal(n.StartedAt) || again.SeenAt.Before(n.SeenAt) || len(again.Holds) != 0 || again.LastAck != nil {
		t.Errorf("the second heartbeat: %+v", again)
	}

	// A second call does nothing.
	for range 2 {
		if err := m.Leave(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	mustBeat(t, m, Vitals{})
	if got := listNodes(t, db); len(got) != 0 {
		t.Errorf("after it left: %+v", got)
	}
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started", "node_stopped"}) {
		t.Errorf("%v", got)
	}
}

// If a live node is removed, its next heartbeat lists it again with its old data.
func TestANodeThatWasRemovedIsListedAgainAsItself(t *testing.T) {
	t.Parallel()
	db := newState(t)
	m := newMember(db, "a", nil)
	// The node has been running for an hour.
	m.startedAt = m.startedAt.Add(-time.Hour)
	mustBeat(t, m, Vitals{})
	before := listNodes(t, db)[0]
	if err := NewNodes(db.Collection("nodes")).Leave(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}

	mustBeat(t, m, Vitals{})
	after := listNodes(t, db)[0]
	if after.Instance != before.Instance || !slices.Equal(after.Capabilities, before.Capabilities) || !slices.Equal(after.Tasks, before.Tasks) {
		t.Errorf("%+v, before %+v", after, before)
	}
	if d := after.StartedAt.Sub(before.StartedAt).Abs(); d > 30*time.Second {
		t.Errorf("it started %v, and before %v", after.StartedAt, before.StartedAt)
	}
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started", "node_listed_again"}) {
		t.Errorf("%v", got)
	}
}

// A process that was killed is followed by another of its name, whose start is its own.
func TestASuccessorOfTheSameNameIsAnotherProcess(t *testing.T) {
	t.Parallel()
	db := newState(t)
	killed := newMember(db, "a", nil)
	killed.startedAt = killed.startedAt.Add(-48 * time.Hour)
	mustBeat(t, killed, Vitals{})
	old := listNodes(t, db)[0].StartedAt
	next := newMember(db, "a", nil)
	for range 3 {
		mustBeat(t, next, Vitals{})
	}

	if got := listNodes(t, db)[0]; got.StartedAt.Sub(old) < 47*time.Hour || got.Instance != next.instance {
		t.Errorf("%+v, before %v", got, old)
	}
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started", "node_started"}) {
		t.Errorf("%v", got)
	}

	// The killed one was only away, and stops now: the other one stays.
	if err := killed.Leave(t.Context()); err != nil || len(listNodes(t, db)) != 1 {
		t.Errorf("%v, %+v", err, listNodes(t, db))
	}
}

func TestTwoProcessesOfOneNameAreReportedOnce(t *testing.T) {
	t.Parallel()
	db := newState(t)
	one, two := newMember(db, "a", nil), newMember(db, "a", nil)
	for range 3 {
		mustBeat(t, one, Vitals{})
		mustBeat(t, two, Vitals{})
	}
	got := listKinds(t, db, "a")
	slices.Sort(got)
	if !slices.Equal(got, []string{"node_name_taken_twice", "node_name_taken_twice", "node_started", "node_started"}) {
		t.Errorf("%v", got)
	}
}

// Silence is logged once, for any number of observers and observations, and so is the return.
func TestSilenceIsNotedOnce(t *testing.T) {
	t.Parallel()
	db := newState(t)
	silent := newMember(db, "silent", nil)
	mustBeat(t, silent, Vitals{Holds: []string{"orders/0of1"}})
	renewHeartbeats(t, db, "silent")
	var lookers []*Member
	for _, name := range []string{"b", "c", "d"} {
		m := newMember(db, name, nil)
		mustBeat(t, m, Vitals{})
		renewHeartbeats(t, db, name)
		if err := m.CheckPeers(t.Context()); err != nil {
			t.Fatal(err)
		}
		lookers = append(lookers, m)
	}
	if n := listNodes(t, db)[3]; n.StaleSince != nil || !n.Alive(StaleAfter) {
		t.Errorf("%+v", n)
	}

	ageHeartbeat(t, db, "silent", StaleAfter+time.Second)
	var wg sync.WaitGroup
	for _, m := range lookers {
		wg.Go(func() {
			for range 3 {
				if err := m.CheckPeers(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}

	wg.Wait()
	var noted []string
	all, err := NewAuditLog(db.Collection("audit"), "", "").Latest(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}

	for _, e := range all {
		if e.Kind == NodeStale {
			of, _ := e.Fields.Lookup("of").StringValueOK()
			noted = append(noted, of+" "+e.Fields.Lookup("held").String())
		}
	}
	if !slices.Equal(noted, []string{`silent ["orders/0of1"]`}) {
		t.Errorf("%v", noted)
	}
	if n := listNodes(t, db)[3]; n.StaleSince == nil || n.Alive(StaleAfter) {
		t.Errorf("%+v", n)
	}

	mustBeat(t, silent, Vitals{})
	mustBeat(t, silent, Vitals{})
	if n := listNodes(t, db)[3]; n.StaleSince != nil || !n.Alive(StaleAfter) {
		t.Errorf("%+v", n)
	}
	if got := listKinds(t, db, "silent"); !slices.Equal(got, []string{"node_started", "node_returned"}) {
		t.Errorf("%v", got)
	}
}

// MongoDB was away: no node could send a heartbeat, and the first one that does finds all others silent.
func TestNodesThatWereAllSilentAreNotReported(t *testing.T) {
	t.Parallel()
	db := newState(t)
	a, b := newMember(db, "a", nil), newMember(db, "b", nil)
	mustBeat(t, a, Vitals{})
	mustBeat(t, b, Vitals{})
	ageHeartbeat(t, db, "a", StaleAfter+time.Second)
	ageHeartbeat(t, db, "b", StaleAfter+time.Second)

	// The check of the others may succeed before the next heartbeat.
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.SendHeartbeat(ended, Vitals{}); err == nil {
		t.Fatal("a heartbeat succeeded without time")
	}
	if err := a.CheckPeers(t.Context()); err != nil {
		t.Fatal(err)
	}
	mustBeat(t, a, Vitals{})
	if err := a.CheckPeers(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started"}) {
		t.Errorf("%v", got)
	}

	// The other node does not return, although it had the time.
	a.resumedAt = time.Now().Add(-StaleAfter)
	if err := a.CheckPeers(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started", "node_stale"}) {
		t.Errorf("%v", got)
	}
}

// The first heartbeat of a process may use up the time of a call, because its connections are new.
func TestAnEntryIsWrittenAlthoughItsCallerHasNoTimeLeft(t *testing.T) {
	t.Parallel()
	db := newState(t)
	m := newMember(db, "a", nil)
	ctx, cancel := context.WithTimeout(t.Context(), time.Nanosecond)
	defer cancel()
	<-ctx.Done()
	m.LogEvent(ctx, NodeStarted, nil)
	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started"}) {
		t.Errorf("%v", got)
	}
}

func TestConfigurationsOfAWatcherAreCompared(t *testing.T) {
	t.Parallel()
	db := newState(t)
	config := func(p string) func(*Config) { return func(c *Config) { c.Fingerprint = p } }
	a, b, same := newMember(db, "a", config("1")), newMember(db, "b", config("2")), newMember(db, "same", config("1"))
	stranger := newMember(db, "stranger", func(c *Config) { c.Fingerprint, c.Watcher = "9", "invoices" })
	old := newMember(db, "old", nil)
	for _, m := range []*Member{a, b, same, stranger, old} {
		mustBeat(t, m, Vitals{})
		renewHeartbeats(t, db, m.cfg.Node)
	}

	for range 2 {
		if err := a.CheckPeers(t.Context()); err != nil {
			t.Fatal(err)
		}
	}

	if got := listKinds(t, db, "a"); !slices.Equal(got, []string{"node_started", "configuration_differs"}) {
		t.Errorf("%v", got)
	}
}

func TestTidyForgetsAndTrims(t *testing.T) {
	t.Parallel()
	db := newState(t)
	m := newMember(db, "a", nil)
	mustBeat(t, m, Vitals{})
	for node, age := range map[string]time.Duration{"gone": forgetAfter + time.Hour, "week": 7 * 24 * time.Hour} {
		mustBeat(t, newMember(db, node, nil), Vitals{})
		ageHeartbeat(t, db, node, age)
	}

	// One entry more than the bound. The entries that existed before are the oldest.
	var docs []any
	for range entriesKept {
		docs = append(docs, bson.D{{Key: "at", Value: time.Now().Add(time.Minute)}, {Key: "kind", Value: "filler"}})
	}

	if _, err := db.Collection("audit").InsertMany(t.Context(), docs); err != nil {
		t.Fatal(err)
	}
	if err := m.RemoveOld(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := listNodes(t, db); len(got) != 2 || got[0].Node != "a" || got[1].Node != "week" {
		t.Errorf("%+v", got)
	}
	if n, err := db.Collection("audit").CountDocuments(t.Context(), bson.D{}); err != nil || n != entriesKept {
		t.Errorf("%d entries are left, %v", n, err)
	}
	if got := listKinds(t, db, "a"); len(got) != 0 {
		t.Errorf("the oldest are left: %v", got)
	}
}
