package kafkalog

import (
	"context"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/service/transport"
)

// GroupOffsets reads and commits the offsets of a group with their leader epochs and the ids of their topics, which the libraries
// leave out. It remembers the coordinator until a request fails. It is safe for concurrent use.
type GroupOffsets struct {
	client *kafkawire.Client
	group  string

	mu          sync.Mutex
	coordinator string
}

// GroupOffsets returns the offsets of a group.
func (c *Client) GroupOffsets(group string) *GroupOffsets {
	return &GroupOffsets{client: c.Wire, group: group}
}

// topicIDPrefix precedes the id of the topic in the metadata of a commit. Other committers write other texts, or none.
const topicIDPrefix = "topic-id="

// read returns the committed offset of a partition, and reports whether there is one.
func (o *GroupOffsets) read(ctx context.Context, tp transport.TopicPartition) (committed kafkawire.GroupOffset, ok bool, err error) {
	key := record.TopicPartition(tp)
	err = o.call(ctx, func(ctx context.Context, coordinator string) error {
		list, err := o.client.CommittedOffsets(ctx, coordinator, o.group, []record.TopicPartition{key})
		committed, ok = list[key]
		return err
	})
	return committed, ok, err
}

// Commit stores offsets for a member. reader has read the partitions. An error of the broker is a kafkawire.Code.
func (o *GroupOffsets) Commit(
	ctx context.Context, member kafkawire.GroupMember, reader *Reader, offsets map[transport.TopicPartition]transport.GroupOffset,
) error {
	list := make(map[record.TopicPartition]kafkawire.GroupOffset, len(offsets))
	for tp, at := range offsets {
		stored := kafkawire.GroupOffset{Offset: at.Offset, LeaderEpoch: reader.epochs.epochOf(tp)}
		if at.TopicID != "" {
			stored.Metadata = topicIDPrefix + at.TopicID
		}
		list[record.TopicPartition(tp)] = stored
	}

	member.Group = o.group
	return o.call(ctx, func(ctx context.Context, coordinator string) error {
		return o.client.CommitOffsets(ctx, coordinator, member, list)
	})
}

// Leave removes a member from the group. An error of the broker is a kafkawire.Code.
func (o *GroupOffsets) Leave(ctx context.Context, member string) error {
	return o.call(ctx, func(ctx context.Context, coordinator string) error {
		return o.client.LeaveGroup(ctx, coordinator, kafkawire.GroupMember{Group: o.group, Member: member})
	})
}

// call calls request with the coordinator.
func (o *GroupOffsets) call(ctx context.Context, request func(ctx context.Context, coordinator string) error) error {
	ctx, cancel := context.WithTimeout(ctx, RequestTimeout)
	defer cancel()
	// The request runs without the lock, so a slow coordinator does not block commits of other partitions.
	o.mu.Lock()
	coordinator := o.coordinator
	o.mu.Unlock()

	if coordinator == "" {
		found, err := o.client.FindGroupCoordinator(ctx, o.group)
		if err != nil {
			return err
		}
		coordinator = found
	}

	err := request(ctx, coordinator)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.coordinator = coordinator
	// The coordinator may have moved, so the next call looks it up.
	if err != nil {
		o.coordinator = ""
	}
	return err
}
