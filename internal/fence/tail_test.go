package fence

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// placed is a batch as a broker returns it: at an offset, with a last offset delta of the broker's choice.
func placed(b []byte, base int64, lastDelta int32) []byte {
	b = bytes.Clone(b[4:])
	binary.BigEndian.PutUint64(b, uint64(base))
	binary.BigEndian.PutUint32(b[23:], uint32(lastDelta))
	return sealed(b)
}

func sealed(b []byte) []byte {
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func control(id Producer, base int64) []byte {
	b := placed(encode(0, id, -1, nil), base, 0)
	binary.BigEndian.PutUint16(b[21:], 0x30)
	return sealed(b)
}

func TestWalkKeepsToLastOffsetDelta(t *testing.T) {
	t.Parallel()
	me, other := Producer{7, 1}, Producer{8, 1}
	ours := map[int64]bool{7: true}
	var set []byte
	set = append(set, placed(encode(0, me, 0, ids("before", "a")...), 99, 5)...) // compacted: 99, 100, and holes up to 104
	set = append(set, placed(encode(0, other, 0, ids("foreign")...), 105, 0)...)
	set = append(set, control(Producer{7, 3}, 106)...)
	set = append(set, placed(encode(compress.Zstd, me, 2, ids("z", "z")...), 107, 1)...)
	set = append(set, placed(encode(0, me, 4, ids("cut off")...), 109, 0)[:40]...)

	tail := newTail(100)
	if err := tail.walk(set, ours, &bytes.Buffer{}); err != nil {
		t.Fatal(err)
	}
	if tail.Next != 109 {
		t.Errorf("Next = %d, want 109", tail.Next)
	}
	for id, want := range map[string]int64{"before": -1, "a": 100, "foreign": -1, "z": 107, "cut off": -1} {
		got, ok := tail.Hits.Take(ident(t, header("id", id)))
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("%s: offset %d, %t; want %d", id, got, ok, want)
		}
	}
	if !tail.above([]Producer{{7, 2}}) || tail.above([]Producer{{7, 3}}) || tail.above([]Producer{{8, 0}}) || !tail.above(nil) {
		t.Errorf("marks %v", tail.marks)
	}
	// The same fetch again brings nothing new, and an empty batch (its records compacted away) is passed.
	n := tail.Hits.Len()
	set = append(set[:len(set)-40], placed(encode(0, me, 9), 109, 4)...)
	if err := tail.walk(set, ours, &bytes.Buffer{}); err != nil || tail.Hits.Len() != n || tail.Next != 114 {
		t.Errorf("second walk: %v, %d hits, next %d", err, tail.Hits.Len()-n, tail.Next)
	}
}

func TestWalkRefusesCorruptBatches(t *testing.T) {
	t.Parallel()
	for _, codec := range []compress.Compression{compress.None, compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd} {
		whole := placed(encode(codec, Producer{7, 1}, 0, ids("a", "b", "c")...), 10, 2)
		tail := newTail(0)
		if err := tail.walk(whole, map[int64]bool{7: true}, &bytes.Buffer{}); err != nil || tail.Hits.Len() != 3 {
			t.Fatalf("%v: %v, %d hits", codec, err, tail.Hits.Len())
		}
		for at := 21; at < len(whole); at++ {
			bad := bytes.Clone(whole)
			bad[at] ^= 0x55
			if err := newTail(0).walk(bad, map[int64]bool{7: true}, &bytes.Buffer{}); err == nil {
				t.Fatalf("%v: flipped byte %d was not noticed", codec, at)
			}
		}
	}
}

// FuzzWalk: whatever a broker sends, the walk ends, does not panic and never goes back.
func FuzzWalk(f *testing.F) {
	f.Add(placed(encode(0, Producer{7, 1}, 0, ids("a")...), 3, 0))
	f.Add(placed(encode(compress.Snappy, Producer{7, 1}, 0, ids("a", "b")...), 3, 1))
	f.Add(control(Producer{7, 1}, 4))
	f.Fuzz(func(t *testing.T, set []byte) {
		if len(set) > fetched.HeaderSize && len(set) < 1<<16 {
			binary.BigEndian.PutUint32(set[8:], uint32(len(set)-12))
			sealed(set)
		}
		tail := newTail(2)
		_ = tail.walk(set, map[int64]bool{7: true, -1: true}, &bytes.Buffer{})
		if tail.Next < 2 {
			t.Errorf("Next = %d", tail.Next)
		}
		if len(set) < 1<<16 {
			for v := int16(4); v <= 11; v++ {
				_, _ = fetched.Parse(set, v)
			}
		}
	})
}
