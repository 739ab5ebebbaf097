package consumer

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/segmentio/kafka-go"
)

// exclusive gives all partitions to one member: the one with the highest priority, of several the first by id. The others
// stand by and take over when it leaves the group or is gone.
type exclusive struct{ priority int32 }

// ProtocolName tells it from other ways to assign: all members of a group must agree on one.
func (exclusive) ProtocolName() string { return "outrelay-exclusive" }

// UserData is the member's priority.
func (e exclusive) UserData() ([]byte, error) {
	return binary.BigEndian.AppendUint32(nil, uint32(e.priority)), nil
}

// AssignGroups gives each topic to one of the members that read it.
func (exclusive) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	order := slices.Clone(members)
	slices.SortFunc(order, func(a, b kafka.GroupMember) int {
		if pa, pb := priority(a), priority(b); pa != pb {
			return int(pb) - int(pa)
		}
		return strings.Compare(a.ID, b.ID)
	})
	out := kafka.GroupMemberAssignments{}
	for _, m := range order {
		out[m.ID] = map[string][]int{}
	}
	for _, p := range partitions {
		for _, m := range order {
			if slices.Contains(m.Topics, p.Topic) {
				out[m.ID][p.Topic] = append(out[m.ID][p.Topic], p.ID)
				break
			}
		}
	}
	return out
}

// spread gives the partitions of all topics out evenly. kafka-go's own ways look at one topic at a time, and give the first
// partition of each to the same member: many small topics, as those of retries, would all be one member's.
type spread struct{}

// ProtocolName tells it from other ways to assign. Members that do not know it agree on Kafka's range.
func (spread) ProtocolName() string { return "outrelay-spread" }

// UserData is none.
func (spread) UserData() ([]byte, error) { return nil, nil }

// AssignGroups gives each partition to the one with the fewest so far among the members that read its topic.
func (spread) AssignGroups(members []kafka.GroupMember, partitions []kafka.Partition) kafka.GroupMemberAssignments {
	order := slices.SortedFunc(slices.Values(members), func(a, b kafka.GroupMember) int { return strings.Compare(a.ID, b.ID) })
	all := slices.SortedFunc(slices.Values(partitions), func(a, b kafka.Partition) int {
		return cmp.Or(strings.Compare(a.Topic, b.Topic), cmp.Compare(a.ID, b.ID))
	})
	out := kafka.GroupMemberAssignments{}
	count := map[string]int{}
	for _, m := range order {
		out[m.ID] = map[string][]int{}
	}
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

func priority(m kafka.GroupMember) int32 {
	if len(m.UserData) != 4 {
		return 0
	}
	return int32(binary.BigEndian.Uint32(m.UserData))
}

func (cfg *KafkaConfig) balancers() []kafka.GroupBalancer {
	if cfg.Exclusive {
		return []kafka.GroupBalancer{exclusive{cfg.Priority}}
	}
	return []kafka.GroupBalancer{spread{}, kafka.RangeGroupBalancer{}}
}
