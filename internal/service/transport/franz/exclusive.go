package franz

import (
	"cmp"
	"encoding/binary"
	"slices"
	"strings"

	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/outrelay/outrelay/internal/service/transport"
)

// balancer returns how the group divides its partitions.
func balancer(cfg *transport.Config) kgo.GroupBalancer {
	if cfg.Exclusive {
		return exclusive{cfg.Priority}
	}
	return kgo.CooperativeStickyBalancer()
}

// exclusive assigns all partitions to one member, in the same way and under the same name as package kafkago.
type exclusive struct{ priority int32 }

// ProtocolName returns the name of this way to assign.
func (exclusive) ProtocolName() string { return "outrelay-exclusive" }

// IsCooperative returns false: when the owner changes, all partitions move.
func (exclusive) IsCooperative() bool { return false }

// JoinGroupMetadata returns the topics and the priority of this member.
func (e exclusive) JoinGroupMetadata(topics []string, _ map[string][]int32, _ int32) []byte {
	meta := kmsg.NewConsumerMemberMetadata()
	meta.Topics = topics
	meta.UserData = binary.BigEndian.AppendUint32(nil, uint32(e.priority))
	return meta.AppendTo(nil)
}

// ParseSyncAssignment decodes the partitions of this member.
func (exclusive) ParseSyncAssignment(assignment []byte) (map[string][]int32, error) {
	return kgo.ParseConsumerSyncAssignment(assignment)
}

// MemberBalancer returns the balancer of one rebalance.
func (e exclusive) MemberBalancer(
	members []kmsg.JoinGroupResponseMember,
) (kgo.GroupMemberBalancer, map[string]struct{}, error) {
	balancer, err := kgo.NewConsumerBalancer(e, members)
	if err != nil {
		return nil, nil, err
	}
	return balancer, balancer.MemberTopics(), nil
}

// Balance assigns each topic to one of the members that read it: the one with the highest priority, and among several the
// first by id.
func (exclusive) Balance(balancer *kgo.ConsumerBalancer, topics map[string]int32) kgo.IntoSyncAssignment {
	type candidate struct {
		member *kmsg.JoinGroupResponseMember
		meta   *kmsg.ConsumerMemberMetadata
	}
	var order []candidate
	balancer.EachMember(func(member *kmsg.JoinGroupResponseMember, meta *kmsg.ConsumerMemberMetadata) {
		order = append(order, candidate{member, meta})
	})
	slices.SortFunc(order, func(a, b candidate) int {
		return cmp.Or(cmp.Compare(priorityOf(b.meta), priorityOf(a.meta)), strings.Compare(a.member.MemberID, b.member.MemberID))
	})

	plan := balancer.NewPlan()
	for topic, n := range topics {
		// Without a member that reads the topic, its partitions stay free.
		i := slices.IndexFunc(order, func(candidate candidate) bool { return slices.Contains(candidate.meta.Topics, topic) })
		for id := range n {
			if i >= 0 {
				plan.AddPartition(order[i].member, topic, id)
			}
		}
	}
	return plan
}

func priorityOf(meta *kmsg.ConsumerMemberMetadata) int32 {
	if len(meta.UserData) != 4 {
		return 0
	}
	return int32(binary.BigEndian.Uint32(meta.UserData))
}
