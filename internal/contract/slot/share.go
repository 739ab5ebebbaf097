package slot

import "slices"

// Holding is the owner of a slot, according to the watcher documents.
type Holding struct {
	Node   string // its owner; "" if it is free
	Pin    string // the node to which it is pinned; "" for none
	Paused bool   // no node may run it
}

// Table is the input of the distribution: the live nodes, including this one, and all slots of a watcher.
type Table struct {
	Nodes []string
	Slots []Holding
}

// Quota returns how many slots node should run, without the paused and the pinned ones. All nodes compute
// the same result from the same table, without a leader. The quotas add up to the number of slots that are
// neither paused nor pinned. Together with the slots pinned to it, each node runs at most one slot more or
// less than any other, unless one has more slots pinned to it. As few slots move as this permits, so a
// balanced table stays as it is.
func (t Table) Quota(node string) int {
	total, held, loose := map[string]int{}, map[string]int{}, 0
	nodes := slices.Compact(slices.Sorted(slices.Values(t.Nodes)))
	for _, s := range t.Slots {
		switch {
		case s.Paused:
		case t.pinnedToLiveNode(s):
			total[s.Pin]++
		default:
			loose++
			held[s.Node]++
		}
	}

	// Each loose slot goes to the node with the fewest slots. Among equal nodes it goes to the node
	// that holds most slots beyond its quota, so that few slots move.
	quota := map[string]int{}
	for range loose {
		best := ""
		for _, n := range nodes {
			fewer := best == "" || total[n] < total[best]
			if fewer || total[n] == total[best] && held[n]-quota[n] > held[best]-quota[best] {
				best = n
			}
		}
		total[best]++
		quota[best]++
	}
	return quota[node]
}

// pinnedToLiveNode reports whether a slot is pinned to a live node. A pin to a dead node lapses. Until then
// the distribution ignores it.
func (t Table) pinnedToLiveNode(holding Holding) bool {
	return holding.Pin != "" && slices.Contains(t.Nodes, holding.Pin)
}

// CountsForQuota reports whether slot i is neither paused nor pinned, so that it counts for the quotas.
func (t Table) CountsForQuota(i int) bool {
	return !t.Slots[i].Paused && !t.pinnedToLiveNode(t.Slots[i])
}
