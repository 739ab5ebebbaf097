package fetched

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	"slices"

	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/contract/record"
)

// ErrCorrupt means that bytes are not a batch, or that their checksum is wrong.
var ErrCorrupt = errors.New("corrupt record batch")

// HeaderSize is the size of a batch (v2) without its records.
const HeaderSize = 61

// Format is the format of batches with producer ids, which Kafka writes since 0.11.
const Format = 2

// Bits of the attributes of a batch.
const (
	compressionMask  = 7
	appendTimeBit    = 0x08 // the broker's time of the append counts, not the time of creation
	transactionalBit = 0x10
	controlBit       = 0x20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Batch is a batch as a broker stores it. In an earlier format it is a single message. Then only Base is
// set, and End if the checksum is right.
type Batch struct {
	Base int64 // offset of the first record as it was written
	// End is the offset after the last record as it was written. Compaction may have removed that
	// record, and even all records of the batch. The log always continues at End.
	End           int64
	Format        int8
	LeaderEpoch   int32
	Producer      int64
	Epoch         int16 // of the producer
	Transactional bool
	Control       bool // a marker: the end of a transaction, committed or aborted
	// Own means that this process has encoded the batch, so that the limits for the records of others do not apply.
	Own bool

	attributes uint16
	firstMS    int64
	maxMS      int64
	count      int
	body       []byte
	pieces     [][]byte // the records of NewOwnBatch that are not compressed, instead of body
}

// Batches returns the batches of a set, one after another. It stops at a batch that is incomplete
// because of the size limit of the fetch. The next fetch returns that batch whole.
//
// A corrupt batch comes with an error. It has only its Base, and the End that its header claims if the
// header does not contradict itself. The batches after it may be intact.
func Batches(set []byte) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		for len(set) > 16 {
			size := 12 + int(int32(binary.BigEndian.Uint32(set[8:])))
			if size < 12 || size > len(set) {
				return
			}

			batch, err := parseBatch(set[:size])
			if !yield(batch, err) {
				return
			}
			set = set[size:]
		}
	}
}

// parseBatch parses the header of the batch in data, which has its whole length.
func parseBatch(data []byte) (Batch, error) {
	be := binary.BigEndian
	batch := Batch{Base: int64(be.Uint64(data)), Format: Format}
	if len(data) > 16 {
		batch.Format = int8(data[16])
		if batch.Format < Format {
			// A message of an earlier format has its checksum before the format byte.
			if crc32.ChecksumIEEE(data[16:]) == be.Uint32(data[12:]) {
				batch.End = batch.Base + 1
			}
			return batch, nil
		}
	}
	if len(data) < HeaderSize {
		return batch, fmt.Errorf("%w at offset %d", ErrCorrupt, batch.Base)
	}

	end := batch.Base + int64(be.Uint32(data[23:])) + 1
	count := be.Uint32(data[57:])
	if crc32.Checksum(data[21:], castagnoli) != be.Uint32(data[17:]) {
		// The header may be damaged too. Its end counts only if the header does not contradict itself.
		if int64(count) == end-batch.Base {
			batch.End = end
		}
		return batch, fmt.Errorf("%w at offset %d", ErrCorrupt, batch.Base)
	}

	batch.End = end
	batch.LeaderEpoch = int32(be.Uint32(data[12:]))
	batch.attributes = be.Uint16(data[21:])
	batch.Transactional = batch.attributes&transactionalBit != 0
	batch.Control = batch.attributes&controlBit != 0
	batch.firstMS, batch.maxMS = int64(be.Uint64(data[27:])), int64(be.Uint64(data[35:]))
	batch.Producer, batch.Epoch = int64(be.Uint64(data[43:])), int16(be.Uint16(data[51:]))
	batch.count = int(int32(count))
	batch.body = data[HeaderSize:]
	return batch, nil
}

// NewOwnBatch returns a batch that the relay has encoded, without its header. pieces are its records, as codec has compressed
// them, and firstMS is the time to which their time deltas refer.
func NewOwnBatch(pieces [][]byte, codec int8, firstMS int64, n int) Batch {
	batch := Batch{Format: Format, attributes: uint16(codec), firstMS: firstMS, count: n, Own: true}
	if codec == int8(compress.None) {
		batch.pieces = pieces
	} else {
		batch.body = slices.Concat(pieces...)
	}
	return batch
}

// HasAppendTime reports whether the times of the records are those at which the broker has appended them.
func (b *Batch) HasAppendTime() bool { return b.attributes&appendTimeBit != 0 }

// TimeMS returns the time of the last record, in Unix milliseconds.
func (b *Batch) TimeMS() int64 { return b.maxMS }

// Record is one record of a batch.
type Record struct {
	Offset  int64
	TimeMS  int64 // Unix milliseconds, of its creation, or of the append if the topic is so configured
	Key     []byte
	Value   []byte
	Headers []record.Header
}
