package kafkawire

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// GroupOffset is an offset that a consumer group has committed.
type GroupOffset struct {
	Offset int64
	// LeaderEpoch is that of the last record that was read before the commit, or -1 if it is unknown. It shows after a change of
	// the leader whether the log still has the records before Offset.
	LeaderEpoch int32
	// Metadata is a text that the committer stores with the offset.
	Metadata string
}

// GroupMember is a member in one generation of its group.
type GroupMember struct {
	Group      string
	Generation int32
	Member     string
	Instance   string // of a static member; "" for others
}

// FindGroupCoordinator returns the address of the coordinator of a consumer group. An error of the broker is a Code.
func (c *Client) FindGroupCoordinator(ctx context.Context, group string) (string, error) {
	return c.findCoordinator(ctx, coordinatorOfGroups, group)
}

// CommitOffsets stores offsets for the group of member at its coordinator. The first error of a partition is a Code.
func (c *Client) CommitOffsets(ctx context.Context, coordinator string, member GroupMember, offsets map[record.TopicPartition]GroupOffset) error {
	// With -1, the broker's own retention applies.
	req := &offsetcommit.Request{GroupID: member.Group, GenerationID: member.Generation, MemberID: member.Member, GroupInstanceID: member.Instance, RetentionTimeMs: -1}
	for topic, ids := range groupByTopic(slices.Collect(maps.Keys(offsets))) {
		requestTopic := offsetcommit.RequestTopic{Name: topic}
		for _, id := range ids {
			at := offsets[record.TopicPartition{Topic: topic, Partition: id}]
			requestTopic.Partitions = append(requestTopic.Partitions, offsetcommit.RequestPartition{
				PartitionIndex:       id,
				CommittedOffset:      at.Offset,
				CommittedLeaderEpoch: at.LeaderEpoch,
				CommittedMetadata:    at.Metadata,
			})
		}
		req.Topics = append(req.Topics, requestTopic)
	}

	response, err := c.callBroker(ctx, coordinator, timeoutFor(adminTimeout, len(offsets)), req)
	if err != nil {
		return err
	}
	for _, t := range response.(*offsetcommit.Response).Topics {
		for _, p := range t.Partitions {
			if err := codeError(p.ErrorCode); err != nil {
				return fmt.Errorf("partition %s/%d: %w", t.Name, p.PartitionIndex, err)
			}
		}
	}
	return nil
}

// LeaveGroup removes a member from its group at the coordinator. An error of the broker is a Code.
func (c *Client) LeaveGroup(ctx context.Context, coordinator string, member GroupMember) error {
	response, err := c.callBroker(ctx, coordinator, adminTimeout, &leavegroup.Request{
		GroupID: member.Group, MemberID: member.Member, Members: []leavegroup.RequestMember{{MemberID: member.Member, GroupInstanceID: member.Instance}},
	})
	if err != nil {
		return err
	}
	left := response.(*leavegroup.Response)
	if err := codeError(left.ErrorCode); err != nil {
		return err
	}
	for i := range left.Members {
		if err := codeError(left.Members[i].ErrorCode); err != nil {
			return err
		}
	}
	return nil
}

// CommittedOffsets returns the offsets that a group has committed for these partitions, from its coordinator. It leaves out
// partitions without one. With nil, it returns the offsets of all partitions that the user may describe. An error of the broker is a Code.
func (c *Client) CommittedOffsets(
	ctx context.Context, coordinator, group string, partitions []record.TopicPartition,
) (map[record.TopicPartition]GroupOffset, error) {
	req := &offsetfetch.Request{GroupID: group}
	if partitions != nil {
		req.Topics = []offsetfetch.RequestTopic{}
	}
	for topic, ids := range groupByTopic(partitions) {
		req.Topics = append(req.Topics, offsetfetch.RequestTopic{Name: topic, PartitionIndexes: ids})
	}

	message, err := c.callBroker(ctx, coordinator, timeoutFor(adminTimeout, len(partitions)), req)
	if err != nil {
		return nil, err
	}
	response := message.(*offsetfetch.Response)
	if err := codeError(response.ErrorCode); err != nil {
		return nil, err
	}

	out := make(map[record.TopicPartition]GroupOffset, len(partitions))
	for _, t := range response.Topics {
		for _, p := range t.Partitions {
			if err := codeError(p.ErrorCode); err != nil {
				return nil, fmt.Errorf("partition %s/%d: %w", t.Name, p.PartitionIndex, err)
			}
			// An offset of -1 stands for a partition that the group has never committed.
			if p.CommittedOffset >= 0 {
				out[record.TopicPartition{Topic: t.Name, Partition: p.PartitionIndex}] = GroupOffset{p.CommittedOffset, p.ComittedLeaderEpoch, p.Metadata}
			}
		}
	}
	return out, nil
}
