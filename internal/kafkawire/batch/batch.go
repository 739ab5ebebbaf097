// Package batch encodes Kafka record batches of version 2, with producer id, epoch and sequence.
// Records are copied once: from the envelope into the bytes that are sent.
//
// Order: records keep the order of Append. Blocking: never. Cost: one copy of each record, and no
// allocation while the buffer has room. Sealing costs one pass of CRC-32C and one pass of the codec.
// Only one goroutine may use a Builder at a time.
package batch

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/outrelay/outrelay/internal/contract/record"
)

const (
	// overhead is the length of a batch without records. Kafka's max.message.bytes counts it.
	overhead = 61
	// setPrefix is the length field of the record set, which precedes the batch in a produce request.
	setPrefix = 4
	// recordsStart is the offset of the first record in the buffer of a Builder.
	recordsStart = setPrefix + overhead
	// maxDeltas is the largest size of the attributes, offset delta and time delta of one record.
	maxDeltas = 1 + binary.MaxVarintLen64 + binary.MaxVarintLen32

	maxSequence = 1<<31 - 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Producer is the identity under which a batch is sent.
type Producer struct {
	ID    int64
	Epoch int16
}

func (p Producer) String() string { return fmt.Sprintf("producer id %d epoch %d", p.ID, p.Epoch) }

// Builder collects the records of one batch.
type Builder struct {
	buf            []byte // room for the set prefix and the header, then records
	count          int32
	firstMS, maxMS int64
}

// Reset starts an empty batch in buf, and overwrites its contents. A nil buf is allowed.
func (b *Builder) Reset(buf []byte) {
	if cap(buf) < recordsStart {
		buf = make([]byte, recordsStart)
	}
	*b = Builder{buf: buf[:recordsStart]}
}

// Buffer returns the memory of the batch. The caller may replace it with Move, or reuse it after the
// batch.
func (b *Builder) Buffer() []byte { return b.buf }

// Move copies the batch to the buffer room, which must have more room than the batch has bytes, and
// returns the old buffer.
func (b *Builder) Move(room []byte) []byte {
	old := b.buf
	b.buf = append(room[:0], old...)
	return old
}

// Forget releases the buffer, so that the caller can reuse it. Count stays valid.
func (b *Builder) Forget() { b.buf = nil }

// Room returns the number of bytes that Append can add without an allocation.
func (b *Builder) Room() int { return cap(b.buf) - len(b.buf) }

// Len returns the length of the batch before compression, without the set prefix.
func (b *Builder) Len() int { return max(len(b.buf)-setPrefix, 0) }

// Records returns the encoded records of a batch that is not compressed, the time to which their time
// deltas refer, and their number. The bytes alias the buffer.
func (b *Builder) Records() (body []byte, firstMS int64, n int) {
	return b.buf[recordsStart:], b.firstMS, int(b.count)
}

// BatchOfSet returns the batch in a record set that Seal has returned.
func BatchOfSet(set []byte) []byte { return set[setPrefix:] }

// Count returns the number of records.
func (b *Builder) Count() int32 { return b.count }

// BufferSize returns the size of the buffer for a batch whose records have the total Size size.
func BufferSize(size int) int { return recordsStart + size }

// Size returns an upper bound of the bytes that rec adds to any batch. It depends only on the record.
func Size(rec *record.Record) int {
	n := maxDeltas + bytesLen(rec.Key) + bytesLen(rec.Value) + headersLen(rec.Headers)
	return n + varintLen(int64(n))
}

// Append encodes rec after the other records. It does not retain rec.
func (b *Builder) Append(rec *record.Record) {
	if b.count == 0 {
		b.firstMS, b.maxMS = rec.TimeMS, rec.TimeMS
	}
	b.maxMS = max(b.maxMS, rec.TimeMS)

	timeDelta, offsetDelta := rec.TimeMS-b.firstMS, int64(b.count)
	// The length stands before the fields. It is calculated first, so that no field has to be moved.
	n := 1 + varintLen(timeDelta) + varintLen(offsetDelta) +
		bytesLen(rec.Key) + bytesLen(rec.Value) + headersLen(rec.Headers)
	buf := binary.AppendVarint(b.buf, int64(n))
	// Kafka does not use the attributes of a record.
	buf = append(buf, 0)
	buf = binary.AppendVarint(buf, timeDelta)
	buf = binary.AppendVarint(buf, offsetDelta)
	buf = appendBytes(buf, rec.Key)
	buf = appendBytes(buf, rec.Value)

	buf = binary.AppendVarint(buf, int64(len(rec.Headers)))
	for i := range rec.Headers {
		header := &rec.Headers[i]
		// The name of a header is never null, so appendBytes would be wrong for a nil key.
		buf = binary.AppendVarint(buf, int64(len(header.Key)))
		buf = append(buf, header.Key...)
		buf = appendBytes(buf, header.Value)
	}

	b.buf = buf
	b.count++
}

// Seal finishes the batch and returns the record set of a produce request: its length in four bytes,
// and the batch.
//
// With a codec the result is in dst, which grows as needed, and the buffer of the Builder can be
// reused. Without a codec the result is the buffer of the Builder, and dst is not used. The Builder
// must be Reset before the next batch.
func (b *Builder) Seal(codec *Codec, dst []byte, producer Producer, sequence int32) ([]byte, error) {
	out := b.buf
	if codec.id != noneID {
		if cap(dst) < recordsStart {
			// Half of the size is enough for most payloads. The compressor grows it otherwise.
			dst = make([]byte, recordsStart, max(recordsStart, len(out)/2))
		}
		var err error
		if out, err = codec.compress(dst[:recordsStart], b.buf[recordsStart:]); err != nil {
			return nil, err
		}
	}

	b.writeHeader(out, codec.id, producer, sequence)
	return out, nil
}

// writeHeader writes the set prefix and the batch header to out, which has the final records.
func (b *Builder) writeHeader(out []byte, codec int8, producer Producer, sequence int32) {
	be := binary.BigEndian
	be.PutUint32(out, uint32(len(out)-setPrefix))

	head := out[setPrefix:]
	be.PutUint64(head, 0)                        // base offset: set by the broker
	be.PutUint32(head[8:], uint32(len(head)-12)) // length after this field
	be.PutUint32(head[12:], ^uint32(0))          // leader epoch: set by the broker
	head[16] = 2                                 // format version
	be.PutUint16(head[21:], uint16(codec))       // attributes: the producer's clock, not transactional
	be.PutUint32(head[23:], uint32(b.count-1))   // offset delta of the last record
	be.PutUint64(head[27:], uint64(b.firstMS))
	be.PutUint64(head[35:], uint64(b.maxMS))
	be.PutUint64(head[43:], uint64(producer.ID))
	be.PutUint16(head[51:], uint16(producer.Epoch))
	be.PutUint32(head[53:], uint32(sequence))
	be.PutUint32(head[57:], uint32(b.count))

	// The checksum covers the header from the attributes on, so it is written last.
	be.PutUint32(head[17:], crc32.Checksum(head[21:], castagnoli))
}

// NextSequence returns the sequence after a batch of n records that began at sequence. It wraps from 2³¹−1
// to 0.
func NextSequence(sequence, n int32) int32 { return int32((int64(sequence) + int64(n)) & maxSequence) }

func headersLen(hs []record.Header) int {
	n := varintLen(int64(len(hs)))
	for i := range hs {
		n += varintLen(int64(len(hs[i].Key))) + len(hs[i].Key) + bytesLen(hs[i].Value)
	}
	return n
}

func varintLen(value int64) int {
	zigzag := uint64(value)<<1 ^ uint64(value>>63)
	n := 1
	for zigzag >= 0x80 {
		zigzag >>= 7
		n++
	}
	return n
}

func bytesLen(data []byte) int {
	if data == nil {
		return 1
	}
	return varintLen(int64(len(data))) + len(data)
}

// appendBytes appends data with its length. A nil data becomes null.
func appendBytes(dst, data []byte) []byte {
	if data == nil {
		return append(dst, 1) // −1 as a varint
	}
	dst = binary.AppendVarint(dst, int64(len(data)))
	return append(dst, data...)
}
