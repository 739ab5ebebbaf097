package batch

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"reflect"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// drawLargeRecords draws records whose parts are smaller and larger than any chunk.
func drawLargeRecords(t *rapid.T) []record.Record {
	data := rapid.Custom(func(t *rapid.T) []byte {
		pattern := rapid.SliceOfN(rapid.Byte(), 1, 50).Draw(t, "pattern")
		n := rapid.OneOf(rapid.IntRange(0, 600), rapid.IntRange(0, 4<<maxChunkBits)).Draw(t, "bytes")
		return bytes.Repeat(pattern, n/len(pattern)+1)[:n]
	})
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) record.Record {
		return record.Record{
			Key: data.Draw(t, "key"), Value: data.Draw(t, "value"), TimeMS: rapid.Int64Range(0, 1<<41).Draw(t, "time"),
			Headers: []record.Header{{Key: data.Draw(t, "name"), Value: data.Draw(t, "header")}},
		}
	}), 1, 4).Draw(t, "records")
}

// encodeContiguously returns the record set of recs, encoded in one buffer.
func encodeContiguously(t *rapid.T, recs []record.Record, c *Codec, p Producer, seq int32) []byte {
	appendField := func(buf, data []byte) []byte {
		if data == nil {
			return binary.AppendVarint(buf, -1)
		}
		return append(binary.AppendVarint(buf, int64(len(data))), data...)
	}

	var records []byte
	var lastMS int64
	for i, rec := range recs {
		lastMS = max(lastMS, rec.TimeMS)
		body := binary.AppendVarint([]byte{0}, rec.TimeMS-recs[0].TimeMS)
		body = binary.AppendVarint(body, int64(i))
		body = appendField(appendField(body, rec.Key), rec.Value)
		body = binary.AppendVarint(body, int64(len(rec.Headers)))
		for _, h := range rec.Headers {
			body = appendField(append(binary.AppendVarint(body, int64(len(h.Key))), h.Key...), h.Value)
		}
		records = appendField(records, body)
	}

	if !c.IsNone() {
		var err error
		if records, err = c.compress(nil, records); err != nil {
			t.Fatal(err)
		}
	}

	be := binary.BigEndian
	summed := be.AppendUint16(nil, uint16(c.id))
	summed = be.AppendUint32(summed, uint32(len(recs)-1))
	summed = be.AppendUint64(be.AppendUint64(summed, uint64(recs[0].TimeMS)), uint64(lastMS))
	summed = be.AppendUint16(be.AppendUint64(summed, uint64(p.ID)), uint16(p.Epoch))
	summed = be.AppendUint32(be.AppendUint32(summed, uint32(seq)), uint32(len(recs)))
	summed = append(summed, records...)

	set := be.AppendUint32(nil, uint32(8+4+4+1+4+len(summed)))
	set = be.AppendUint32(be.AppendUint64(set, 0), uint32(4+1+4+len(summed)))
	set = append(be.AppendUint32(set, 0xffffffff), 2)
	return append(be.AppendUint32(set, crc32.Checksum(summed, castagnoli)), summed...)
}

// TestChunksDoNotChangeTheBytes: a batch in chunks has the bytes of a batch in one buffer, its records can be read before and
// after it is sealed, and its memory serves the next batch.
func TestChunksDoNotChangeTheBytes(t *testing.T) {
	t.Parallel()
	codecs := allCodecs(t)
	var chunks Chunks
	rapid.Check(t, func(t *rapid.T) {
		recs := rapid.OneOf(rapid.Custom(drawRecords), rapid.Custom(drawLargeRecords)).Draw(t, "batch")
		codec := rapid.SampledFrom(codecs).Draw(t, "codec")
		producer := Producer{ID: rapid.Int64Range(0, 1<<50).Draw(t, "id"), Epoch: 3}

		var b Builder
		b.Reset(&chunks)
		for i := range recs {
			b.Append(&recs[i])
		}
		requireRecords(t, &b, recs)
		if err := b.Seal(codec, producer, 17); err != nil {
			t.Fatal(err)
		}
		requireRecords(t, &b, recs)

		want := encodeContiguously(t, recs, codec, producer, 17)
		if got := slices.Concat(b.AppendPieces(nil)...); !bytes.Equal(got, want) {
			t.Fatalf("%s: the %d bytes of a batch differ from the %d bytes in one buffer", codec, len(got), len(want))
		}
		if b.Len() != len(want)-setPrefix {
			t.Fatalf("the length is %d instead of %d", b.Len(), len(want)-setPrefix)
		}

		held := heldBytes(&b)
		if most := 2*b.Len() + 1<<minChunkBits; held > most {
			t.Fatalf("a batch of %d bytes holds %d bytes, want at most %d", b.Len(), held, most)
		}
		free := freeBytes(&chunks)
		b.Release()
		if got := freeBytes(&chunks); got != free+held {
			t.Fatalf("%d bytes are free after a batch has released %d, want %d", got, held, free+held)
		}
	})
}

// requireRecords decodes the records of b, sealed or not.
func requireRecords(t *rapid.T, b *Builder, want []record.Record) {
	own := fetched.NewOwnBatch(b.Records())
	list, err := own.Stream()
	if err != nil {
		t.Fatal(err)
	}
	// cmp.Diff compares large values byte for byte, which takes seconds.
	if got := readRest(t, list); !reflect.DeepEqual(toPlain(want), toPlain(got)) {
		t.Fatalf("%d records are decoded, and differ from the %d that were appended", len(got), len(want))
	}
}

// heldBytes returns the size of the chunks of b.
func heldBytes(b *Builder) (n int) {
	for _, chunk := range b.pieces {
		n += cap(chunk)
	}
	return n
}

// freeBytes returns the size of the free chunks.
func freeBytes(c *Chunks) (n int) {
	for class := range c.free {
		n += len(c.free[class]) << (class + minChunkBits)
	}
	return n
}

// TestFreeChunksServeBatchesOfEverySize: batches of many sizes, one after another, need no more memory than the largest of them.
// Idle chunks are dropped.
func TestFreeChunksServeBatchesOfEverySize(t *testing.T) {
	t.Parallel()
	var chunks Chunks
	rec := record.Record{Value: make([]byte, 1000)}
	largest := 0
	for size := 1 << 10; size < 1<<20; size *= 2 {
		var b Builder
		b.Reset(&chunks)
		for b.Len()+Size(&rec) < size {
			b.Append(&rec)
		}
		largest = heldBytes(&b)
		b.Release()
	}
	if free := freeBytes(&chunks); free != largest {
		t.Errorf("%d bytes are free, want those of the largest batch: %d", free, largest)
	}

	for range 8 {
		chunks.TrimUnused()
	}
	if free := freeBytes(&chunks); free != 0 {
		t.Errorf("%d unused bytes are kept, want 0", free)
	}
}
