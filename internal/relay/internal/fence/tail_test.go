package fence

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"

	"github.com/segmentio/kafka-go/compress"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// placeBatch returns a batch in the form of a fetch response, with the offset and the last offset delta that a broker sets.
func placeBatch(b []byte, base int64, lastDelta int32) []byte {
	b = bytes.Clone(b[4:])
	binary.BigEndian.PutUint64(b, uint64(base))
	binary.BigEndian.PutUint32(b[23:], uint32(lastDelta))
	return sealBatch(b)
}

func sealBatch(b []byte) []byte {
	binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

func newMarker(id Producer, base int64) []byte {
	b := placeBatch(encodeBatch(0, id, -1, nil), base, 0)
	binary.BigEndian.PutUint16(b[21:], 0x30)
	return sealBatch(b)
}

func TestWalkKeepsToLastOffsetDelta(t *testing.T) {
	t.Parallel()
	me, other := Producer{ID: 7, Epoch: 1}, Producer{ID: 8, Epoch: 1}
	ours := map[int64]int16{7: 9}
	var set []byte
	// This batch was compacted: it has the offsets 99 and 100, and holes up to 104.
	set = append(set, placeBatch(encodeBatch(0, me, 0, newRecords("before", "a")...), 99, 5)...)
	set = append(set, placeBatch(encodeBatch(0, other, 0, newRecords("foreign")...), 105, 0)...)
	set = append(set, newMarker(Producer{ID: 7, Epoch: 3}, 106)...)
	set = append(set, placeBatch(encodeBatch(compress.Zstd, me, 2, newRecords("z", "z")...), 107, 1)...)
	set = append(set, placeBatch(encodeBatch(0, me, 4, newRecords("cut off")...), 109, 0)[:40]...)

	tail := newTail(100)
	if err := tail.readSet(set, ours); err != nil {
		t.Fatal(err)
	}
	if tail.Next != 109 {
		t.Errorf("Next = %d, want 109", tail.Next)
	}
	if tail.Markers != 1 {
		t.Errorf("%d markers, want 1", tail.Markers)
	}
	for id, want := range map[string]int64{"before": -1, "a": 100, "foreign": -1, "z": 107, "cut off": -1} {
		got, ok := tail.Hits.Take(mustIdentify(t, newHeader("id", id)), AnyTime)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("%s: offset %d, %t; want %d", id, got, ok, want)
		}
	}
	if !tail.hasMarkersAbove([]Producer{{ID: 7, Epoch: 2}}) || tail.hasMarkersAbove([]Producer{{ID: 7, Epoch: 3}}) || tail.hasMarkersAbove([]Producer{{ID: 8, Epoch: 0}}) || !tail.hasMarkersAbove(nil) {
		t.Errorf("marks %v", tail.marks)
	}
	// The same fetch again brings nothing new, and an empty batch (its records compacted away) is passed.
	n := tail.Hits.Len()
	set = append(set[:len(set)-40], placeBatch(encodeBatch(0, me, 9), 109, 4)...)
	if err := tail.readSet(set, ours); err != nil || tail.Hits.Len() != n || tail.Next != 114 {
		t.Errorf("second walk: %v, %d hits, next %d", err, tail.Hits.Len()-n, tail.Next)
	}
}

func TestWalkRejectsCorruptBatches(t *testing.T) {
	t.Parallel()
	for _, codec := range []compress.Compression{compress.None, compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd} {
		whole := placeBatch(encodeBatch(codec, Producer{ID: 7, Epoch: 1}, 0, newRecords("a", "b", "c")...), 10, 2)
		tail := newTail(0)
		if err := tail.readSet(whole, map[int64]int16{7: 9}); err != nil || tail.Hits.Len() != 3 {
			t.Fatalf("%v: %v, %d hits", codec, err, tail.Hits.Len())
		}

		for at := 21; at < len(whole); at++ {
			bad := bytes.Clone(whole)
			bad[at] ^= 0x55
			if err := newTail(0).readSet(bad, map[int64]int16{7: 9}); err == nil {
				t.Fatalf("%v: flipped byte %d was not noticed", codec, at)
			}
		}
	}
}

// TestACorruptBatchIsSkippedAfterSomeFetches: a corrupt batch does not keep its partition in quarantine. Its end is
// taken from its header or from the next intact batch, or is found by trying one offset after the other. The tail
// reports that a part of it is missing.
func TestACorruptBatchIsSkippedAfterSomeFetches(t *testing.T) {
	t.Parallel()
	const high = 20
	ours := map[int64]int16{7: 9}
	batchAt := func(base int64, edit func(b []byte)) []byte {
		b := placeBatch(encodeBatch(0, Producer{ID: 7, Epoch: 1}, 0, newRecords("x", "y", "z")...), base, 2)
		if edit != nil {
			edit(b)
		}
		return b
	}
	flip := func(b []byte) { b[len(b)-1] ^= 1 }
	contradict := func(b []byte) { b[57] = 1 }
	behind := batchAt(14, nil)
	for name, c := range map[string]struct {
		set  []byte
		next int64 // after it was skipped
	}{
		"an end in the header":          {batchAt(10, flip), 13},
		"an intact batch behind it":     {append(batchAt(10, contradict), behind...), 14},
		"a header without an end":       {batchAt(10, contradict), 11},
		"a wrong length":                {batchAt(10, func(b []byte) { b[8] = 0xff }), 11},
		"records that cannot be parsed": {sealBatch(batchAt(10, func(b []byte) { b[61] = 0xff })), 13},
	} {
		var events []Event
		r := &reader{ours: ours, report: func(e Event) { events = append(events, e) }}
		p := &reading{TopicPartition: at("t", 0), tail: newTail(10), skippedBase: -1}
		got := &fetched.Partition{High: high, Set: c.set}
		for i := range corruptReads {
			if p.tail.Next != 10 || len(events) > 0 {
				t.Errorf("%s: skipped after %d fetches", name, i)
			}
			r.handleFetched(t.Context(), "", p, got)
		}
		if p.tail.Next != c.next || !p.tail.Truncated || len(events) != 1 || events[0].Kind != Corrupt || p.done {
			t.Errorf("%s: next is %d, want %d; %+v, events %v", name, p.tail.Next, c.next, p.tail, events)
		}

		// The broker returns the same batch until the offset is after it. That costs no further attempts and no event.
		for p.tail.Next < 13 {
			before := p.tail.Next
			r.handleFetched(t.Context(), "", p, got)
			if p.tail.Next != before+1 || len(events) > 1 {
				t.Fatalf("%s: from %d to %d, events %v", name, before, p.tail.Next, events)
			}
		}
		r.handleFetched(t.Context(), "", p, &fetched.Partition{High: high, Set: behind})
		if p.tail.Next != 17 || p.tail.Hits.Len() != 3 {
			t.Errorf("%s: next is %d, want 17, with %d hits, want 3", name, p.tail.Next, p.tail.Hits.Len())
		}
	}

	// A batch that is intact the second time was damaged in transit.
	r := &reader{ours: ours, report: func(e Event) { t.Errorf("event %+v", e) }}
	p := &reading{TopicPartition: at("t", 0), tail: newTail(10), skippedBase: -1}
	r.handleFetched(t.Context(), "", p, &fetched.Partition{High: 13, Set: batchAt(10, flip)})
	r.handleFetched(t.Context(), "", p, &fetched.Partition{High: 13, Set: batchAt(10, nil)})
	if !p.done || p.tail.Truncated || p.tail.Hits.Len() != 3 {
		t.Errorf("after an intact fetch: %+v", p.tail)
	}
}

// FuzzWalk: for all bytes of a broker, the walk ends, does not panic and never goes back.
func FuzzWalk(f *testing.F) {
	f.Add(placeBatch(encodeBatch(0, Producer{ID: 7, Epoch: 1}, 0, newRecords("a")...), 3, 0))
	f.Add(placeBatch(encodeBatch(compress.Snappy, Producer{ID: 7, Epoch: 1}, 0, newRecords("a", "b")...), 3, 1))
	f.Add(newMarker(Producer{ID: 7, Epoch: 1}, 4))
	f.Fuzz(func(t *testing.T, set []byte) {
		if len(set) > fetched.HeaderSize && len(set) < 1<<16 {
			binary.BigEndian.PutUint32(set[8:], uint32(len(set)-12))
			sealBatch(set)
		}

		tail := newTail(2)
		_ = tail.readSet(set, map[int64]int16{7: 9, -1: 9})
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
