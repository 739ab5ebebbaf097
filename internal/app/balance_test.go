package app

import (
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/config"
	"github.com/outrelay/outrelay/internal/nodes"
	"github.com/outrelay/outrelay/internal/slot"
)

func balanced(slots int) *slotBalancer {
	cfg := config.Default()
	cfg.Node, cfg.Watcher, cfg.Slots = "a", "w", slots
	r := &Relay{cfg: cfg, log: slog.New(slog.DiscardHandler), state: newState(time.Second, time.Now)}
	for _, p := range slot.Ranges(slots) {
		r.slots = append(r.slots, &runner{Relay: r, part: p, state: newState(time.Second, time.Now), yield: make(chan string, 1)})
	}
	b := newSlotBalancer(r)
	r.balancer = b
	return b
}

func TestN28_WhoCountsAsLiving(t *testing.T) {
	t.Parallel()
	b := balanced(2)
	node := func(name string, change func(*nodes.Node)) nodes.Node {
		n := nodes.Node{Node: name, Watchers: []string{"w"}, Slots: 2, KafkaReachable: true}
		if change != nil {
			change(&n)
		}
		return n
	}
	list := func() []nodes.Node {
		return []nodes.Node{
			node("a", func(n *nodes.Node) { n.KafkaReachable = false }), node("b", nil),
			node("stale", func(n *nodes.Node) { n.AgeMS = staleAfter.Milliseconds() }),
			node("divided otherwise", func(n *nodes.Node) { n.Slots = 3 }),
			node("of another watcher", func(n *nodes.Node) { n.Watchers = []string{"x"} }),
			node("without Kafka", func(n *nodes.Node) { n.KafkaReachable = false }),
			node("expired", nil),
		}
	}
	if got := b.liveNodes(list(), map[string]bool{"expired": true, "a": true}); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%q live", got)
	}
	alone := []nodes.Node{node("b", func(n *nodes.Node) { n.KafkaReachable = false })}
	if got := b.liveNodes(alone, nil); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%q live when nobody reaches Kafka", got)
	}
}

// A node attempts no slot beyond its quota, but one that is pinned to it, and one that nobody else takes; and it keeps the latter
// for a while, longer each time.
func TestN28_AdmittedUpToTheQuota(t *testing.T) {
	t.Parallel()
	b := balanced(4)
	b.patience = time.Hour // more than any of this takes
	if wait, _ := b.admitAttempt(0, false); wait == 0 {
		t.Fatal("admitted before anything was read")
	}
	table := slot.Table{Nodes: []string{"a", "b"}, Slots: make([]slot.Holding, 4)}
	b.setTable(table, time.Now())
	_, first := b.admitAttempt(0, false)
	_, second := b.admitAttempt(1, false)
	if first == nil || second == nil {
		t.Fatal("two of four are not admitted")
	}
	if wait, _ := b.admitAttempt(2, false); wait == 0 {
		t.Error("a third one is admitted")
	}
	second(false) // another was quicker
	_, third := b.admitAttempt(2, false)
	if third == nil {
		t.Fatal("not admitted although one attempt failed")
	}
	first(true)
	third(true)
	if wait, _ := b.admitAttempt(3, false); wait == 0 {
		t.Error("a third one is admitted")
	}
	if _, pinned := b.admitAttempt(3, true); pinned == nil {
		t.Error("a pinned one is not admitted")
	} else {
		pinned(false)
	}
	b.setTable(table, time.Now().Add(-2*b.patience)) // it was free then
	b.mu.Lock()
	b.freeSince[3] = time.Now().Add(-2 * b.patience)
	b.mu.Unlock()
	_, rescue := b.admitAttempt(3, false)
	if rescue == nil {
		t.Fatal("nobody takes the last one")
	}
	rescue(true)
	if b.keepFor != keepLeast {
		t.Errorf("kept for %v", b.keepFor)
	}
	for i := range table.Slots {
		table.Slots[i].Node = "a"
	}
	now := b.rescuedAt
	b.setTable(table, now)
	b.handOverOne(now)
	if b.offered() != 0 {
		t.Error("it is handed over at once")
	}
	b.handOverOne(now.Add(2 * keepLeast))
	if n := b.offered(); n != 1 {
		t.Errorf("%d are handed over at a time", n)
	}
	b.slotReleased(3) // and the table, which was read before, shows it as the node's own
	b.handOverOne(now.Add(2 * keepLeast))
	if n := b.offered(); n != 1 {
		t.Errorf("%d are handed over although the quota is reached", n)
	}
	b.noteRescueLocked(now.Add(keepLeast))
	if b.keepFor != 2*keepLeast {
		t.Errorf("kept for %v the second time", b.keepFor)
	}
	b.noteRescueLocked(now.Add(time.Hour))
	if b.keepFor != keepLeast {
		t.Errorf("kept for %v after a quiet hour", b.keepFor)
	}
}

func (b *slotBalancer) offered() (n int) {
	for _, s := range b.relay.slots {
		n += len(s.yield)
	}
	return n
}

// The process is as well as its slots are, and tells which one is not.
func TestN28_HealthIsThatOfAllSlots(t *testing.T) {
	t.Parallel()
	b := balanced(2)
	b.relay.state.setRole(RoleStandby)
	h := b.relay.processHealth()
	if ok, role, _ := h.Ready(); ok || role != string(RoleStarting) {
		t.Errorf("ready %v as %s before its slots are", ok, role)
	}
	b.relay.slots[0].state.setRole(RoleStandby)
	b.relay.slots[1].state.setRole(RoleOwner)
	if ok, role, _ := h.Ready(); !ok || role != string(RoleOwner) {
		t.Errorf("ready %v as %s", ok, role)
	}
	b.relay.slots[0].state.setProblem("stream", "denied", true)
	if ok, _, why := h.Ready(); ok || len(why) != 1 || !strings.HasPrefix(why[0], "0of2: stream: denied (for ") {
		t.Errorf("ready %v: %q", ok, why)
	}
	b.relay.slots[0].state.clearProblems("stream")
	b.relay.slots[0].state.setRole(RoleHalted)
	if ok, role, _ := h.Ready(); ok || role != string(RoleHalted) {
		t.Errorf("ready %v as %s with a slot that is halted", ok, role)
	}
	if err := h.Live(); err != nil {
		t.Error(err)
	}
	b.relay.slots[1].state.setHung()
	if err := h.Live(); err == nil || errors.Is(err, errStepDown) {
		t.Errorf("a slot hangs: %v", err)
	}
}
