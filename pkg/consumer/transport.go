package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/internal/inbox"
)

// Transport joins consumer groups and publishes messages. The default transport uses Kafka. Package
// memory has one for tests.
type Transport interface {
	// Join is a member of the group until ctx ends or s.Serve returns an error. It returns that
	// error, or nil if ctx ended. For each generation of the group it calls s.Serve once. It joins
	// the next generation only after Serve has returned. Join may be called again after it has
	// returned. If servers are away, it waits for them and reports that by s.Fault.
	Join(ctx context.Context, group string, topics []string, s Session) error
	Publisher
}

// Session is the consumer's side of a membership.
type Session interface {
	// Serve handles the partitions of g until ctx ends, because the group is rebalanced or the
	// member leaves. It then finishes or abandons the messages in progress within a bounded time,
	// commits with g, and returns.
	Serve(ctx context.Context, g Generation) error
	// Fault reports an error from which the transport recovers without help.
	Fault(err error)
}

// TopicPartition identifies a partition.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// String returns "topic/partition".
func (tp TopicPartition) String() string { return fmt.Sprintf("%s/%d", tp.Topic, tp.Partition) }

// Assignment is a partition that the group gave to this member.
type Assignment struct {
	TopicPartition
	// Offset is the next offset to fetch: the committed one, or the start offset of a partition
	// without a committed one.
	Offset int64
}

// Generation has the partitions of this member until the next rebalance of the group. Its methods
// may be called by several goroutines at once. For one partition, only one goroutine may call Fetch
// at a time.
type Generation interface {
	// ID increases with each generation.
	ID() int32
	// Partitions returns the partitions of this member.
	Partitions() []Assignment
	// Log returns the current state of the partition, from its leader.
	Log(ctx context.Context, tp TopicPartition) (inbox.Log, error)
	// Fetch returns committed records from offset on, in order, up to about maxBytes. If there are
	// none, it waits for a while and may return none. It leaves out records of aborted transactions
	// and control records. The error is a *RangeError if the partition does not have that offset.
	Fetch(ctx context.Context, tp TopicPartition, offset int64, maxBytes int) (Fetched, error)
	// Commit stores the next offsets to handle. It returns ErrGenerationOver if the group has moved
	// on without this member. Another member may then have the partitions.
	Commit(ctx context.Context, offsets map[TopicPartition]int64) error
}

// Fetched is the result of Generation.Fetch.
type Fetched struct {
	Records []Record
	// Next is the offset of the next fetch. It may be much higher than the last offset in Records,
	// because transaction markers and compaction leave holes. Every fetched offset below Next that
	// is not in Records is a hole.
	Next int64
	// End is the offset after the last one that can be fetched, for the lag.
	End int64
}

// ErrGenerationOver reports that the group moved on, so this member no longer has the partitions.
var ErrGenerationOver = errors.New("consumer: the group has moved on without this member")

// RangeError reports that a partition does not have the requested offset.
type RangeError struct {
	TopicPartition
	Offset     int64
	Start, End int64 // the existing offsets: Start is the first one, End is one above the last one
	// Diverged reports that the partition lost records that were read, and has other records at
	// their offsets now, for example after an unclean leader election. End is then the first of
	// these offsets.
	Diverged bool
}

func (e *RangeError) Error() string {
	if e.Diverged {
		return fmt.Sprintf("partition %s was truncated to offset %d after it had been read to %d, and has other records there now",
			e.TopicPartition, e.End, e.Offset)
	}
	return fmt.Sprintf("partition %s has the offsets from %d to %d, not %d: retention removed it, or the topic was recreated",
		e.TopicPartition, e.Start, e.End, e.Offset)
}
