package process_test

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/admin"
	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/migrate"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/process"
)

func (b *bundle) nodes() []nodes.Node {
	b.t.Helper()
	all, err := nodes.NewNodes(b.state.Collection("nodes")).List(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return all
}

// owned waits until a node has taken over.
func (b *bundle) owned(node string) {
	b.t.Helper()
	stacktest.Eventually(b.t, "node "+node+" has taken over", func() bool { return b.log.said(`msg="took over"`, "node="+node+" ") > 0 })
}

// said counts the lines that contain all of the words.
func (l *lines) said(words ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

// The relay does not wait for entries of the events log: if a server is too slow, an entry is lost, or the removal of a
// node from the list, and the relay logs that.

func (b *bundle) lost(kind string) bool {
	return b.log.said("an entry of the events log is lost", "kind="+kind) > 0 || kind == "node_stopped" && b.staysListed()
}

func (b *bundle) staysListed() bool { return b.log.said("the node stays listed") > 0 }

// noted waits for an entry of the events log about a node.
func (b *bundle) noted(node, kind string) {
	b.t.Helper()
	stacktest.Eventually(b.t, "the events log contains "+kind+" of "+node, func() bool { return slices.Contains(b.kinds(node), kind) || b.lost(kind) })
}

// story fails unless those are the entries about a node, in that order.
func (b *bundle) story(node string, want ...string) {
	b.t.Helper()
	got := b.kinds(node)
	left := slices.DeleteFunc(slices.Clone(got), func(k string) bool { return k == "node_stale" || k == "node_returned" }) // the machine stood still

	for _, k := range want {
		switch {
		case len(left) > 0 && left[0] == k:
			left = left[1:]
		case !b.lost(k):
			b.t.Errorf("the story of %s is %v, want %v", node, got, want)
			return
		}
	}

	if len(left) > 0 {
		b.t.Errorf("the story of %s is %v, want %v", node, got, want)
	}
}

// kinds are the entries of the events log about a node, in their order.
func (b *bundle) kinds(node string) []string {
	b.t.Helper()
	all, err := nodes.NewEvents(b.state.Collection("events"), "", "").Latest(b.t.Context(), 100)
	if err != nil {
		b.t.Fatal(err)
	}
	out := []string{}
	for _, e := range slices.Backward(all) {
		if e.Node == node {
			out = append(out, string(e.Kind))
		}
	}
	return out
}

// version runs a relay of a version that contains these migrations. ended gets the result of Run.
func (b *bundle) version(node string, steps []migrate.Step) (stop func(), ended <-chan error) {
	b.t.Helper()
	cfg, _, err := config.Load("", b.env, []string{"node=" + node})
	if err != nil {
		b.t.Fatal(err)
	}

	r, err := process.New(cfg, "knows "+steps[len(steps)-1].ID, slog.New(slog.NewTextHandler(b.log, nil)))
	if err != nil {
		b.t.Fatal(err)
	}
	r.SetMigrations(steps)

	ctx, cancel := context.WithCancel(context.WithoutCancel(b.t.Context()))
	done, result := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(done)
		result <- r.Run(ctx)
	}()

	stop = func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			b.t.Error("the relay does not stop")
		}
	}
	b.t.Cleanup(stop)
	return stop, result
}

// Owner and standby are listed only while they run. The events log contains their starts, takeovers
// and stops.
func TestOwnerAndStandbyAreListedWhileTheyRun(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.start("node=one")
	b.owned("one")
	second := b.start("node=two")

	stacktest.Eventually(t, "the owner and the standby are listed", func() bool {
		all := b.nodes()
		i := slices.IndexFunc(all, func(n nodes.Node) bool { return n.Node == "one" })
		return len(all) == 2 && slices.Equal(all[i].Holds, []string{"default/0of1"})
	})

	for _, n := range b.nodes() {
		if n.Schema != migrate.LastStep(migrate.Steps()) || !slices.Equal(n.Roles, []string{"relay", "cleaner"}) || !slices.Contains(n.Capabilities, "preset:typed") ||
			n.Version != "test" || n.Instance == "" || n.Config == "" || n.Node == "two" && len(n.Holds) != 0 {
			t.Errorf("%+v", n)
		}
	}

	// Somebody takes the standby off the list.
	if err := nodes.NewNodes(b.state.Collection("nodes")).Leave(t.Context(), "two"); err != nil {
		t.Fatal(err)
	}
	b.log.wait(t, "it is listed again")

	if err := first(); err != nil {
		t.Error(err)
	}
	b.owned("two")
	if err := second(); err != nil || len(b.nodes()) != 0 && !b.staysListed() {
		t.Errorf("%v; left on the list: %+v", err, b.nodes())
	}

	b.story("one", "node_started", "took_over", "released", "node_stopped")
	b.story("two", "node_started", "node_listed_again", "took_over", "released", "node_stopped")
}

func TestALostLeaseIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=one")
	b.owned("one")
	// Another owner has acquired the lease.
	if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of1"}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "owner", Value: "other/x"}, {Key: "node", Value: "other"}}}, {Key: "$inc", Value: bson.D{{Key: "epoch", Value: 1}}},
	}); err != nil {
		t.Fatal(err)
	}
	b.noted("one", "lease_lost")
}

// If a watcher is pinned to a node that is gone, another node runs it and logs that: an owner that stays, and the next
// owner.
func TestALapsedPinIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("node=one")
	b.owned("one")

	op := admin.Operator{State: b.state, Watcher: "default", Actor: "test"}
	if err := op.Lease().PinAhead(t.Context(), "ghost"); err != nil {
		t.Fatal(err)
	}
	b.noted("one", "pin_lapsed")

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	b.start("node=two", "lease.ttl=1s", "lease.renew=200ms") // a standby respects the pin for ten times that
	b.noted("two", "pin_lapsed")

	all, err := nodes.NewEvents(b.state.Collection("events"), "", "").Latest(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}

	told := map[string]int{}
	for _, e := range all {
		if e.Kind == nodes.PinLapsed {
			told[e.Node]++
			if e.Fields.Lookup("pinned_to").StringValue() != "ghost" || e.Watcher != "default" {
				t.Errorf("%+v: %s", e, e.Fields)
			}
		}
	}

	// One with so short a lease may lose it on a slow machine, and begins so once more.
	begun := b.log.said("ALARM: the watcher is pinned to a node")
	if told["one"] > 1 || told["two"] > begun || told["one"]+told["two"] < 2 && !b.lost("pin_lapsed") {
		t.Errorf("told %v times, of %d terms that began so", told, begun)
	}
}

// Two nodes of one watcher with different topics report the difference.
func TestADifferingConfigurationIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=one")
	stacktest.Eventually(t, "node one is listed", func() bool { return len(b.nodes()) == 1 })
	b.start("node=two", "retention=1h")
	b.log.wait(t, "has another configuration")
	stacktest.Eventually(t, "the events log contains the difference", func() bool {
		return slices.Contains(b.kinds("two"), "configuration_differs") || slices.Contains(b.kinds("one"), "configuration_differs") || b.lost("configuration_differs")
	})
}

// A rolling upgrade with a migration that the older version cannot work with: the newer node waits while the older node
// lives, also through an outage of MongoDB. Then it migrates and takes over. The older version does not start any more.
func TestARollingUpgradeWaitsForTheOlderNodes(t *testing.T) {
	t.Parallel()
	b := setup(t)
	old := []migrate.Step{{ID: "0001", Name: "old"}}
	upgraded := append(slices.Clone(old), migrate.Step{ID: "0002", Name: "another form", Breaking: true})

	stopOld, _ := b.version("old", old)
	b.owned("old")
	stopNew, _ := b.version("new", upgraded)
	b.log.wait(t, "migration 0002 (another form) waits, because these live nodes are older than the migration: old (knows 0001)")
	b.noted("new", "upgrade_waits")
	stacktest.FailTimes(t, b.client, "outrelay state new", 4, bson.D{{Key: "failCommands", Value: bson.A{"update", "findAndModify", "find"}}, {Key: "errorCode", Value: int32(11600)}})
	b.append(3)
	b.consume(3) // the older node goes on
	if w := b.status(); w.Node != "old" {
		t.Errorf("%+v", w)
	}
	stopOld()
	b.owned("new")
	if n, err := b.state.Collection("migrations").CountDocuments(t.Context(), bson.D{{Key: "_id", Value: "0002"}, {Key: "outcome", Value: "applied"}}); err != nil || n != 1 {
		t.Errorf("the migration is not in the ledger: %d, %v", n, err)
	}
	b.noted("new", "took_over")
	b.story("new", "node_started", "upgrade_waits", "upgrade_goes_on", "took_over")
	_, ended := b.version("older-again", old)
	select {
	case err := <-ended:
		if !errors.Is(err, process.ErrOutdated) || !errors.Is(err, migrate.ErrNewer) {
			t.Errorf("the older version ends with %v", err)
		}
	case <-time.After(patience):
		t.Error("the older version starts")
	}
	stopNew()
	stacktest.Eventually(t, "the stopped nodes have left the list", func() bool { return len(b.nodes()) == 0 || b.staysListed() })
}

// A process with the role of an admin alone is listed, is ready, and never seeks the lease.
func TestAProcessWithoutTheRelaysRoleTakesNothingOver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	desk := b.start("node=desk", "roles=admin", "http.admin.listen=127.0.0.1:0", "http.admin.anonymous=viewer")
	stacktest.Eventually(t, "the admin is listed", func() bool { return len(b.nodes()) == 1 })
	if n := b.nodes()[0]; n.Node != "desk" || !slices.Equal(n.Roles, []string{"admin"}) || len(n.Watchers) != 0 {
		t.Errorf("%+v", n)
	}

	first := b.start("node=one", "roles=relay")
	b.owned("one")
	for _, n := range b.nodes() {
		if n.Node == "one" && !slices.Equal(n.Roles, []string{"relay"}) {
			t.Errorf("%+v", n)
		}
	}

	if err := first(); err != nil {
		t.Error(err)
	}
	b.start("node=two")
	b.owned("two") // it was free, so the node has it

	if err := desk(); err != nil {
		t.Error(err)
	}
	b.story("desk", "node_started", "node_stopped")
}
