package process_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/internal/operate/admin"
	"github.com/outrelay/outrelay/internal/relay/process"
	"github.com/outrelay/outrelay/internal/relay/readiness"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
)

func (b *bundle) listNodes() []nodes.Node {
	b.t.Helper()
	all, err := nodes.NewNodes(b.state.Collection("nodes")).List(b.t.Context())
	if err != nil {
		b.t.Fatal(err)
	}
	return all
}

// waitOwned waits until a node has taken over.
func (b *bundle) waitOwned(node string) {
	b.t.Helper()
	stacktest.Eventually(b.t, "node "+node+" has taken over", func() bool { return b.log.countWith(`msg="took over"`, "node="+node+" ") > 0 })
}

// countWith counts the lines that contain all of the words.
func (l *lines) countWith(words ...string) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for line := range strings.Lines(l.buf.String()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			n++
		}
	}
	return n
}

// isLost reports whether the relay has logged that an entry of the audit log is lost. The relay does not wait for these entries. If a
// server is too slow, the relay drops an entry, or the removal of a node from the list, and logs this.
func (b *bundle) isLost(kind string) bool {
	return b.log.countWith("an entry of the audit log is lost", "kind="+kind) > 0 || kind == "node_stopped" && b.staysListed()
}

func (b *bundle) staysListed() bool { return b.log.countWith("the node stays listed") > 0 }

// waitNoted waits for an entry of the audit log about a node.
func (b *bundle) waitNoted(node, kind string) {
	b.t.Helper()
	stacktest.Eventually(b.t, "the audit log contains "+kind+" of "+node, func() bool { return slices.Contains(b.listKinds(node), kind) || b.isLost(kind) })
}

// checkEntries checks that these are the entries about a node, in this order.
func (b *bundle) checkEntries(node string, want ...string) {
	b.t.Helper()
	got := b.listKinds(node)
	// A machine that stands still for a while causes these entries.
	left := slices.DeleteFunc(slices.Clone(got), func(k string) bool { return k == "node_stale" || k == "node_returned" })

	for _, k := range want {
		switch {
		case len(left) > 0 && left[0] == k:
			left = left[1:]
		case !b.isLost(k):
			b.t.Errorf("the entries about %s are %v, want %v", node, got, want)
			return
		}
	}

	if len(left) > 0 {
		b.t.Errorf("the entries about %s are %v, want %v", node, got, want)
	}
}

// listKinds returns the kinds of the entries of the audit log about a node, in their order.
func (b *bundle) listKinds(node string) []string {
	b.t.Helper()
	all, err := nodes.NewAuditLog(b.state.Collection("audit"), "", "").Latest(b.t.Context(), 100)
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

// Owner and standby are listed only while they run. The audit log contains their starts, takeovers
// and stops.
func TestOwnerAndStandbyAreListedWhileTheyRun(t *testing.T) {
	t.Parallel()
	b := setup(t)
	first := b.start("node=one")
	b.waitOwned("one")
	second := b.start("node=two")

	stacktest.Eventually(t, "the owner and the standby are listed", func() bool {
		all := b.listNodes()
		i := slices.IndexFunc(all, func(n nodes.Node) bool { return n.Node == "one" })
		return len(all) == 2 && slices.Equal(all[i].Holds, []string{"default/0of1"})
	})

	for _, n := range b.listNodes() {
		if !slices.Equal(n.Tasks, []string{"relay", "cleaner"}) || !slices.Contains(n.Capabilities, "preset:typed") ||
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
	b.waitOwned("two")
	if err := second(); err != nil || len(b.listNodes()) != 0 && !b.staysListed() {
		t.Errorf("%v; left on the list: %+v", err, b.listNodes())
	}

	b.checkEntries("one", "node_started", "took_over", "released", "node_stopped")
	b.checkEntries("two", "node_started", "node_listed_again", "took_over", "released", "node_stopped")
}

// If an acquisition was rejected, for example of copied state, and another node owns the lease now, the standby can take over.
func TestN05_AStandbyIsReadyAfterARejectedAcquisition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=one")
	b.waitOwned("one")

	var standby *process.Relay
	b.startAs(func(r *process.Relay) {
		standby = r
		r.FailPart("lease", errors.New("the state was copied"))
	}, "node=two")
	stacktest.Eventually(t, "the standby is ready", func() bool {
		ok, phase, _ := standby.Ready()
		return ok && phase == readiness.PhaseStandby
	})
}

// A problem of a sweep ends with its term: the next owner sweeps.
func TestTheProblemsOfATermEndWithIt(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var first *process.Relay
	b.startAs(func(r *process.Relay) { first = r }, "node=one")
	b.waitOwned("one")
	b.start("node=two")

	first.FailPart("sweep", errors.New("a collection cannot be read"))
	op := admin.Operator{State: b.state, Watcher: "default", Actor: "test"}
	if err := op.Lease().StepDown(t.Context(), admin.StepDownOrder{Hold: time.Hour, Force: true}); err != nil {
		t.Fatal(err)
	}
	b.waitOwned("two")
	stacktest.Eventually(t, "the standby is ready", func() bool {
		ok, phase, _ := first.Ready()
		return ok && phase == readiness.PhaseStandby
	})
}

func TestALostLeaseIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=one")
	b.waitOwned("one")
	// Another owner has acquired the lease.
	if _, err := b.state.Collection("watchers").UpdateOne(t.Context(), bson.D{{Key: "_id", Value: "default/0of1"}}, bson.D{
		{Key: "$set", Value: bson.D{{Key: "owner", Value: "other/x"}, {Key: "node", Value: "other"}}}, {Key: "$inc", Value: bson.D{{Key: "epoch", Value: 1}}},
	}); err != nil {
		t.Fatal(err)
	}
	b.waitNoted("one", "lease_lost")
}

// If a watcher is pinned to a node that is gone, another node runs it and logs that: an owner that stays, and the next
// owner.
func TestALapsedPinIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	stop := b.start("node=one")
	b.waitOwned("one")

	op := admin.Operator{State: b.state, Watcher: "default", Actor: "test"}
	if err := op.Lease().PinAhead(t.Context(), "ghost"); err != nil {
		t.Fatal(err)
	}
	b.waitNoted("one", "pin_lapsed")

	if err := stop(); err != nil {
		t.Fatal(err)
	}
	// A standby respects the pin for ten times this ttl.
	b.start("node=two", "lease.ttl=1s", "lease.renew=200ms")
	b.waitNoted("two", "pin_lapsed")

	all, err := nodes.NewAuditLog(b.state.Collection("audit"), "", "").Latest(t.Context(), 100)
	if err != nil {
		t.Fatal(err)
	}

	entries := map[string]int{}
	for _, e := range all {
		if e.Kind == nodes.PinLapsed {
			entries[e.Node]++
			if e.Fields.Lookup("pinned_to").StringValue() != "ghost" || e.Watcher != "default" {
				t.Errorf("%+v: %s", e, e.Fields)
			}
		}
	}

	// On a slow machine, a node may lose so short a lease, and then begins another term with the alarm.
	alarms := b.log.countWith("ALARM: the watcher is pinned to a node")
	if entries["one"] > 1 || entries["two"] > alarms || entries["one"]+entries["two"] < 2 && !b.isLost("pin_lapsed") {
		t.Errorf("%v entries about a lapsed pin, want one for each of the two nodes and at most %d", entries, alarms)
	}
}

// Two nodes of one watcher with different topics report the difference.
func TestADifferingConfigurationIsNoted(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("node=one")
	stacktest.Eventually(t, "node one is listed", func() bool { return len(b.listNodes()) == 1 })
	b.start("node=two", "retention=1h")
	b.log.wait(t, "has another configuration")
	stacktest.Eventually(t, "the audit log contains the difference", func() bool {
		return slices.Contains(b.listKinds("two"), "configuration_differs") || slices.Contains(b.listKinds("one"), "configuration_differs") || b.isLost("configuration_differs")
	})
}

// A process with the task admin alone is listed, is ready, and never seeks the lease.
func TestAProcessWithoutTheRelaysTaskTakesNothingOver(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var relay *process.Relay
	desk := b.startAs(func(r *process.Relay) { relay = r }, "slots=2", "node=desk", "tasks=admin", "http.admin.listen=127.0.0.1:0", "http.admin.anonymous=viewer")
	stacktest.Eventually(t, "the admin is listed", func() bool { return len(b.listNodes()) == 1 })
	stacktest.Eventually(t, "the admin is ready", func() bool {
		ok, phase, _ := relay.Ready()
		return ok && phase == readiness.PhaseAdmin
	})
	if n := b.listNodes()[0]; n.Node != "desk" || !slices.Equal(n.Tasks, []string{"admin"}) || len(n.Watchers) != 0 {
		t.Errorf("%+v", n)
	}

	first := b.start("slots=2", "node=one", "tasks=relay")
	b.waitOwned("one")
	for _, n := range b.listNodes() {
		if n.Node == "one" && !slices.Equal(n.Tasks, []string{"relay"}) {
			t.Errorf("%+v", n)
		}
	}

	if err := first(); err != nil {
		t.Error(err)
	}
	b.start("slots=2", "node=two")
	// The watcher was free, so the node has it.
	b.waitOwned("two")

	if err := desk(); err != nil {
		t.Error(err)
	}
	b.checkEntries("desk", "node_started", "node_stopped")
}

// An owner without the task cleaner delivers, and leaves the delivered events to an owner with that task.
func TestAnOwnerWithoutTheCleanersTaskPurgesNothing(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.insertAged("outbox", "old")
	left := func() int64 {
		n, err := b.db.Collection("outbox").CountDocuments(t.Context(), bson.D{})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}

	purging := []string{"purge.interval=1s", "retention=1m"}
	stop := b.start(append(purging, "node=one", "tasks=relay")...)
	b.consume(1)
	// These are several rounds of a purge.
	delivered := b.listNodes()[0].SeenAt
	stacktest.Eventually(t, "the owner has run for a while", func() bool { return b.listNodes()[0].SeenAt.Sub(delivered) > 5*time.Second })
	if left() != 1 {
		t.Error("the owner has purged the event")
	}
	if err := stop(); err != nil {
		t.Error(err)
	}

	b.start(append(purging, "node=two", "tasks=[relay, cleaner]")...)
	stacktest.Eventually(t, "the cleaner purges the event", func() bool { return left() == 0 })
}
