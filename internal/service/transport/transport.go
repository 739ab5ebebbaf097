package transport

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/service/inbox"
	"github.com/outrelay/outrelay/pkg/event"
)

// Transport joins consumer groups and publishes records. Package kafkago has the default one, package internal/lab/memory the one for
// tests without servers.
type Transport interface {
	// Join is a member of the group until ctx ends or s.Serve returns an error. It returns that
	// error, or nil if ctx ended. For each generation of the group it calls s.Serve once. It joins
	// the next generation only after Serve has returned. Join may be called again after it has
	// returned. If servers are away, it waits for them and reports that by s.Fault.
	Join(ctx context.Context, group string, topics []string, s Session) error
	// DescribeGroup returns the members of a group and their partitions, as its coordinator has them.
	DescribeGroup(ctx context.Context, group string) (GroupState, error)
	Publisher
}

// GroupState is the state of a group.
type GroupState struct {
	Members int
	// Stable is set if each partition that the group reads is in Assigned. It is not set during a rebalance.
	Stable   bool
	Assigned map[TopicPartition]bool
}

// Publisher writes records to topics. Publish blocks until all in-sync replicas have all records. After an error, any of the
// records may have been written. Headers, key and value are written unchanged, a nil value as a tombstone. The key selects the
// partition in the same way as in the Java client. A record without a key goes to a partition by its offset.
type Publisher interface {
	Publish(ctx context.Context, topic string, records []Record) error
}

// Record is one record as a Transport returns it. Its bytes belong to the holder of the record. A Publisher uses only the key,
// the value, the headers and the offset.
type Record struct {
	Topic       string
	Partition   int32
	Offset      int64
	LeaderEpoch int32 // of the partition leader that wrote it; -1 unknown
	Time        time.Time
	Key, Value  []byte // Value nil: a tombstone
	Headers     []event.Header
	// Err is set if the record cannot be read, for example because it is too large. The record then
	// has only its place and its time, and becomes a dead letter.
	Err error
}

// Header returns the value of the first header of that name, and reports whether there is one.
func (r *Record) Header(name string) ([]byte, bool) {
	for i := range r.Headers {
		if r.Headers[i].Key == name {
			return r.Headers[i].Value, true
		}
	}
	return nil, false
}

// Size returns about how many bytes the record needs in memory.
func (r *Record) Size() int {
	n := len(r.Key) + len(r.Value) + 128
	for i := range r.Headers {
		n += len(r.Headers[i].Key) + len(r.Headers[i].Value) + 32
	}
	return n
}

// Session is the consumer's side of a membership.
type Session interface {
	// Serve handles the partitions of g until ctx ends, because the group is rebalanced or the
	// member leaves. It then finishes or abandons the messages in progress within a bounded time,
	// commits with g, and returns. If g has changes, a rebalance changes the partitions and does not
	// end ctx.
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

// GroupOffset is the next offset that a group handles in a partition.
type GroupOffset struct {
	Offset int64
	// TopicID is the id of the topic to which Offset belongs: see inbox.Log. It is "" if it is unknown, for example because a
	// tool has committed the offset.
	TopicID string
}

// Start is where a group goes on with a partition.
type Start struct {
	GroupOffset
	// Uncommitted is set if the group has to store Offset before the first record is handled: another member would find
	// another start offset.
	Uncommitted bool
}

// Generation has the partitions of this member until the next rebalance of the group. Its methods
// may be called by several goroutines at once. For one partition, only one goroutine may call Fetch
// at a time.
type Generation interface {
	// ID increases with each generation.
	ID() int32
	// Partitions returns the partitions that the member has when the generation begins.
	Partitions() []TopicPartition
	// Changes has the partitions that the group gives or takes while the generation goes on. It is nil if the generation ends
	// instead, as with all transports that stop all partitions for a rebalance.
	Changes() <-chan Change
	// Resume returns where the group goes on with a partition: at the committed offset, or where a partition without one
	// begins. Call it before the first Fetch of the partition.
	Resume(ctx context.Context, tp TopicPartition) (Start, error)
	// Log returns the current state of the partition, from its leader.
	Log(ctx context.Context, tp TopicPartition) (inbox.Log, error)
	// Fetch returns committed records in order, up to about maxBytes. If there are
	// none, it waits for a while and may return none. It leaves out records of aborted transactions
	// and control records. The error is a *RangeError if the partition does not have that offset.
	Fetch(ctx context.Context, tp TopicPartition, from FetchFrom, maxBytes int) (Fetched, error)
	// Commit stores the next offsets to handle, with the ids of their topics. It returns ErrGenerationOver if the group has
	// moved on without this member. Another member may then have the partitions.
	Commit(ctx context.Context, offsets map[TopicPartition]GroupOffset) error
}

// FetchFrom is where a fetch begins.
type FetchFrom struct {
	Offset int64
	// TopicID is the id of the topic to which Offset belongs, or "" if it is unknown. From Kafka 3.1 on, Fetch returns no record of another topic of
	// that name, but an error.
	TopicID string
}

// Change gives or takes partitions. The other partitions of the member go on.
type Change struct {
	Added   []TopicPartition
	Revoked []TopicPartition
	// Done must be called when the revoked partitions are given back: their handlers have ended, and their offsets are
	// committed. The group waits for it, at most for the time of a drain.
	Done func()
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

// ErrGap matches each *RangeError.
var ErrGap = errors.New("consumer: records are missing")

// ErrGenerationOver reports that the group moved on, so this member no longer has the partitions.
var ErrGenerationOver = errors.New("consumer: the group has moved on without this member")

// MissingTopicsError reports that topics do not exist, or may not be read. The member joins when they exist.
type MissingTopicsError struct {
	Topics []string
	All    bool          // the member reads no other topic
	Every  time.Duration // how often they are looked for
}

func (e *MissingTopicsError) Error() string {
	return fmt.Sprintf("topics %q do not exist yet or may not be read: looking for them every %v", e.Topics, e.Every)
}

// UnusedTopicsError reports retry topics of the group that no handler uses. The member reads them, because messages may wait there.
type UnusedTopicsError struct{ Topics []string }

func (e *UnusedTopicsError) Error() string {
	return fmt.Sprintf("retry topics %q are used by no handler any longer, and are read because messages may wait there: "+
		"delete them once they are empty", e.Topics)
}

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

// Is reports true for ErrGap.
func (e *RangeError) Is(target error) bool { return target == ErrGap }
