package slot

import "slices"

// Holding is who has a slot, as the watcher documents show it.
type Holding struct {
	Node   string // its owner; "" if it is free
	Pin    string // the node that it is pinned to; "" for none
	Paused bool   // nobody is to run it
}

// Table is what a node goes by: the nodes that live, itself among them, and all slots of a watcher.
type Table struct {
	Nodes []string
	Slots []Holding
}

// Quota is how many of the slots that are neither paused nor pinned the node is to run. Every node computes the same from the
// same table, without a leader; quotas add up to the number of those slots; what a node is to run in all, with what is
// pinned to it, differs by at most one from any other, but for one that has more pinned to it; and as few slots move as that
// allows, so that a table that is even already stays as it is.
func (t Table) Quota(node string) int {
	total, held, free := map[string]int{}, map[string]int{}, 0
	nodes := slices.Compact(slices.Sorted(slices.Values(t.Nodes)))
	for _, s := range t.Slots {
		switch {
		case s.Paused:
		case t.pinnedToLiveNode(s):
			total[s.Pin]++
		default:
			free++
			held[s.Node]++
		}
	}
	given := map[string]int{}
	for range free {
		best := ""
		for _, n := range nodes {
			// The least has the next one; of equals, the one that has it already.
			if best == "" || total[n] < total[best] || total[n] == total[best] && held[n]-given[n] > held[best]-given[best] {
				best = n
			}
		}
		total[best]++
		given[best]++
	}
	return given[node]
}

// pinnedToLiveNode reports whether a slot is pinned to a node that lives. A pin to another lapses; until then nobody counts on it.
func (t Table) pinnedToLiveNode(s Holding) bool {
	return s.Pin != "" && slices.Contains(t.Nodes, s.Pin)
}

// Loose reports whether slot i is one that quotas are of.
func (t Table) Loose(i int) bool { return !t.Slots[i].Paused && !t.pinnedToLiveNode(t.Slots[i]) }
