package consumer

import (
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
	return []kafka.GroupBalancer{kafka.RangeGroupBalancer{}}
}
