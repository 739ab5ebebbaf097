package fetched

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"

	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/kafka/reply"
	"github.com/outrelay/outrelay/internal/record"
)

// ErrCorrupt says that bytes are no batch, or that its checksum does not fit them.
var ErrCorrupt = errors.New("corrupt record batch")

// HeaderSize is the size of a batch (v2) before its records.
const HeaderSize = 61

// Format is that of batches with producer ids, which Kafka writes since 0.11.
const Format = 2

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Batch is a batch as a broker keeps it. Of one of an earlier format, which is a message, there are only Base and, if its
// checksum fits, End.
type Batch struct {
	Base int64 // offset of the first record as it was written
	// End is the offset behind the last record as it was written. Compaction may have removed that record, and even all of
	// them: the log goes on at End whatever is left.
	End           int64
	Format        int8
	LeaderEpoch   int32
	Producer      int64
	Epoch         int16 // of the producer
	Transactional bool
	Control       bool // a marker: the end of a transaction, this way or that

	attributes uint16
	firstMS    int64
	maxMS      int64
	count      int
	body       []byte
}

// Batches are those of a set, one after another. One that was cut off by the size of the fetch ends them: the next fetch
// brings it whole. A corrupt one comes with an error, and has only its Base and, if its header does not contradict itself, the
// End that the header claims. Those behind it may be good.
func Batches(set []byte) iter.Seq2[Batch, error] {
	return func(yield func(Batch, error) bool) {
		for len(set) > 16 {
			size := 12 + int(int32(binary.BigEndian.Uint32(set[8:])))
			if size < 12 || size > len(set) {
				return
			}
			b, err := parseBatch(set[:size])
			if !yield(b, err) {
				return
			}
			set = set[size:]
		}
	}
}

func parseBatch(p []byte) (Batch, error) {
	be := binary.BigEndian
	b := Batch{Base: int64(be.Uint64(p)), Format: Format}
	if len(p) > 16 {
		if b.Format = int8(p[16]); b.Format < Format {
			if crc32.ChecksumIEEE(p[16:]) == be.Uint32(p[12:]) {
				b.End = b.Base + 1
			}
			return b, nil
		}
	}
	if len(p) < HeaderSize {
		return b, fmt.Errorf("%w at offset %d", ErrCorrupt, b.Base)
	}
	end := b.Base + int64(be.Uint32(p[23:])) + 1
	if crc32.Checksum(p[21:], castagnoli) != be.Uint32(p[17:]) {
		if int64(be.Uint32(p[57:])) == end-b.Base {
			b.End = end
		}
		return b, fmt.Errorf("%w at offset %d", ErrCorrupt, b.Base)
	}
	b.End = end
	b.LeaderEpoch = int32(be.Uint32(p[12:]))
	b.attributes = be.Uint16(p[21:])
	b.Transactional, b.Control = b.attributes&0x10 != 0, b.attributes&0x20 != 0
	b.firstMS, b.maxMS = int64(be.Uint64(p[27:])), int64(be.Uint64(p[35:]))
	b.Producer, b.Epoch = int64(be.Uint64(p[43:])), int16(be.Uint16(p[51:]))
	b.count, b.body = int(int32(be.Uint32(p[57:]))), p[HeaderSize:]
	return b, nil
}

// Unsealed is a batch of our own that has no head yet, or that was not compressed: its records and the time to which theirs are
// relative.
func Unsealed(body []byte, firstMS int64, n int) Batch {
	return Batch{Format: Format, firstMS: firstMS, count: n, body: body}
}

// TimeMS is the time of the last record, in Unix milliseconds.
func (b *Batch) TimeMS() int64 { return b.maxMS }

// Record is one record of a batch.
type Record struct {
	Offset  int64
	TimeMS  int64 // Unix milliseconds, of its creation or, where the topic has that, of the append
	Key     []byte
	Value   []byte
	Headers []record.Header
}

// Records reads the records of a batch one after another.
type Records struct {
	batch *Batch
	d     reply.Decoder
	left  int
}

// Records begins to read the records. A compressed batch is decompressed into scratch, which the records alias from then
// on; nil is memory of their own.
func (b *Batch) Records(scratch *bytes.Buffer) (Records, error) {
	r := Records{batch: b, d: reply.Decoder{B: b.body}, left: b.count}
	if kind := compress.Compression(b.attributes & 7); kind != compress.None {
		plain, err := decompress(kind, b.body, scratch)
		if err != nil {
			return Records{}, err
		}
		r.d.B = plain
	}
	return r, nil
}

// Next reads the next record into x and returns false behind the last one. It overwrites x.Headers.
func (r *Records) Next(x *Record) (bool, error) {
	if r.left <= 0 {
		return false, nil
	}
	r.left--
	d := reply.Decoder{B: r.d.Bytes(int(r.d.Varint()))}
	d.Skip(1) // attributes
	x.TimeMS = r.batch.firstMS + d.Varint()
	if r.batch.attributes&0x08 != 0 {
		x.TimeMS = r.batch.maxMS // the broker's time of the append
	}
	x.Offset = r.batch.Base + d.Varint()
	x.Key, x.Value = d.Field(), d.Field()
	x.Headers = x.Headers[:0]
	for n := d.Varint(); n > 0 && !d.Bad; n-- {
		x.Headers = append(x.Headers, record.Header{Key: d.Field(), Value: d.Field()})
	}
	if r.d.Bad || d.Bad {
		return false, errors.New("a record ends too early")
	}
	return true, nil
}

// maxDecompressed bounds what a batch expands to.
const maxDecompressed = 256 << 20

func decompress(kind compress.Compression, b []byte, scratch *bytes.Buffer) ([]byte, error) {
	if scratch == nil {
		scratch = new(bytes.Buffer)
	}
	scratch.Reset()
	plain, end, err := expand(kind, b)
	if err == nil {
		defer end()
		_, err = io.Copy(scratch, io.LimitReader(plain, maxDecompressed+1))
	}
	if err != nil {
		return nil, fmt.Errorf("decompressing a batch: %w", err)
	}
	if scratch.Len() > maxDecompressed {
		return nil, fmt.Errorf("a batch is larger than %d bytes", maxDecompressed)
	}
	return scratch.Bytes(), nil
}
