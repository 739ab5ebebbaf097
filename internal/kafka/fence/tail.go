package fence

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"

	"github.com/segmentio/kafka-go/compress"
)

// Tail is what was read of one partition.
type Tail struct {
	// From is the offset it was read from, to be kept as the stored offset: the one that was stored, or the start of
	// the log where that was out of range.
	From int64
	// Next is the offset after the last that was read. Nothing of an earlier sender stands at or above it.
	Next int64
	// Hits are the deliveries of ours in it.
	Hits *Known
	// OutOfRange says that the stored offset was not in the log; Truncated that a stretch was skipped for the bound. What
	// is sent again after either may be a duplicate, and is to be flagged so.
	OutOfRange, Truncated bool

	marks  map[int64]int16 // highest epoch of a control batch, by producer id
	target int64           // high watermark when it was first read; -1 before
	bytes  int64
	span   int64 // offsets walked, jumps excluded
}

func newTail(from int64) *Tail {
	return &Tail{From: max(from, 0), Next: max(from, 0), Hits: &Known{}, marks: map[int64]int16{}, target: -1}
}

// above reports whether a marker above each of senders was read.
func (t *Tail) above(senders []Producer) bool {
	for _, s := range senders {
		if e, seen := t.marks[s.ID]; !seen || e <= s.Epoch {
			return false
		}
	}
	return true
}

// headerSize is the size of a record batch (v2) before its records.
const headerSize = 61

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

var errCorrupt = errors.New("corrupt record batch")

// walk takes what a fetch brought, batch by batch. Batches that end below Next (a fetch begins with a whole batch) are
// passed over. The next offset after a batch comes from its last offset delta: a compacted batch ends with a hole.
func (t *Tail) walk(set []byte, ours map[int64]bool, scratch *bytes.Buffer) error {
	for len(set) > 16 {
		size := 12 + int(int32(binary.BigEndian.Uint32(set[8:])))
		if size < 12 || size > len(set) {
			return nil // cut off by the size of the fetch: the next one brings it whole
		}
		if err := t.batch(set[:size], ours, scratch); err != nil {
			return err
		}
		set = set[size:]
	}
	return nil
}

func (t *Tail) batch(b []byte, ours map[int64]bool, scratch *bytes.Buffer) error {
	be := binary.BigEndian
	base := int64(be.Uint64(b))
	if b[16] < 2 { // messages from before producer ids: nobody of ours
		t.pass(base + 1)
		return nil
	}
	if len(b) < headerSize || crc32.Checksum(b[21:], castagnoli) != be.Uint32(b[17:]) {
		return fmt.Errorf("%w at offset %d", errCorrupt, base)
	}
	end := base + int64(be.Uint32(b[23:])) + 1
	if end <= t.Next {
		return nil
	}
	attributes, id, epoch := be.Uint16(b[21:]), int64(be.Uint64(b[43:])), int16(be.Uint16(b[51:]))
	switch {
	case attributes&0x20 != 0: // control batch
		if e, seen := t.marks[id]; !seen || epoch > e {
			t.marks[id] = epoch
		}
	case ours[id]:
		if err := t.records(b, base, attributes, scratch); err != nil {
			return fmt.Errorf("%w at offset %d: %w", errCorrupt, base, err)
		}
	}
	t.pass(end)
	return nil
}

func (t *Tail) pass(next int64) {
	if next > t.Next {
		t.span += next - t.Next
		t.Next = next
	}
}

// records remembers the deliveries of one of our batches.
func (t *Tail) records(b []byte, base int64, attributes uint16, scratch *bytes.Buffer) error {
	n := int(int32(binary.BigEndian.Uint32(b[57:])))
	d := decoder{b: b[headerSize:]}
	if kind := compress.Compression(attributes & 7); kind != compress.None {
		codec := kind.Codec()
		if codec == nil {
			return fmt.Errorf("compression %d is unknown", kind)
		}
		r := codec.NewReader(bytes.NewReader(d.b))
		scratch.Reset()
		_, err := io.Copy(scratch, r)
		if err = errors.Join(err, r.Close()); err != nil {
			return err
		}
		d.b = scratch.Bytes()
	}
	for ; n > 0; n-- {
		rec := decoder{b: d.bytes(int(d.varint()))}
		rec.skip(1)  // attributes
		rec.varint() // timestamp
		offset := base + rec.varint()
		rec.skip(int(rec.varint())) // key
		rec.skip(int(rec.varint())) // value
		var x identity
		for n := rec.varint(); n > 0 && !rec.bad; n-- {
			key := rec.bytes(int(rec.varint()))
			x.add(key, rec.bytes(int(rec.varint())))
		}
		if d.bad || rec.bad {
			return errors.New("a record ends too early")
		}
		if id, ok := x.sum(); ok && offset >= t.Next {
			t.Hits.Add(id, offset)
		}
	}
	return nil
}
