package consumer

import (
	"context"
	"errors"
	"fmt"

	"github.com/outrelay/outrelay/pkg/inbox"
)

// Transport takes part in consumer groups and publishes. Kafka's is the default; pkg/memory has one for tests.
type Transport interface {
	// Join is one member of the group until ctx ends or s.Serve returns an error, which Join then returns; nil after ctx
	// ended. For each generation of the group it calls s.Serve once, never two at a time, and takes part in the next one
	// only after Serve returned. It may be called again after it returned. Servers that are away are waited for and
	// reported by s.Fault.
	Join(ctx context.Context, group string, topics []string, s Session) error
	Publisher
}

// Session is the consumer's side of a membership.
type Session interface {
	// Serve handles the partitions of g until ctx ends, which is when the group is rebalanced or the member is to leave.
	// It then finishes or abandons what is in flight, within a bounded time, commits by g, and returns.
	Serve(ctx context.Context, g Generation) error
	// Fault reports an error that the transport gets over by itself.
	Fault(err error)
}

// TopicPartition names a partition.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// String is "topic/partition".
func (tp TopicPartition) String() string { return fmt.Sprintf("%s/%d", tp.Topic, tp.Partition) }

// Assignment is a partition that the group gave to this member.
type Assignment struct {
	TopicPartition
	// Offset is where to go on: the committed one, or where a partition without one starts.
	Offset int64
}

// Generation is what the group agreed on: the partitions of this member, until the next rebalance. Its methods may be
// called by several goroutines at once, for one partition Fetch by one at a time.
type Generation interface {
	// ID grows by each generation.
	ID() int32
	Partitions() []Assignment
	// Log is the partition as its leader describes it at this moment.
	Log(ctx context.Context, tp TopicPartition) (inbox.Log, error)
	// Fetch returns committed records from offset on, in order, at least one byte's worth up to about maxBytes, or none
	// after waiting for a while. Records of aborted transactions, control records and what compaction removed are not
	// among them. The error is a *RangeError if the partition does not have that offset.
	Fetch(ctx context.Context, tp TopicPartition, offset int64, maxBytes int) (Fetched, error)
	// Commit stores the offsets to go on from. ErrGenerationOver says that the group has moved on without this member:
	// then somebody else may have the partitions.
	Commit(ctx context.Context, offsets map[TopicPartition]int64) error
}

// Fetched is the answer of Generation.Fetch.
type Fetched struct {
	Records []Record
	// Next is the offset to fetch from next. It may be far behind the last record: markers of transactions and compaction
	// leave holes, and all offsets below Next that are not among Records are holes.
	Next int64
	// End is the offset behind the last one that could be fetched, for the lag.
	End int64
}

// ErrGenerationOver says that the group moved on: the partitions are no longer this member's.
var ErrGenerationOver = errors.New("consumer: the group has moved on without this member")

// RangeError says that a partition does not have the offset that was asked for.
type RangeError struct {
	TopicPartition
	Offset     int64
	Start, End int64 // what it has: Start is its first offset, End the one behind its last
	// Diverged says that the partition lost records which were read, and has others at their offsets now, as after an unclean
	// election of a leader. Then End is the offset from which on it has others.
	Diverged bool
}

func (e *RangeError) Error() string {
	if e.Diverged {
		return fmt.Sprintf("partition %s was truncated to offset %d after it had been read to %d, and has other records there now", e.TopicPartition, e.End, e.Offset)
	}
	return fmt.Sprintf("partition %s has the offsets from %d to %d, not %d: retention removed it, or the topic was created anew",
		e.TopicPartition, e.Start, e.End, e.Offset)
}
