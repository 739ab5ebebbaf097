package kafkago

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/segmentio/kafka-go"
)

// exclusive assigns all partitions to one member: the one with the highest priority, and among several
// the first by id. The other members stand by, and take over when it leaves the group or fails.
type exclusive struct{ priority int32 }

// ProtocolName returns the name of this way to assign. All members of a group must agree on one.
func (exclusive) ProtocolName() string { return "outrelay-exclusive" }

// UserData returns the member's priority.
func (e exclusive) UserData() ([]byte, error) {
	return binary.BigEndian.AppendUint32(nil, uint32(e.priority)), nil
}

// AssignGroups assigns each topic to one of the members that read it.
func (exclusive) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	order := slices.SortedFunc(slices.Values(members), func(a, b kafka.GroupMember) int {
		return cmp.Or(cmp.Compare(priorityOf(b), priorityOf(a)), strings.Compare(a.ID, b.ID))
	})
	out := newAssignments(order)
	for _, p := range partitions {
		reads := func(member kafka.GroupMember) bool { return slices.Contains(member.Topics, p.Topic) }
		if i := slices.IndexFunc(order, reads); i >= 0 {
			to := out[order[i].ID]
			to[p.Topic] = append(to[p.Topic], p.ID)
		}
	}
	return out
}

// spread assigns the partitions of all topics evenly. The methods of kafka-go treat each topic alone, and
// assign the first partition of each to the same member. One member would get all of many small topics,
// such as retry topics.
type spread struct{}

// ProtocolName returns the name of this way to assign. Groups with members that do not support it use
// Kafka's range.
func (spread) ProtocolName() string { return "outrelay-spread" }

// UserData returns nil.
func (spread) UserData() ([]byte, error) { return nil, nil }

// AssignGroups assigns each partition to the member that reads its topic and has the fewest partitions.
func (spread) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	// Each member computes the same assignment, so the order must not depend on the members' order of joining.
	order := slices.SortedFunc(slices.Values(members), func(a, b kafka.GroupMember) int {
		return strings.Compare(a.ID, b.ID)
	})
	all := slices.SortedFunc(slices.Values(partitions), func(a, b kafka.Partition) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.ID, b.ID))
	})

	out := newAssignments(order)
	count := map[string]int{}
	for _, p := range all {
		to := ""
		for _, m := range order {
			if slices.Contains(m.Topics, p.Topic) && (to == "" || count[m.ID] < count[to]) {
				to = m.ID
			}
		}
		if to != "" {
			out[to][p.Topic] = append(out[to][p.Topic], p.ID)
			count[to]++
		}
	}
	return out
}

// newAssignments returns an empty assignment for each member.
func newAssignments(members []kafka.GroupMember) kafka.GroupMemberAssignments {
	out := kafka.GroupMemberAssignments{}
	for _, m := range members {
		out[m.ID] = map[string][]int{}
	}
	return out
}

func priorityOf(member kafka.GroupMember) int32 {
	if len(member.UserData) != 4 {
		return 0
	}
	return int32(binary.BigEndian.Uint32(member.UserData))
}

// balancers returns the ways to assign. They note the partitions in assigned.
func balancers(cfg *transport.Config, assigned *assigned) []kafka.GroupBalancer {
	if cfg.Exclusive {
		return []kafka.GroupBalancer{noting{exclusive{cfg.Priority}, assigned}}
	}
	return []kafka.GroupBalancer{noting{spread{}, assigned}, noting{kafka.RangeGroupBalancer{}, assigned}}
}
