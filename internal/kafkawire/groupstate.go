package kafkawire

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/segmentio/kafka-go/protocol/describegroups"
	"github.com/segmentio/kafka-go/protocol/listgroups"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// GroupState is the state of a consumer group. State is a name of Kafka, for example "Stable". A group that never existed is
// "Dead".
type GroupState struct {
	State   string
	Members []MemberState
}

// MemberState is a member of a consumer group. ClientID and Host are those of its connection.
type MemberState struct {
	ID, Instance   string // Instance: of a static member; "" for others
	ClientID, Host string
	Assigned       []record.TopicPartition // empty while the group is rebalanced
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
	state := GroupState{State: responseGroup.GroupState}
	for i := range responseGroup.Members {
		member := &responseGroup.Members[i]
		list, err := decodeAssignment(member.MemberAssignment)
		if err != nil {
			return GroupState{}, fmt.Errorf("member %s: %w", member.MemberID, err)
		}
		state.Members = append(state.Members, MemberState{member.MemberID, member.GroupInstanceID, member.ClientID, member.ClientHost, list})
	}
	return state, nil
}

// GroupNames returns the names of the consumer groups that this user may describe, in order. It sends a request to every broker. The error joins
// the errors of the brokers whose groups are missing.
func (c *Client) GroupNames(ctx context.Context) ([]string, error) {
	layout, err := c.Metadata(ctx, nil)
	if err != nil {
		return nil, err
	}

	var names []string
	for _, addr := range layout.Brokers {
		message, callErr := c.callBroker(ctx, addr, adminTimeout, &listgroups.Request{})
		if callErr == nil {
			callErr = codeError(message.(*listgroups.Response).ErrorCode)
		}
		if callErr != nil {
			err = errors.Join(err, fmt.Errorf("listing the groups of broker %s: %w", addr, callErr))
			continue
		}
		for _, group := range message.(*listgroups.Response).Groups {
			// Others, such as those of Kafka Connect, read no topics. A group whose offsets a tool has set has no type.
			if group.ProtocolType == "consumer" || group.ProtocolType == "" {
				names = append(names, group.GroupID)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), err
}

var errAssignment = errors.New("its assignment is not in the format of Kafka's consumers")

// decodeAssignment decodes the assignment of a member in the format of Kafka's consumer protocol. It is empty while the group is
// rebalanced.
func decodeAssignment(data []byte) ([]record.TopicPartition, error) {
	if len(data) == 0 {
		return nil, nil
	}
	decoder := &response.Decoder{B: data}
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
