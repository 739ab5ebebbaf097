// Package batch encodes Kafka record batches of version 2, with producer id, epoch and sequence.
// Records are copied once: from the envelope into the bytes that are sent.
//
// Order: records keep the order of Append. Blocking: never. Cost: one copy of each record, and no
// allocation while there are free chunks. Sealing costs one pass of CRC-32C. A codec costs one pass and two copies more.
// Only one goroutine may use a Builder at a time.
package batch

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"slices"
	"sync"

	"github.com/outrelay/outrelay/internal/contract/record"
)

const (
	// overhead is the length of a batch without records. Kafka's max.message.bytes counts it.
	overhead = 61
	// setPrefix is the length field of the record set, which precedes the batch in a produce request.
	setPrefix = 4
	// keepPieces is the length up to which a Builder keeps its list of chunks. Batches with one huge record have longer lists.
	keepPieces = 64
	// keepWorkspace is the size up to which the memory of a compression is kept. Only a batch with one huge record needs more.
	keepWorkspace = 4 << 20
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

// Builder collects the records of one batch in chunks. A record may continue in the next chunk.
type Builder struct {
	chunks         *Chunks
	head           [setPrefix + overhead]byte // the set prefix and the header of a sealed batch
	pieces         [][]byte                   // the chunks of the records
	size           int                        // the length of the batch
	count          int32
	firstMS, maxMS int64
	sealed         bool
	codec          int8
}

// Reset starts an empty batch, whose memory comes from chunks. It releases the memory of the batch before.
func (b *Builder) Reset(chunks *Chunks) {
	b.Release()
	b.chunks, b.size = chunks, overhead
	b.pieces = append(b.pieces, chunks.takeChunk(0))
}

// Release returns the memory of the batch to its Chunks, and leaves a batch without records. The Builder
// must be Reset before the next batch.
func (b *Builder) Release() {
	b.dropChunks()
	*b = Builder{pieces: b.pieces}
	if cap(b.pieces) > keepPieces {
		b.pieces = nil
	}
}

// dropChunks returns all chunks.
func (b *Builder) dropChunks() {
	if len(b.pieces) > 0 {
		b.chunks.putChunks(b.pieces)
	}
	clear(b.pieces)
	b.pieces = b.pieces[:0]
}

// Len returns the length of the batch, without the set prefix: before compression until Seal, and after it
// the length that is sent.
func (b *Builder) Len() int { return b.size }

// Records returns the encoded records in pieces, which alias the memory of the batch, the codec that has
// compressed them, the time to which their time deltas refer, and their number.
func (b *Builder) Records() (pieces [][]byte, codec int8, firstMS int64, n int) {
	return b.pieces, b.codec, b.firstMS, int(b.count)
}

// Count returns the number of records.
func (b *Builder) Count() int32 { return b.count }

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
	size := varintLen(int64(n)) + n

	last := &b.pieces[len(b.pieces)-1]
	if cap(*last)-len(*last) >= size {
		*last = appendHeaders(append(appendStart(*last, rec, n, timeDelta, offsetDelta), rec.Value...), rec.Headers)
	} else {
		// A value may be large, so it is not copied twice.
		var room [512]byte
		b.appendData(appendStart(room[:0], rec, n, timeDelta, offsetDelta))
		b.appendData(rec.Value)
		b.appendData(appendHeaders(room[:0], rec.Headers))
	}
	b.size += size
	b.count++
}

// appendStart appends a record of length n up to its value.
func appendStart(dst []byte, rec *record.Record, n int, timeDelta, offsetDelta int64) []byte {
	dst = binary.AppendVarint(dst, int64(n))
	dst = append(dst, 0) // Kafka does not use the attributes of a record
	dst = binary.AppendVarint(dst, timeDelta)
	dst = binary.AppendVarint(dst, offsetDelta)
	return appendLength(appendBytes(dst, rec.Key), rec.Value)
}

// appendHeaders appends the rest of a record, after its value.
func appendHeaders(dst []byte, headers []record.Header) []byte {
	dst = binary.AppendVarint(dst, int64(len(headers)))
	for i := range headers {
		header := &headers[i]
		// The name of a header is never null, so appendBytes would be wrong for a nil key.
		dst = binary.AppendVarint(dst, int64(len(header.Key)))
		dst = append(dst, header.Key...)
		dst = appendBytes(dst, header.Value)
	}
	return dst
}

// appendBytes appends data with its length.
func appendBytes(dst, data []byte) []byte { return append(appendLength(dst, data), data...) }

// appendLength appends the length of data. A nil data becomes null.
func appendLength(dst, data []byte) []byte {
	if data == nil {
		return append(dst, 1) // −1 as a varint
	}
	return binary.AppendVarint(dst, int64(len(data)))
}

// appendData appends data to the last chunk, and as many new chunks as it needs.
func (b *Builder) appendData(data []byte) {
	for {
		last := &b.pieces[len(b.pieces)-1]
		n := min(len(data), cap(*last)-len(*last))
		*last = append(*last, data[:n]...)
		if n == len(data) {
			return
		}

		data = data[n:]
		b.pieces = append(b.pieces, b.chunks.takeChunk(len(b.pieces)))
	}
}

// Seal finishes the batch: it compresses the records and writes the header. Nothing can be appended then.
func (b *Builder) Seal(codec *Codec, producer Producer, sequence int32) error {
	if !codec.IsNone() {
		if err := b.compressRecords(codec); err != nil {
			return err
		}
	}

	b.writeHeader(producer, sequence)
	b.sealed = true
	return nil
}

// IsSealed reports whether Seal has finished the batch.
func (b *Builder) IsSealed() bool { return b.sealed }

// workspace is the memory of one compression.
type workspace struct{ plain, packed []byte }

var workspaces = sync.Pool{New: func() any { return new(workspace) }}

// compressRecords replaces the records by their compressed form. The codecs need them in one piece: some would write other
// bytes otherwise, and more of them.
func (b *Builder) compressRecords(codec *Codec) error {
	space, _ := workspaces.Get().(*workspace)
	plain := slices.Grow(space.plain[:0], b.size)
	for _, chunk := range b.pieces {
		plain = append(plain, chunk...)
	}
	packed, err := codec.compress(space.packed[:0], plain)
	if err != nil {
		return err
	}

	b.dropChunks()
	b.pieces = append(b.pieces, b.chunks.takeChunk(0))
	b.appendData(packed)
	b.codec, b.size = codec.id, overhead+len(packed)

	if cap(plain)+cap(packed) <= keepWorkspace {
		space.plain, space.packed = plain, packed
		workspaces.Put(space)
	}
	return nil
}

// AppendPieces appends the pieces of the sealed batch to dst, and returns the result: the record set of a produce
// request, which is its length in four bytes, and the batch. The pieces alias the memory of the batch.
func (b *Builder) AppendPieces(dst net.Buffers) net.Buffers {
	return append(append(dst, b.head[:]), b.pieces...)
}

// writeHeader writes the set prefix and the batch header. The records are final.
func (b *Builder) writeHeader(producer Producer, sequence int32) {
	be := binary.BigEndian
	be.PutUint32(b.head[:], uint32(b.size))

	head := b.head[setPrefix:]
	be.PutUint64(head, 0)                      // base offset: set by the broker
	be.PutUint32(head[8:], uint32(b.size-12))  // length after this field
	be.PutUint32(head[12:], ^uint32(0))        // leader epoch: set by the broker
	head[16] = 2                               // format version
	be.PutUint16(head[21:], uint16(b.codec))   // attributes: the producer's clock, not transactional
	be.PutUint32(head[23:], uint32(b.count-1)) // offset delta of the last record
	be.PutUint64(head[27:], uint64(b.firstMS))
	be.PutUint64(head[35:], uint64(b.maxMS))
	be.PutUint64(head[43:], uint64(producer.ID))
	be.PutUint16(head[51:], uint16(producer.Epoch))
	be.PutUint32(head[53:], uint32(sequence))
	be.PutUint32(head[57:], uint32(b.count))

	// The checksum covers the header from the attributes on, so it is written last.
	sum := crc32.Checksum(head[21:], castagnoli)
	for _, chunk := range b.pieces {
		sum = crc32.Update(sum, castagnoli, chunk)
	}
	be.PutUint32(head[17:], sum)
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
