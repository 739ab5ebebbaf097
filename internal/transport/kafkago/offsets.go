package kafkago

import (
	"context"
	"sync"

	"github.com/outrelay/outrelay/internal/kafkawire"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/transport/kafkalog"
)

// groupOffsets reads and commits the offsets of a group with their leader epochs, which kafka-go leaves out. It remembers the
// coordinator until a request fails.
type groupOffsets struct {
	client *kafkawire.Client
	group  string

	mu          sync.Mutex
	coordinator string
}

// read returns the committed offsets.
func (o *groupOffsets) read(
	ctx context.Context, partitions []record.TopicPartition,
) (list map[record.TopicPartition]kafkawire.GroupOffset, err error) {
	err = o.call(ctx, func(ctx context.Context, coordinator string) error {
		list, err = o.client.CommittedOffsets(ctx, coordinator, o.group, partitions)
		return err
	})
	return list, err
}

// commit stores offsets.
func (o *groupOffsets) commit(
	ctx context.Context, m kafkawire.GroupMember, list map[record.TopicPartition]kafkawire.GroupOffset,
) error {
	return o.call(ctx, func(ctx context.Context, coordinator string) error {
		return o.client.CommitOffsets(ctx, coordinator, m, list)
	})
}

// call calls request with the coordinator.
func (o *groupOffsets) call(ctx context.Context, request func(ctx context.Context, coordinator string) error) error {
	ctx, cancel := context.WithTimeout(ctx, kafkalog.RequestTimeout)
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
