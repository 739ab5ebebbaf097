// Package record contains the types that the stages of the relay share: the record on its way to
// Kafka, the ticket that tracks it, and the errors that can occur. It imports no other package of
// the project.
package record

import "fmt"

// Ticket numbers an event in the order of the stream, from 0 for each term of ownership. A ticket
// is resolved when each target of its event is acked by Kafka or stored as waiting or dead. The
// resolved position is below the first ticket that is not.
type Ticket uint64

// AnyPartition lets the sink choose the partition by murmur2 of the key, as Kafka's Java client does.
const AnyPartition int32 = -1

// Header is one Kafka record header. Names may repeat. Their order is kept.
type Header struct {
	Key   []byte
	Value []byte
}

// Record is one record for one target topic. Its slices may alias a response of MongoDB. A function
// that keeps a slice longer than its call must copy it.
type Record struct {
	Topic     string
	Partition int32    // AnyPartition, or the partition that the envelope requests
	Key       []byte   // nil is a null key
	Value     []byte   // nil is a tombstone
	Headers   []Header // `id` first (N7)
	TimeMS    int64    // Unix milliseconds (N12)

	// Sent describes how its event may have been sent before. It is no part of the record.
	Sent Sent
}

// Sent describes the records that an event may have in a topic already, besides one that equals its record in the headers and the time (N7).
type Sent struct {
	Positions [2][]byte // the positions with which it may have been sent out of the store or by a sweep; nil: none
	StreamMS  int64     // time of the record with which it may have been sent out of the stream; 0: it was not
	AnyTime   bool      // that record may have any time
}

// TopicPartition names one partition.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// Sender is a producer identity that may still write (N4). It stays in the watcher document, open
// in each partition where no marker above its epoch was read yet. A read-back counts the records
// of all producer ids in the list as ours (N7).
type Sender struct {
	ID         int64            `bson:"id"`         // producer id
	Epoch      int16            `bson:"epoch"`      // epoch with which it sends
	Generation int              `bson:"generation"` // generation of the transactional id (H3)
	Open       []TopicPartition `bson:"-"`

	// Cluster is the id of the Kafka cluster to which it writes, or "" if the brokers did not name it.
	Cluster string `bson:"cluster,omitempty"`

	// EndOffsets holds the end offsets of the last possible records of a producer id that is no longer
	// used. The sender is removed when the stored offsets have passed them and Open is empty.
	EndOffsets map[string][]int64 `bson:"-"`
}

// Acks receives the results of the sink. The loops of the sink call its methods, or Send itself does.
// They must not block. Tickets belong to the receiver after the call.
type Acks interface {
	// Acked reports that the records of tickets are in tp, tickets[i] at offset base+i. They had
	// reserved bytes.
	Acked(tp TopicPartition, base int64, tickets []Ticket, bytes int)

	// Restore sets the stored offset of tp at a takeover or when the partition is opened (N8, N9).
	Restore(tp TopicPartition, offset int64)

	// Idle reports that no record of ours is in flight to tp, and that its next record will be at
	// or above offset (N8).
	Idle(tp TopicPartition, offset int64)
}

// FormatPlace returns the place of a record: "<topic>/<partition>@<offset>".
func FormatPlace(topic string, partition int32, offset int64) string {
	return fmt.Sprintf("%s/%d@%d", topic, partition, offset)
}
