package inbox

import (
	"strconv"

	"github.com/outrelay/outrelay/pkg/event"
)

// Lanes is the number of lanes of a partition. It never changes: watermarks are kept by lane, and a record that moved to
// another lane would be measured by a watermark that is not its own.
const Lanes = 16

// Place is where in Kafka a message came from. A zero Topic means from nowhere in Kafka; then there is no watermark.
type Place struct {
	Topic       string
	Partition   int32
	Lane        int32 // 0 … Lanes-1, by Lane
	Offset      int64
	LeaderEpoch int32 // of the record's batch; -1 if unknown
}

// Lane is the lane of a record with that key, or with that offset where the key is nil.
//
// The hash is that of Kafka's partitioner, mixed once more: the partitions of a topic are its remainders already, so that
// of the plain remainders by 16 one partition of 16 would have a single one.
func Lane(key []byte, offset int64) int32 {
	if key == nil {
		return int32(uint64(offset) % Lanes)
	}
	const golden = 0x9e3779b1 // 2³² / φ: the top bits of the product depend on all bits of the hash
	return int32(event.Murmur2(key) * golden >> 28)
}

// PlaceID is the identity of a record that brings none: "topic/partition/offset". An entry whose id is the PlaceID of its
// own place is known by its watermark alone and gets no marker, unless the identity is IDOnly.
func PlaceID(topic string, partition int32, offset int64) string {
	b := make([]byte, 0, len(topic)+24)
	b = append(b, topic...)
	b = append(b, '/')
	b = strconv.AppendInt(b, int64(partition), 10)
	b = append(b, '/')
	return string(strconv.AppendInt(b, offset, 10))
}
