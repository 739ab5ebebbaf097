package slots

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/config"
	"github.com/outrelay/outrelay/internal/contract/slot"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"
	"github.com/outrelay/outrelay/internal/relay/stored/state"
)

// requests is a process that keeps the requests to hand over a slot, at most one for each slot.
type requests map[int]bool

func (requests) ReportSharing(error)        {}
func (requests) LeaveNodes(context.Context) {}
func (requests) IsHalted(int) bool          { return false }

func (r requests) RequestHandOver(i int, _ string) bool {
	had := r[i]
	r[i] = true
	return !had
}

func balanced(slots int) (*Balancer, requests) {
	cfg := config.Default()
	cfg.Node, cfg.Watcher, cfg.Slots = "a", "w", slots
	offered := requests{}
	return NewBalancer(cfg, state.Database{}, nil), offered
}

func TestN28_WhoCountsAsLiving(t *testing.T) {
	t.Parallel()
	b, _ := balanced(2)
	node := func(name string, change func(*nodes.Node)) nodes.Node {
		n := nodes.Node{Node: name, Watchers: []string{"w"}, Slots: 2, KafkaReachable: true, Facts: nodes.Facts{Tasks: []string{"relay"}}}
		if change != nil {
			change(&n)
		}
		return n
	}

	list := func() []nodes.Node {
		return []nodes.Node{
			node("a", func(n *nodes.Node) { n.KafkaReachable = false }), node("b", nil),
			node("stale", func(n *nodes.Node) { n.AgeMS = nodes.StaleAfter.Milliseconds() }),
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
		t.Errorf("%q live when no node reaches Kafka", got)
	}
}

// A node attempts no slot beyond its quota, except a slot that is pinned to it, and a slot that no other node takes. It
// keeps the latter for a while, longer each time.
func TestN28_AdmittedUpToTheQuota(t *testing.T) {
	t.Parallel()
	b, offered := balanced(4)
	// The patience is longer than the test.
	b.patience = time.Hour
	if b.AdmitAttempt(0, false) != nil {
		t.Fatal("admitted before anything was read")
	}

	table := slot.Table{Nodes: []string{"a", "b"}, Slots: make([]slot.Holding, 4)}
	b.setTable(table, time.Now())
	first := b.AdmitAttempt(0, false)
	second := b.AdmitAttempt(1, false)
	if first == nil || second == nil {
		t.Fatal("two of four are not admitted")
	}
	if b.AdmitAttempt(2, false) != nil {
		t.Error("a third one is admitted")
	}

	second(false) // another was quicker
	third := b.AdmitAttempt(2, false)
	if third == nil {
		t.Fatal("not admitted although one attempt failed")
	}

	first(true)
	third(true)
	if b.AdmitAttempt(3, false) != nil {
		t.Error("a third one is admitted")
	}
	if pinned := b.AdmitAttempt(3, true); pinned == nil {
		t.Error("a pinned one is not admitted")
	} else {
		pinned(false)
	}

	b.setTable(table, time.Now().Add(-2*b.patience)) // it was free then
	b.mu.Lock()
	b.freeSince[3] = time.Now().Add(-2 * b.patience)
	b.mu.Unlock()
	rescue := b.AdmitAttempt(3, false)
	if rescue == nil {
		t.Fatal("no node takes the last slot")
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
	b.handOverOne(now, offered)
	if len(offered) != 0 {
		t.Error("it is handed over at once")
	}

	b.handOverOne(now.Add(2*keepLeast), offered)
	if n := len(offered); n != 1 {
		t.Errorf("%d are handed over at a time", n)
	}

	// The table was read before, so it lists the slot as owned by the node.
	b.NoteReleased(3)
	b.handOverOne(now.Add(2*keepLeast), offered)
	if n := len(offered); n != 1 {
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
