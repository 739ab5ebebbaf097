// Package batch encodes Kafka record batches of version 2, with producer id, epoch and sequence, so that
// records are copied once: from the envelope into the bytes that are sent.
//
// Order: records keep the order of Append. Blocking: never. Cost: one copy of a record and no allocation while the buffer
// has room; sealing costs one pass of CRC-32C, and one of the codec. A Builder is for one goroutine at a time.
package batch

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/outrelay/outrelay/internal/record"
)

const (
	// Overhead is the length of a batch without records. Kafka's max.message.bytes counts it.
	Overhead = 61
	// prefix is the length of the record set as a produce request has it in front of the batch.
	prefix = 4
	start  = prefix + Overhead
	// maxDeltas is what the offsets and times of one record can take beside the first record's.
	maxDeltas = 1 + binary.MaxVarintLen64 + binary.MaxVarintLen32

	maxSequence = 1<<31 - 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Producer is the identity under which a batch is sent.
type Producer struct {
	ID    int64
	Epoch int16
}

// Builder collects the records of one batch.
type Builder struct {
	buf            []byte // room for prefix and header, then records
	n              int32
	firstMS, maxMS int64
}

// Reset starts an empty batch in buf, whose contents are lost. A nil buf is fine.
func (b *Builder) Reset(buf []byte) {
	if cap(buf) < start {
		buf = make([]byte, start)
	}
	*b = Builder{buf: buf[:start]}
}

// Buffer is the memory of the batch: the caller may move it to a larger one with Move, or take it back after the batch.
func (b *Builder) Buffer() []byte { return b.buf }

// Move continues the batch in to, which must have more room than the batch has bytes, and returns the old memory.
func (b *Builder) Move(to []byte) []byte {
	old := b.buf
	b.buf = append(to[:0], old...)
	return old
}

// Forget lets go of the memory, which the caller uses otherwise from now on; Count stays.
func (b *Builder) Forget() { b.buf = nil }

// Room is how many bytes fit before Append would have to allocate.
func (b *Builder) Room() int { return cap(b.buf) - len(b.buf) }

// Len is the length of the batch before compression, without the prefix of the record set.
func (b *Builder) Len() int { return max(len(b.buf)-prefix, 0) }

// Records returns the encoded records of a batch that is not compressed, the time to which theirs are relative, and how many
// they are. The bytes are the Builder's own.
func (b *Builder) Records() (body []byte, firstMS int64, n int) {
	return b.buf[start:], b.firstMS, int(b.n)
}

// Sealed returns the batch in a record set that Seal has returned.
func Sealed(set []byte) []byte { return set[prefix:] }

// Count is the number of records.
func (b *Builder) Count() int32 { return b.n }

// Need is the buffer that a batch with records of that total Size needs.
func Need(size int) int { return start + size }

// Size is an upper bound of what rec adds to any batch. It depends on nothing but the record.
func Size(rec *record.Record) int {
	n := maxDeltas + bytesLen(rec.Key) + bytesLen(rec.Value) + headersLen(rec.Headers)
	return n + varintLen(int64(n))
}

// Append encodes rec behind the others. It copies everything.
func (b *Builder) Append(rec *record.Record) {
	if b.n == 0 {
		b.firstMS, b.maxMS = rec.TimeMS, rec.TimeMS
	}
	b.maxMS = max(b.maxMS, rec.TimeMS)
	dt, do := rec.TimeMS-b.firstMS, int64(b.n)
	n := 1 + varintLen(dt) + varintLen(do) + bytesLen(rec.Key) + bytesLen(rec.Value) + headersLen(rec.Headers)
	buf := binary.AppendVarint(b.buf, int64(n))
	buf = append(buf, 0) // attributes of a record are unused
	buf = binary.AppendVarint(buf, dt)
	buf = binary.AppendVarint(buf, do)
	buf = appendBytes(buf, rec.Key)
	buf = appendBytes(buf, rec.Value)
	buf = binary.AppendVarint(buf, int64(len(rec.Headers)))
	for i := range rec.Headers {
		h := &rec.Headers[i]
		buf = binary.AppendVarint(buf, int64(len(h.Key))) // a header's name is never null
		buf = append(buf, h.Key...)
		buf = appendBytes(buf, h.Value)
	}
	b.buf = buf
	b.n++
}

// Seal finishes the batch and returns the record set of a produce request: its length in four bytes and the batch. With
// a codec the result stands in dst, which grows as needed, and the Builder's own memory is free again; without one it is
// the Builder's memory, and dst is not used. The Builder must be Reset before it is used again.
func (b *Builder) Seal(c *Codec, dst []byte, p Producer, sequence int32) ([]byte, error) {
	out := b.buf
	if c.id != none {
		if cap(dst) < start {
			dst = make([]byte, start, max(start, len(out)/2))
		}
		var err error
		if out, err = c.compress(dst[:start], b.buf[start:]); err != nil {
			return nil, err
		}
	}
	b.header(out, c.id, p, sequence)
	return out, nil
}

func (b *Builder) header(out []byte, codec int8, p Producer, sequence int32) {
	be := binary.BigEndian
	be.PutUint32(out, uint32(len(out)-prefix))
	h := out[prefix:]
	be.PutUint64(h, 0)                      // base offset: the broker's
	be.PutUint32(h[8:], uint32(len(h)-12))  // length behind this field
	be.PutUint32(h[12:], ^uint32(0))        // leader epoch: the broker's
	h[16] = 2                               // version of the format
	be.PutUint16(h[21:], uint16(codec))     // attributes: the producer's clock, not transactional
	be.PutUint32(h[23:], uint32(b.n-1))     // offset of the last record
	be.PutUint64(h[27:], uint64(b.firstMS)) // time of the first record
	be.PutUint64(h[35:], uint64(b.maxMS))   // greatest time
	be.PutUint64(h[43:], uint64(p.ID))
	be.PutUint16(h[51:], uint16(p.Epoch))
	be.PutUint32(h[53:], uint32(sequence))
	be.PutUint32(h[57:], uint32(b.n))
	be.PutUint32(h[17:], crc32.Checksum(h[21:], castagnoli))
}

// Next is the sequence of the batch behind one of n records that began at sequence. It wraps from 2³¹−1 to 0.
func Next(sequence, n int32) int32 { return int32((int64(sequence) + int64(n)) & maxSequence) }

func headersLen(hs []record.Header) int {
	n := varintLen(int64(len(hs)))
	for i := range hs {
		n += varintLen(int64(len(hs[i].Key))) + len(hs[i].Key) + bytesLen(hs[i].Value)
	}
	return n
}

func varintLen(v int64) int {
	u := uint64(v)<<1 ^ uint64(v>>63)
	n := 1
	for u >= 0x80 {
		u >>= 7
		n++
	}
	return n
}

func bytesLen(p []byte) int {
	if p == nil {
		return 1
	}
	return varintLen(int64(len(p))) + len(p)
}

func appendBytes(b, p []byte) []byte {
	if p == nil {
		return append(b, 1) // −1 as a varint
	}
	b = binary.AppendVarint(b, int64(len(p)))
	return append(b, p...)
}
