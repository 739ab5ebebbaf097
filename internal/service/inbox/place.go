package inbox

import (
	"strconv"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

// Lanes is the number of lanes of a partition. It never changes: each lane has its own watermark,
// so a record must never move to another lane.
const Lanes = 16

// Place is the place of a message in Kafka. If Topic is empty, the message did not come from Kafka
// and has no watermark.
type Place struct {
	Topic       string
	Partition   int32
	Lane        int32 // 0 to Lanes-1, the result of the function Lane
	Offset      int64
	LeaderEpoch int32 // leader epoch of the record's batch, or −1 if unknown
}

// Lane returns the lane of a record with this key. If key is nil, the lane depends on the offset.
//
// The hash of Kafka's partitioner is mixed once more. The partition is a remainder of that hash
// already: with the plain remainder by 16, all records of a partition of a topic with 16 partitions
// would be in the same lane.
func Lane(key []byte, offset int64) int32 {
	if key == nil {
		return int32(uint64(offset) % Lanes)
	}

	// 2³² / φ: the top bits of the product depend on all bits of the hash.
	const golden = 0x9e3779b1
	return int32(keyhash.Murmur2(key) * golden >> 28)
}

// PlaceID returns the identity of a record without an id: "topic/partition/offset". An entry whose
// id is the PlaceID of its place needs only the watermark and gets no marker.
func PlaceID(topic string, partition int32, offset int64) string {
	id := make([]byte, 0, len(topic)+24)
	id = append(id, topic...)
	id = append(id, '/')
	id = strconv.AppendInt(id, int64(partition), 10)
	id = append(id, '/')
	return string(strconv.AppendInt(id, offset, 10))
}
