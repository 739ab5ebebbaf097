package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/inbox"
	"github.com/outrelay/outrelay/pkg/saga"
)

// deployment is a state database with a watcher that node one owns, node two as its standby, and a service's database.
type deployment struct {
	t           *testing.T
	env         []string
	state, shop *mongo.Database
	one, two    *nodes.Member
}

func deployed(t *testing.T) *deployment {
	t.Helper()
	env, coll := scheduledShop(t)
	d := &deployment{t: t, env: env, shop: coll.Database()}
	d.state = coll.Database().Client().Database(value(env, "OUTRELAY_MONGODB_STATE"))
	d.insert(d.state.Collection("watchers"), bson.D{
		{Key: "_id", Value: "default/0of1"},
		{Key: "owner", Value: "one/x"},
		{Key: "node", Value: "one"},
		{Key: "epoch", Value: int64(7)},
		{Key: "expiresAt", Value: time.Now().Add(time.Hour)},
		{Key: "stats", Value: bson.D{{Key: "at", Value: time.Now()}, {Key: "state", Value: "live"}, {Key: "lagMs", Value: int64(120)}, {Key: "rate", Value: 40.0}}},
	})
	d.one, d.two = d.member("one"), d.member("two")
	return d
}

func (d *deployment) member(node string) *nodes.Member {
	d.t.Helper()
	m := nodes.New(nodes.Config{State: d.state, Node: node, Address: node + ":9464", Version: "1.4.0", Watcher: "default", Roles: []nodes.Role{nodes.Relay, nodes.Cleaner}, Schema: 3, Fingerprint: "abcdef012345"})
	if err := m.Beat(d.t.Context(), nodes.Vital{KafkaReachable: true, SinceAck: -1}); err != nil {
		d.t.Fatal(err)
	}
	return m
}

func (d *deployment) insert(coll *mongo.Collection, doc bson.D) {
	d.t.Helper()
	if _, err := coll.InsertOne(d.t.Context(), doc); err != nil {
		d.t.Fatal(err)
	}
}

// run runs a command, and decodes its JSON into v if there is one. It returns what people see.
func (d *deployment) run(v any, want int, args ...string) string {
	d.t.Helper()
	if v != nil {
		args = append(args, "--json")
	}
	code, out, errOut := call(d.t, d.env, args...)
	if code != want {
		d.t.Fatalf("%v: exit code %d, want %d: %s", args, code, want, errOut)
	}
	if v != nil {
		if err := json.Unmarshal([]byte(out), v); err != nil {
			d.t.Fatalf("%v: %v: %q %q", args, err, out, errOut)
		}
	}
	return errOut
}

// sees fails unless each text is in what people see.
func sees(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		if !strings.Contains(text, w) {
			t.Errorf("no %q in:\n%s", w, text)
		}
	}
}

func TestNodesCommands(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	var l nodeList
	d.run(&l, exitOK, "nodes", "--check")
	if len(l.Nodes) != 2 || l.Nodes[0].Node != "one" || l.Nodes[0].Role != "owner" || !slices.Equal(l.Nodes[0].Slots, []string{"default/0of1"}) ||
		l.Nodes[1].Role != "standby" || l.Nodes[1].Schema != 3 || !slices.Equal(l.Nodes[1].Roles, []string{"relay", "cleaner"}) || l.Nodes[1].Stale {
		t.Errorf("%+v", l.Nodes)
	}
	sees(t, d.run(nil, exitOK, "nodes"), "NODE", "one", "owner", "default/0of1", "two", "standby", "relay cleaner", "1.4.0", "abcdef ")

	if code, out, _ := call(t, d.env, "__complete", "nodes", "release", ""); code != 0 || !strings.Contains(out, "one\n") || !strings.Contains(out, "two\n") {
		t.Errorf("completion: %d %q", code, out)
	}
	sees(t, d.run(nil, exitOK, "nodes", "release", "one", "--dry-run"), "would release default/0of1")
	var r nodeReleased
	d.run(&r, exitOK, "nodes", "release", "one", "--hold", "5s", "--actor", "ann")
	if !slices.Equal(r.Slots, []string{"default/0of1"}) {
		t.Errorf("%+v", r)
	}
	sees(t, d.run(nil, exitOK, "nodes", "release", "two"), "owns nothing")
	d.run(nil, exitConfig, "nodes", "release", "one", "--hold", "0s")

	sees(t, d.run(nil, exitConfig, "nodes", "remove", "two", "--yes"), "sign of life")
	sees(t, d.run(nil, exitConfig, "nodes", "remove", "nobody", "--yes"), "nobody")
	if _, err := d.state.Collection("nodes").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "two"}}, bson.D{{Key: "$set", Value: bson.D{{Key: "seenAt", Value: time.Now().Add(-time.Hour)}}}}); err != nil {
		t.Fatal(err)
	}
	sees(t, d.run(nil, exitOK, "nodes"), "stale")
	sees(t, d.run(nil, exitConfig, "nodes", "remove", "two"), "say --yes")
	d.run(&r, exitOK, "nodes", "remove", "two", "--yes")
	d.run(&l, exitOK, "nodes")
	if len(l.Nodes) != 1 || r.Node != "two" {
		t.Errorf("%+v %+v", l.Nodes, r)
	}
	if err := d.one.Beat(t.Context(), nodes.Vital{}); err != nil {
		t.Fatal(err)
	}
	d.run(nil, exitConfig, "nodes", "--check") // one does not reach Kafka
	if err := d.one.Leave(t.Context()); err != nil {
		t.Fatal(err)
	}
	sees(t, d.run(nil, exitConfig, "nodes", "--check"), "no process runs")
}

func TestEventsCommands(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	d.run(nil, exitOK, "pause")
	log := store.NewEvents(d.state.Collection("events"), "other", "far")
	if err := log.Append(t.Context(), store.GapFound, bson.D{{Key: "reason", Value: "two words"}, {Key: "code", Value: int32(286)}, {Key: "at", Value: bson.D{{Key: "t", Value: int32(1)}}}}); err != nil {
		t.Fatal(err)
	}
	var page admin.EventPage
	d.run(&page, exitOK, "events")
	if page.Total != 4 || page.Events[0].Kind != "gap_found" || page.Events[3].Kind != "node_started" {
		t.Errorf("%+v", page)
	}
	text := d.run(nil, exitOK, "events")
	sees(t, text, `code=286 reason="two words"`, "node_started", "4 of 4 entries")
	if strings.Index(text, "node_started") > strings.Index(text, "gap_found") {
		t.Errorf("the latest comes first:\n%s", text)
	}
	for _, c := range []struct {
		args []string
		want []string // the newest first
	}{
		{[]string{"--kind", "paused,gap_found"}, []string{"gap_found", "paused"}},
		{[]string{"--node", "two"}, []string{"node_started"}},
		{[]string{"--watcher", "default", "--limit", "2"}, []string{"paused", "node_started"}},
		{[]string{"--watcher", "other"}, []string{"gap_found"}},
		{[]string{"--from", "1h", "--kind", "paused"}, []string{"paused"}},
		{[]string{"--to", "1h"}, nil},
	} {
		d.run(&page, exitOK, append([]string{"events"}, c.args...)...)
		var got []string
		for _, e := range page.Events {
			got = append(got, e.Kind)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.args, got, c.want)
		}
	}
	d.run(&page, exitOK, "events", "--limit", "3")
	var rest admin.EventPage
	d.run(&rest, exitOK, "events", "--limit", "3", "--after", page.Next)
	if len(page.Events) != 3 || len(rest.Events) != 1 || rest.Total != 4 {
		t.Errorf("%+v %+v", page, rest)
	}
	d.run(&page, exitOK, "events", "--kind", "paused")
	if e := page.Events[0]; e.Source != "cli" || e.Actor == "" {
		t.Errorf("%+v", e)
	}
	d.run(&page, exitOK, "events", "--actor", e0(page).Actor)
	if page.Total != 1 {
		t.Errorf("%+v", page)
	}
	for _, args := range [][]string{{"--limit", "0"}, {"--limit", "1001"}, {"--from", "soon"}, {"--after", "x"}, {"--follow", "--to", "1h"}, {"trim"}} {
		d.run(nil, exitConfig, append([]string{"events"}, args...)...)
	}
	var trimmed eventsTrimmed
	d.run(&trimmed, exitOK, "events", "trim", "--keep", "2", "--dry-run")
	if trimmed.Removed != 2 || !trimmed.DryRun {
		t.Errorf("%+v", trimmed)
	}
	d.run(&trimmed, exitOK, "events", "trim", "--keep", "2", "--yes")
	d.run(&page, exitOK, "events")
	if trimmed.Removed != 2 || page.Total != 3 || page.Events[0].Kind != "events_trimmed" { // the trim itself is one more
		t.Errorf("%+v %+v", trimmed, page)
	}
	sees(t, d.run(nil, exitOK, "events", "trim", "--keep", "100"), "removed 0 entries")
}

func e0(p admin.EventPage) admin.LogEvent { return p.Events[0] }

// heard is a stream that can be waited for.
type heard struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	more chan struct{}
}

func newHeard() *heard { return &heard{more: make(chan struct{})} }

func (h *heard) Write(p []byte) (int, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.more)
	h.more = make(chan struct{})
	return h.buf.Write(p)
}

func (h *heard) wait(t *testing.T, text string, times int) string {
	t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		h.mu.Lock()
		all, more := h.buf.String(), h.more
		h.mu.Unlock()
		if strings.Count(all, text) >= times {
			return all
		}
		select {
		case <-more:
		case <-deadline:
			t.Fatalf("%q does not come %d times:\n%s", text, times, all)
		}
	}
}

// goes runs a command that ends by its context alone, and returns the streams and what ends it.
func (d *deployment) goes(args ...string) (out, errOut *heard, end func() int) {
	out, errOut = newHeard(), newHeard()
	ctx, cancel := context.WithCancel(d.t.Context())
	code := make(chan int, 1)
	p := &program{in: strings.NewReader(""), out: out, errOut: errOut, env: d.env, exit: func(int) {}}
	go func() { code <- p.execute(ctx, args) }()
	return out, errOut, func() int {
		cancel()
		select {
		case c := <-code:
			return c
		case <-time.After(60 * time.Second):
			d.t.Fatal("the command does not end")
			return -1
		}
	}
}

func TestEventsAreFollowed(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	out, _, end := d.goes("events", "--follow", "--json")
	_, people, endPeople := d.goes("events", "--follow", "--kind", "paused")
	out.wait(t, "node_started", 2)
	d.run(nil, exitOK, "pause")
	out.wait(t, `"kind":"paused"`, 1)
	d.run(nil, exitOK, "resume")
	out.wait(t, `"kind":"resumed"`, 1)
	people.wait(t, "paused", 1)
	d.run(nil, exitOK, "pause")
	all := out.wait(t, `"kind":"paused"`, 2)
	for _, line := range strings.Split(strings.TrimSpace(all), "\n") {
		var e admin.LogEvent
		if err := json.Unmarshal([]byte(line), &e); err != nil {
			t.Errorf("%v: %q", err, line)
		}
	}
	if n := strings.Count(all, "\n"); n != 5 {
		t.Errorf("%d entries, want each once:\n%s", n, all)
	}
	people.wait(t, "paused", 2)
	if code := end(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if code := endPeople(); code != exitOK {
		t.Errorf("exit code %d", code)
	}
}

func TestStatusCommand(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	var s statusAnswer
	d.run(&s, exitOK, "status", "--check")
	if len(s.Watchers) != 1 || s.Watchers[0].Node != "one" || s.Watchers[0].State != "live" || len(s.Nodes) != 2 || s.Counts.Scheduled != 3 || s.CountsProblem != "" || len(s.Checks) == 0 {
		t.Errorf("%+v", s)
	}
	sees(t, d.run(nil, exitOK, "status"), "default  0of1  one", "40/s", "scheduled 3", "2 nodes, 0 stale", "checks: ")
	d.run(nil, exitOK, "pin", "two")
	var told operated
	d.run(&told, exitOK, "step-down", "--actor", "ann")
	if told.Watcher != "default" || !strings.Contains(told.Done, "stays away") {
		t.Errorf("%+v", told)
	}
	sees(t, d.run(nil, exitOK, "status"), "pinned to node two", "node one keeps away until")
	d.run(nil, exitOK, "pause")
	sees(t, d.run(nil, exitOK, "status"), "paused", "WARN slot default/0of1")
	if _, err := d.state.Collection("watchers").UpdateOne(t.Context(), bson.D{}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "expiresAt", Value: time.Now().Add(-time.Minute)}}}, {Key: "$unset", Value: bson.D{{Key: "control", Value: ""}}},
	}); err != nil {
		t.Fatal(err)
	}
	sees(t, d.run(nil, exitConfig, "status", "--check"), "FAIL slot default/0of1: no process runs it", "start outrelay run")
	d.run(nil, exitConfig, "status", "--every", "1ms")
	d.run(nil, exitConfig, "status", "--watch", "--check")
}

func TestStatusIsWatched(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	out, _, end := d.goes("status", "--watch", "--every", "100ms", "--json")
	_, lines, endLines := d.goes("status", "--watch", "--every", "100ms")
	first, _, _ := strings.Cut(out.wait(t, "\n", 2), "\n")
	var s statusAnswer
	if err := json.Unmarshal([]byte(first), &s); err != nil || len(s.Watchers) != 1 {
		t.Errorf("%v: %q", err, first)
	}
	text := lines.wait(t, "default/0of1 owner=one epoch=7 state=live", 2)
	if strings.Contains(text, "\x1b") {
		t.Errorf("drawn where there is no terminal: %q", text)
	}
	sees(t, text, "lag=0.12s rate=40/s waiting=0 scheduled=3 dead=0\n")
	for _, f := range []func() int{end, endLines} {
		if code := f(); code != exitOK {
			t.Errorf("exit code %d", code)
		}
	}
}

// A server that goes away is shown, and asked again.
func TestAWatchBearsAServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	var b bytes.Buffer
	s := statusAnswer{Overview: admin.Overview{Watcher: "orders", Watchers: []admin.Watcher{{Name: "orders", Slot: "0of1", State: "live"}}}}
	f := &frame{out: &b}
	for _, problem := range []error{nil, errors.New("MongoDB does not\nanswer"), nil} {
		if err := f.draw(func(w io.Writer) error { return s.frame(w, problem) }); err != nil {
			t.Fatal(err)
		}
	}
	text := b.String()
	if strings.Count(text, "\x1b[2J") != 1 || strings.Count(text, "\x1b[H") != 3 || strings.Count(text, "\x1b[J") != 3 || !strings.Contains(text, "MongoDB does not answer\x1b[K\n") || strings.Count(text, "0of1") != 2 {
		t.Errorf("%q", text)
	}
}

func TestPing(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	var pong admin.Pong
	d.run(&pong, exitOK, "ping")
	if !pong.MongoDB || !pong.Storage || pong.RoundTrip <= 0 {
		t.Errorf("%+v", pong)
	}
	sees(t, d.run(nil, exitOK, "ping"), "MongoDB answers in", "the state database is there")
	d.env = append(d.env, "OUTRELAY_MONGODB_STATE="+stacktest.Database(t, d.shop.Client()).Name())
	sees(t, d.run(nil, exitOK, "ping"), "no watcher has run")
	d.env = append(d.env, "OUTRELAY_MONGODB_URI=mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200")
	sees(t, d.run(nil, exitTemporary, "ping"), "outrelay doctor")
}

func TestLookupCommand(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	var f admin.Found
	d.run(&f, exitOK, "lookup", "Reminder-1")
	if len(f.Envelopes) != 1 || f.Envelopes[0].State != "scheduled" {
		t.Errorf("%+v", f)
	}
	sees(t, d.run(nil, exitOK, "lookup", "Reminder-1"), "Reminder-1: scheduled", "Reminder of order/o", "due")
	sees(t, d.run(nil, exitConfig, "lookup", "nothing"), "nothing is known of it")
	for _, args := range [][]string{{}, {"x", "--key", "y"}, {"--key", "y", "--limit", "0"}, {"--key", "y", "--from", "soon"}} {
		d.run(nil, exitConfig, append([]string{"lookup"}, args...)...)
	}
}

type order struct{ Total int }

func TestSagaCommands(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	sees(t, d.run(nil, exitOK, "saga", "types"), "no service")
	s, err := saga.NewMongoStore(d.shop)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Prepare(t.Context(), saga.TypeInfo{Name: "payments", Owner: "shop.Payment", ID: saga.KindString}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		d.insert(d.shop.Collection("payments"), bson.D{
			{Key: "_id", Value: fmt.Sprint("p", i)},
			{Key: "version", Value: int64(i + 1)},
			{Key: "createdAt", Value: time.Now()},
			{Key: "updatedAt", Value: time.Now().Add(time.Duration(i) * time.Second)},
			{Key: "state", Value: order{i}},
		})
	}
	var types sagaTypes
	d.run(&types, exitOK, "saga", "types")
	if len(types.Types) != 1 || types.Types[0].Count != 3 || types.Types[0].Owner != "shop.Payment" {
		t.Errorf("%+v", types)
	}
	var page admin.SagaPage
	d.run(&page, exitOK, "saga", "list", "payments", "--limit", "2")
	var rest admin.SagaPage
	d.run(&rest, exitOK, "saga", "list", "payments", "--limit", "2", "--after", page.Next, "--database", d.shop.Name())
	if len(page.Sagas) != 2 || page.Sagas[0].ID != "p2" || len(rest.Sagas) != 1 || rest.Sagas[0].ID != "p0" {
		t.Errorf("%+v %+v", page, rest)
	}
	sees(t, d.run(nil, exitOK, "saga", "list", "payments"), "p1", "3 of 3 instances")
	var one admin.Saga
	d.run(&one, exitOK, "saga", "show", "payments", "p1")
	if one.Version != 2 || len(one.State) != 0 {
		t.Errorf("%+v", one)
	}
	sees(t, d.run(nil, exitOK, "saga", "show", "payments", "p1", "--state"), "version 2", `"total": 1`)
	for _, args := range [][]string{{"show", "payments", "nobody"}, {"show", "unknown", "x"}, {"list", "unknown"}, {"list", "payments", "--limit", "0"}, {"list", "payments", "--database", "elsewhere"}} {
		d.run(nil, exitConfig, append([]string{"saga"}, args...)...)
	}
}

func TestInboxCommands(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	sees(t, d.run(nil, exitOK, "inbox", "counts"), "there is no inbox")
	d.run(nil, exitConfig, "inbox", "purge", "--older-than", "72h")
	x, err := inbox.New(d.shop)
	if err != nil {
		t.Fatal(err)
	}
	if err := x.EnsureIndexes(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := d.shop.CreateCollection(t.Context(), "inbox_offsets"); err != nil && !strings.Contains(err.Error(), "NamespaceExists") {
		t.Fatal(err)
	}
	old, now := time.Now().Add(-90*24*time.Hour), time.Now()
	for i, at := range []time.Time{old, old, now} {
		d.insert(d.shop.Collection("inbox"), bson.D{{Key: "_id", Value: fmt.Sprint("m", i)}, {Key: "s", Value: "handled"}, {Key: "at", Value: at}})
	}
	for i, until := range []time.Time{old, now.Add(time.Hour)} {
		d.insert(d.shop.Collection("inbox_claims"), bson.D{{Key: "_id", Value: fmt.Sprint("m", i)}, {Key: "until", Value: until}})
	}
	var counts inboxes
	d.run(&counts, exitOK, "inbox", "counts")
	if len(counts.Inboxes) != 1 || counts.Inboxes[0].Handled != 3 || counts.Inboxes[0].Claimed != 2 || counts.Inboxes[0].Expired != 1 {
		t.Errorf("%+v", counts)
	}
	sees(t, d.run(nil, exitOK, "inbox", "counts"), d.shop.Name(), "inbox")
	sees(t, d.run(nil, exitOK, "inbox", "marks"), "keeps watermarks")
	var purged admin.InboxPurged
	d.run(&purged, exitOK, "inbox", "purge", "--older-than", "720h", "--dry-run")
	if purged.Matched != 2 || purged.Removed != 0 {
		t.Errorf("%+v", purged)
	}
	sees(t, d.run(nil, exitConfig, "inbox", "purge", "--older-than", "720h"), "remove 2 markers", "say --yes")
	d.run(&purged, exitOK, "inbox", "purge", "--older-than", "720h", "--yes")
	if purged.Removed != 2 {
		t.Errorf("%+v", purged)
	}
	d.run(nil, exitConfig, "inbox", "purge")
	var released admin.InboxReleased
	d.run(&released, exitOK, "inbox", "release", "--dry-run")
	if released.Matched != 2 || released.Live != 1 {
		t.Errorf("%+v", released)
	}
	d.run(nil, exitConfig, "inbox", "release", "--yes")
	d.run(&released, exitOK, "inbox", "release", "--yes", "--force", "--database", d.shop.Name())
	if released.Released != 2 {
		t.Errorf("%+v", released)
	}
}

func TestStorageCommands(t *testing.T) {
	t.Parallel()
	d := deployed(t)
	var counts admin.Counts
	d.run(&counts, exitOK, "storage", "counts")
	if counts.Envelopes != 3 || counts.Scheduled != 3 {
		t.Errorf("%+v", counts)
	}
	sees(t, d.run(nil, exitOK, "storage", "counts"), "scheduled")
	d.run(nil, exitConfig, "storage", "rebuild", "--dry-run") // the indexes are missing
	sees(t, d.run(nil, exitConfig, "storage", "rebuild"), "say --yes")
	for range 2 {
		var v admin.Verification
		d.run(&v, exitOK, "storage", "rebuild", "--yes")
	}
	var c admin.Cleared
	d.run(&c, exitOK, "storage", "clear", "envelopes", "--dry-run")
	if c.Found != 3 || c.Removed != 0 || c.Confirm != "clear default" {
		t.Errorf("%+v", c)
	}
	sees(t, d.run(nil, exitConfig, "storage", "clear", "envelopes", "--yes"), `say --confirm "clear default"`)
	sees(t, d.run(nil, exitConfig, "storage", "clear", "envelopes", "--confirm", "yes"), "nothing was done", `"clear default"`)
	sees(t, d.run(nil, exitConfig, "storage", "clear", "envelopes", "--confirm", "clear default"), "owns slot")
	sees(t, d.run(nil, exitConfig, "storage", "clear", "everything", "--dry-run"), "cannot be cleared")
	d.run(nil, exitConfig, "storage", "clear")
	d.run(&c, exitOK, "storage", "clear", "envelopes", "events", "--confirm", "clear default", "--force")
	if n, err := d.shop.Collection("outbox").CountDocuments(t.Context(), bson.D{}); err != nil || n != 0 || c.Removed < 3 {
		t.Errorf("%d are left, %v: %+v", n, err, c)
	}
}

func TestWordsAreTyped(t *testing.T) {
	t.Parallel()
	var errOut bytes.Buffer
	a := &acting{p: &program{in: strings.NewReader(" clear orders \n"), errOut: &errOut}, asks: true}
	if got, err := a.typed(t.Context(), "remove 7 documents", "clear orders"); err != nil || got != "clear orders" || !strings.Contains(errOut.String(), "This will remove 7 documents. Type clear orders to go on") {
		t.Errorf("%q, %v: %q", got, err, errOut.String())
	}
}
