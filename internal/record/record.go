// Package record is the vocabulary that the stages of the relay share: the record on its way to Kafka, the ticket that
// follows it, and the words for what can go wrong with it. It imports nothing of the project.
package record

// Ticket numbers an event in the order of the stream, from 0 for each term of ownership. A ticket is resolved when each
// target of its event is acked by Kafka or its fate is recorded; the watermark is the highest ticket below which all are.
type Ticket uint64

// AnyPartition lets the sink choose the partition by murmur2 of the key, as Kafka's Java client does.
const AnyPartition int32 = -1

// Header is one Kafka record header. Names may repeat; their order is kept.
type Header struct {
	Key   []byte
	Value []byte
}

// Record is one record for one target topic. Its slices may alias a reply of MongoDB: whoever keeps one beyond the call
// that got it copies it.
type Record struct {
	Topic     string
	Partition int32    // AnyPartition, or the partition the envelope asks for
	Key       []byte   // nil is a null key
	Value     []byte   // nil is a tombstone
	Headers   []Header // `id` first (N7)
	TimeMS    int64    // Unix milliseconds (N12)
}

// TopicPartition names one partition.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// Sender is a producer identity that may still write (N4). It stays in the watcher document, open in each partition
// where no marker above its epoch was read yet. Producer ids in the list are also those that a read-back counts as ours (N7).
type Sender struct {
	ID         int64 // producer id
	Epoch      int16 // the epoch it sends with
	Generation int   // generation of the transactional id (H3)
	Open       []TopicPartition
	// Until holds, for a producer id that is used no longer, the end offsets at which its last records can stand: the
	// sender is forgotten once the stored offsets have passed them and Open is empty.
	Until map[string][]int64
}

// Acks is what the sink tells the dispatcher. Calls come from the sink's lanes, or from within Send itself, and must
// not block; tickets belong to the receiver from then on.
type Acks interface {
	// Acked says that the records of tickets stand in tp, tickets[i] at offset base+i; bytes is what they had reserved.
	Acked(tp TopicPartition, base int64, tickets []Ticket, bytes int)
	// Restore sets the stored offset of tp at a take-over or when the partition is adopted (N8, N9).
	Restore(tp TopicPartition, offset int64)
	// Idle says that nothing of ours is in flight to tp and that its next record will stand at or above offset (N8).
	Idle(tp TopicPartition, offset int64)
}
