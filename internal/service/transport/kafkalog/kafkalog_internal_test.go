package kafkalog

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"runtime"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go/compress"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
	"github.com/outrelay/outrelay/internal/service/transport"
	"github.com/outrelay/outrelay/pkg/event"
)

// batchOf writes a batch as a broker keeps it.
type batchOf struct {
	raw        []byte // instead of records
	count      int    // of raw
	base       int64
	last       int32 // offset delta of the last record, which compaction may have removed
	attributes uint16
	producer   int64
	offsets    []int32 // deltas of the records that are there
	codec      compress.Compression
}

func (b batchOf) bytes(tb testing.TB) []byte {
	tb.Helper()
	var body []byte
	for _, d := range b.offsets {
		var r []byte
		r = append(r, 0)
		r = binary.AppendVarint(r, int64(d)) // time
		r = binary.AppendVarint(r, int64(d))
		r = append(binary.AppendVarint(r, 1), 'k')
		r = append(r, 1) // null
		r = binary.AppendVarint(r, 1)
		r = append(binary.AppendVarint(r, 1), 'h')
		r = binary.AppendVarint(r, 0)
		body = append(binary.AppendVarint(body, int64(len(r))), r...)
	}

	count := len(b.offsets)
	if b.raw != nil {
		body, count = b.raw, b.count
	}
	if b.codec != compress.None {
		var out sink
		w := b.codec.Codec().NewWriter(&out)
		if _, err := w.Write(body); err != nil {
			tb.Fatal(err)
		}
		if err := w.Close(); err != nil {
			tb.Fatal(err)
		}
		body = out
	}

	h := make([]byte, fetched.HeaderSize)
	be := binary.BigEndian
	be.PutUint64(h, uint64(b.base))
	be.PutUint32(h[8:], uint32(fetched.HeaderSize-12+len(body)))
	be.PutUint32(h[12:], 7)
	h[16] = 2
	be.PutUint16(h[21:], b.attributes|uint16(b.codec))
	be.PutUint32(h[23:], uint32(b.last))
	be.PutUint64(h[27:], 1000)
	be.PutUint64(h[35:], 5000)
	be.PutUint64(h[43:], uint64(b.producer))
	be.PutUint32(h[57:], uint32(count))
	h = append(h, body...)
	be.PutUint32(h[17:], crc32.Checksum(h[21:], crc32.MakeTable(crc32.Castagnoli)))
	return h
}

type sink []byte

func (s *sink) Write(p []byte) (int, error) {
	*s = append(*s, p...)
	return len(p), nil
}

func offsetsOf(list []transport.Record) []int64 {
	var out []int64
	for _, r := range list {
		out = append(out, r.Offset)
	}
	return out
}

// N29: holes of compaction and markers are passed, at the end of a batch, between batches and as whole batches.
func TestN29_HolesArePassed(t *testing.T) {
	t.Parallel()
	for _, codec := range []compress.Compression{compress.None, compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd} {
		var set []byte
		for _, b := range []batchOf{
			// This batch is compacted, and ends at 20.
			{base: 10, last: 9, offsets: []int32{1, 3}, codec: codec},
			// All records of this batch are gone. It ends at 45.
			{base: 40, last: 4},
			{base: 45, last: 0, attributes: 0x30, producer: 3},                                       // a marker
			{base: 50, last: 1, offsets: []int32{0, 1}, attributes: 0x10, producer: 8, codec: codec}, // aborted
			{base: 52, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 9, codec: codec},    // committed
			{base: 53, last: 0, attributes: 0x30, producer: 8},
			{base: 54, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 8, codec: codec}, // its next transaction
			{base: 60, last: 5},
		} {
			set = append(set, b.bytes(t)...)
		}
		set = append(set, batchOf{base: 70, offsets: []int32{0}}.bytes(t)[:50]...) // cut off

		w := walker{from: 12, next: 12, aborted: []fetched.Aborted{{Producer: 8, First: 50}}}
		if err := w.readSet(set); err != nil {
			t.Fatal(err)
		}

		if d := cmp.Diff([]int64{13, 52, 54}, offsetsOf(w.out)); d != "" {
			t.Error(codec, d)
		}
		if w.next != 66 {
			t.Errorf("%v: next is %d", codec, w.next)
		}

		want := transport.Record{Offset: 13, LeaderEpoch: 7, Time: time.UnixMilli(1003).UTC(), Key: []byte("k"), Headers: []event.Header{{Key: "h", Value: []byte{}}}}
		if d := cmp.Diff(want, w.out[0]); d != "" {
			t.Error(d)
		}
	}
}

// A broker lists the transactions in the order of their aborts, here the last one to begin first.
func TestRecordsOfInterleavedAbortedTransactionsAreDropped(t *testing.T) {
	t.Parallel()
	var set []byte
	for _, b := range []batchOf{
		{base: 50, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 8},
		{base: 51, last: 0, offsets: []int32{0}},
		{base: 52, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 9},
		{base: 53, last: 0, attributes: 0x30, producer: 9},
		{base: 54, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 8},
		{base: 55, last: 0, attributes: 0x30, producer: 8},
		{base: 56, last: 0, offsets: []int32{0}, attributes: 0x10, producer: 9}, // its next transaction, committed
	} {
		set = append(set, b.bytes(t)...)
	}

	w := walker{from: 50, next: 50, aborted: []fetched.Aborted{{Producer: 9, First: 52}, {Producer: 8, First: 50}}}
	if err := w.readSet(set); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]int64{51, 56}, offsetsOf(w.out)); d != "" {
		t.Error(d)
	}
}

func TestBrokenBatchesAreErrorsAndNeverSkipped(t *testing.T) {
	t.Parallel()

	good := batchOf{base: 0, last: 0, offsets: []int32{0}}.bytes(t)
	broken := batchOf{base: 1, last: 0, offsets: []int32{0}}.bytes(t)
	broken[len(broken)-1] ^= 1

	old := batchOf{base: 1, last: 0, offsets: []int32{0}}.bytes(t)
	old[16] = 1

	short := make([]byte, 20)

	for _, bad := range [][]byte{broken, old, short} {
		w := walker{}
		if err := w.readSet(append(append([]byte(nil), good...), bad...)); err != nil || len(w.out) != 1 || w.next != 1 {
			t.Errorf("%v, %d records, next %d", err, len(w.out), w.next)
		}

		w = walker{from: 1, next: 1}
		if err := w.readSet(bad); err == nil || w.next != 1 {
			t.Errorf("no error; next %d", w.next)
		}
	}
}

// A damaged batch is fetched again a few times, and then one record with an error replaces it. The end of the record is the base offset of the
// next good batch, or the end in the header of the batch if this is plausible. Otherwise, the log tries one offset after the
// other.
func TestADamagedBatchIsGivenUpAfterSomeFetches(t *testing.T) {
	t.Parallel()
	const high = 20
	tp := transport.TopicPartition{Topic: "t"}
	behind := batchOf{base: 14, offsets: []int32{0}}.bytes(t)
	damagedBatch := func(edit func(b []byte)) []byte {
		b := batchOf{base: 10, last: 2, offsets: []int32{0, 1, 2}}.bytes(t)
		edit(b)
		return b
	}
	lastDelta := func(n uint32) func(b []byte) {
		return func(b []byte) {
			binary.BigEndian.PutUint32(b[23:], n-1)
			binary.BigEndian.PutUint32(b[57:], n)
		}
	}
	for _, c := range []struct {
		name string
		set  []byte
		// next is the offset after the batch, once the log gives up the batch.
		next int64
	}{
		{"another one behind it", append(damagedBatch(lastDelta(9)), behind...), 14},
		{"the last of its fetch", damagedBatch(func(b []byte) { b[len(b)-1] ^= 1 }), 13},
		{"an end above the high watermark", damagedBatch(lastDelta(1 << 20)), 12},
		{"an end before its begin", damagedBatch(lastDelta(1 << 31)), 12},
		{"a header that contradicts itself", damagedBatch(func(b []byte) { b[57] = 1 }), 12},
		{"a wrong length", damagedBatch(func(b []byte) { b[8] = 0xff }), 12},
	} {
		var d damage
		for i := range damagedAttempts {
			w := walker{tp: tp, from: 11, next: 11}
			bad, ok := errors.AsType[*damagedError](w.readSet(c.set))
			if !ok {
				t.Fatal(c.name, "is no damage")
			}
			passed, last := d.giveUp(bad, &w, high), i == damagedAttempts-1
			switch {
			case passed != last:
				t.Errorf("%s: given up after %d fetches: %v", c.name, i+1, passed)
			case !passed:
			case w.next != c.next || len(w.out) != 1 || w.out[0].Offset != 11 || !errors.Is(w.out[0].Err, fetched.ErrCorrupt):
				t.Errorf("%s: next is %d, %+v", c.name, w.next, w.out)
			}
		}
		if c.next != 12 {
			continue
		}

		// The broker responds with the same batch until the offset is behind it. Nothing more is reported, and nothing waits.
		w := walker{tp: tp, from: 12, next: 12}
		bad, _ := errors.AsType[*damagedError](w.readSet(c.set))
		if bad == nil || !d.giveUp(bad, &w, high) || w.next != 13 || (len(w.out) > 0) != (c.name == "a wrong length") {
			t.Errorf("%s: at the offset behind: next is %d, %+v", c.name, w.next, w.out)
		}
		w = walker{tp: tp, from: 13, next: 13}
		if err := w.readSet(behind); err != nil || w.next != 15 {
			t.Errorf("%s: %v, next is %d", c.name, err, w.next)
		}
	}

	// A batch that is good the second time was damaged on its way.
	var d damage
	w := walker{tp: tp, from: 11, next: 11}
	bad, _ := errors.AsType[*damagedError](w.readSet(damagedBatch(func(b []byte) { b[len(b)-1] ^= 1 })))
	if bad == nil || d.giveUp(bad, &w, high) {
		t.Error("given up at once")
	}
}

// A broker whose index goes by a damaged header responds with that batch for offsets that are behind it.
func TestABatchBehindADamagedOneIsRead(t *testing.T) {
	t.Parallel()
	bad := batchOf{base: 10, last: 9, offsets: []int32{0}}.bytes(t)
	bad[len(bad)-1] ^= 1
	w := walker{from: 14, next: 14}
	if err := w.readSet(append(bad, batchOf{base: 14, offsets: []int32{0}}.bytes(t)...)); err != nil || len(w.out) != 1 || w.next != 15 {
		t.Errorf("%v, %+v, next %d", err, w.out, w.next)
	}
}

// rawRecord is a record with a value of n bytes and so many empty headers.
func rawRecord(delta, n, headers int) []byte {
	r := []byte{0}
	r = binary.AppendVarint(r, 0)
	r = binary.AppendVarint(r, int64(delta))
	r = append(r, 1) // no key
	r = append(binary.AppendVarint(r, int64(n)), make([]byte, n)...)
	r = append(binary.AppendVarint(r, int64(headers)), make([]byte, 2*headers)...)
	return append(binary.AppendVarint(nil, int64(len(r))), r...)
}

// walkAll reads a set with as many fetches as necessary, and returns the largest allocation
// of a fetch.
func walkAll(t *testing.T, set []byte, end int64) (out []transport.Record, allocated uint64) {
	t.Helper()
	for next := int64(0); next < end; {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		w := walker{from: next, next: next}
		if err := w.readSet(set); err != nil {
			t.Fatal(err)
		}
		runtime.ReadMemStats(&after)
		allocated = max(allocated, after.TotalAlloc-before.TotalAlloc)
		if w.next <= next {
			t.Fatalf("no progress from offset %d", next)
		}
		next = w.next
		for _, r := range w.out {
			r.Value = nil
			out = append(out, r)
		}
	}

	return out, allocated
}

// A small batch that expands beyond all bounds is read in parts, and what cannot be taken of it is known by its place. It is
// not parallel because it measures memory.
func TestABatchThatExpandsWithoutBoundDoesNotStopItsPartition(t *testing.T) { //nolint:paralleltest // see above

	good := batchOf{base: 1000, offsets: []int32{0}}.bytes(t)
	var many []byte
	for i := range 300 {
		many = append(many, rawRecord(i, 1<<20, 0)...)
	}
	for _, c := range []struct {
		name string
		b    batchOf
		// n is the number of records.
		n int
		// bad is the offset of the record that cannot be read, or -1.
		bad int64
	}{
		{"many records of 300 MB", batchOf{raw: many, count: 300, last: 299, codec: compress.Zstd}, 300, -1},
		{"one record of 300 MB", batchOf{raw: append(rawRecord(0, 300<<20, 0), rawRecord(1, 1, 0)...), count: 2, last: 1, codec: compress.Zstd}, 2, 0},
		{"4,000,000 headers", batchOf{raw: append(rawRecord(0, 1, 4_000_000), rawRecord(1, 1, 0)...), count: 2, last: 1, codec: compress.Gzip}, 2, 0},
		{"a record that ends too early", batchOf{raw: append(rawRecord(0, 1, 0), 100, 0), count: 9, last: 8, codec: compress.Lz4}, 2, 1},
	} {
		set := c.b.bytes(t)
		if len(set) > 1<<20 {
			t.Fatalf("%s: the batch has %d bytes", c.name, len(set))
		}

		out, allocated := walkAll(t, append(set, good...), 1001)
		if len(out) != c.n+1 || out[c.n].Offset != 1000 || out[c.n].Err != nil {
			t.Errorf("%s: %d records, the last %+v", c.name, len(out), out[len(out)-1])
		}

		for _, r := range out {
			if bad := r.Offset == c.bad; bad != (r.Err != nil) {
				t.Errorf("%s: offset %d: %v", c.name, r.Offset, r.Err)
			}
		}
		// The whole batch would take 300 MB and more. The race detector drops buffers that could be used again.
		if allocated > 200<<20 {
			t.Errorf("%s: %d MB were allocated by one fetch", c.name, allocated>>20)
		}
	}
}

// A broker cannot check compressed bytes. Bytes that cannot be decompressed are passed and
// reported.
func TestABatchThatCannotBeDecompressedDoesNotStopItsPartition(t *testing.T) {
	t.Parallel()
	for _, codec := range []compress.Compression{compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd, 7} {
		bad := batchOf{raw: []byte("no such thing, and long enough"), count: 3, last: 2, attributes: uint16(codec)}.bytes(t)
		w := walker{from: 1, next: 1}
		if err := w.readSet(append(bad, batchOf{base: 3, offsets: []int32{0}}.bytes(t)...)); err != nil {
			t.Fatal(codec, err)
		}
		if len(w.out) != 2 || w.out[0].Offset != 1 || w.out[0].Err == nil || w.out[1].Offset != 3 || w.next != 4 {
			t.Errorf("%v: %+v, next %d", codec, w.out, w.next)
		}
	}
}

// A record that stays in memory does not keep the response that it came with.
func TestARecordDoesNotPinTheResponseThatItCameWith(t *testing.T) {
	t.Parallel()
	set := batchOf{raw: append(rawRecord(0, 10, 0), rawRecord(1, 100_000, 0)...), count: 2, last: 1}.bytes(t)
	w := walker{}
	if err := w.readSet(set); err != nil {
		t.Fatal(err)
	}

	for i := range set { // the values are zeros
		set[i] = 1
	}
	if len(w.out) != 2 {
		t.Errorf("%d records, want 2", len(w.out))
	}

	for _, r := range w.out {
		if n := cap(r.Value); n > len(r.Value)+100 {
			t.Errorf("a value of %d bytes holds %d", len(r.Value), n)
		}
		if bytes.Contains(r.Value, []byte{1}) {
			t.Error("a value is part of the response")
		}
	}
}

func TestNoBytesMakeTheWalkerPanic(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		b := batchOf{base: 3, last: 4, offsets: []int32{0, 4}}.bytes(t)
		for range rapid.IntRange(1, 6).Draw(rt, "changes") {
			b[rapid.IntRange(0, len(b)-1).Draw(rt, "at")] = rapid.Byte().Draw(rt, "to")
		}
		if rapid.Bool().Draw(rt, "sealed") && len(b) > 21 {
			binary.BigEndian.PutUint32(b[17:], crc32.Checksum(b[21:], crc32.MakeTable(crc32.Castagnoli)))
		}
		_ = (&walker{}).readSet(b)
		_, _ = fetched.Parse(b, int16(rapid.IntRange(4, 11).Draw(rt, "version")))
	})
}

func TestMessagesWithoutAKeyAreSpread(t *testing.T) {
	t.Parallel()
	seen := map[int32]bool{}
	for i := range 8 {
		seen[choosePartition(&transport.Record{Offset: int64(i)}, 4)] = true
	}
	if len(seen) != 4 {
		t.Error(fmt.Sprint(seen))
	}
}
