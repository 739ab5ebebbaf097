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
	message, err := c.callBroker(ctx, coordinator, adminTimeout, &describegroups.Request{Groups: []string{group}})
	if err != nil {
		return GroupState{}, err
	}
	groups := message.(*describegroups.Response).Groups
	if len(groups) != 1 {
		return GroupState{}, fmt.Errorf("the broker described %d groups in place of %s", len(groups), group)
	}

	responseGroup := groups[0]
	if err := codeError(responseGroup.ErrorCode); err != nil {
		return GroupState{}, err
	}
	state := GroupState{State: responseGroup.GroupState, Members: len(responseGroup.Members)}
	for i := range responseGroup.Members {
		list, err := decodeAssignment(responseGroup.Members[i].MemberAssignment)
		if err != nil {
			return GroupState{}, fmt.Errorf("member %s: %w", responseGroup.Members[i].MemberID, err)
		}
		state.Assigned = append(state.Assigned, list...)
	}
	return state, nil
}

var errAssignment = errors.New("its assignment is not in the format of Kafka's consumers")

// decodeAssignment decodes the assignment of a member in the format of Kafka's consumer protocol. It is empty while the group is
// rebalanced.
func decodeAssignment(data []byte) ([]record.TopicPartition, error) {
	if len(data) == 0 {
		return nil, nil
	}
	decoder := &reply.Decoder{B: data}
	decoder.Skip(2) // version

	var list []record.TopicPartition
	for n := decoder.Count(6); n > 0 && !decoder.Bad; n-- {
		topic := string(decoder.Bytes(int(decoder.Int16())))
		for k := decoder.Count(4); k > 0; k-- {
			list = append(list, record.TopicPartition{Topic: topic, Partition: decoder.Int32()})
		}
	}
	if decoder.Bad {
		return nil, errAssignment
	}
	return list, nil
}
