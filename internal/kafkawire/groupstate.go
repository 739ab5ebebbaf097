package kafkawire

import (
	"context"
	"errors"
	"fmt"

	"github.com/segmentio/kafka-go/protocol/describegroups"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/reply"
)

// GroupState is the state of a consumer group. State is a name of Kafka, for example "Stable". A group that never existed is
// "Dead".
type GroupState struct {
	State    string
	Members  int
	Assigned []record.TopicPartition // of all members
}

// DescribeGroup returns the state of a group from its coordinator. An error of the broker is a Code.
func (c *Client) DescribeGroup(ctx context.Context, coordinator, group string) (GroupState, error) {
	m, err := c.callBroker(ctx, coordinator, adminTimeout, &describegroups.Request{Groups: []string{group}})
	if err != nil {
		return GroupState{}, err
	}
	groups := m.(*describegroups.Response).Groups
	if len(groups) != 1 {
		return GroupState{}, fmt.Errorf("the broker described %d groups in place of %s", len(groups), group)
	}

	g := groups[0]
	if err := codeError(g.ErrorCode); err != nil {
		return GroupState{}, err
	}
	state := GroupState{State: g.GroupState, Members: len(g.Members)}
	for i := range g.Members {
		list, err := decodeAssignment(g.Members[i].MemberAssignment)
		if err != nil {
			return GroupState{}, fmt.Errorf("member %s: %w", g.Members[i].MemberID, err)
		}
		state.Assigned = append(state.Assigned, list...)
	}
	return state, nil
}

var errAssignment = errors.New("its assignment is not in the format of Kafka's consumers")

// decodeAssignment decodes the assignment of a member in the format of Kafka's consumer protocol. It is empty while the group is
// rebalanced.
func decodeAssignment(b []byte) ([]record.TopicPartition, error) {
	if len(b) == 0 {
		return nil, nil
	}
	d := &reply.Decoder{B: b}
	d.Skip(2) // version

	var list []record.TopicPartition
	for n := d.Count(6); n > 0 && !d.Bad; n-- {
		topic := string(d.Bytes(int(d.Int16())))
		for k := d.Count(4); k > 0; k-- {
			list = append(list, record.TopicPartition{Topic: topic, Partition: d.Int32()})
		}
	}
	if d.Bad {
		return nil, errAssignment
	}
	return list, nil
}
