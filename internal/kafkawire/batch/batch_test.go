package batch

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// allCodecs returns each codec.
func allCodecs(t testing.TB) []*Codec {
	t.Helper()
	var all []*Codec
	for _, n := range []string{"", "none", "gzip", "snappy", "lz4", "zstd"} {
		c, err := ParseCodec(n)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	return all
}

// drawRecords draws records of every shape that Kafka allows: null and empty keys, values and
// headers, repeated names, and times before the first record.
func drawRecords(t *rapid.T) []record.Record {
	data := rapid.OneOf(rapid.Just([]byte(nil)), rapid.SliceOfN(rapid.Byte(), 0, 300))
	name := rapid.SliceOfN(rapid.Byte(), 0, 20)
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) record.Record {
		return record.Record{
			Key:   data.Draw(t, "key"),
			Value: data.Draw(t, "value"),
			Headers: rapid.SliceOfN(rapid.Custom(func(t *rapid.T) record.Header {
				return record.Header{Key: name.Draw(t, "name"), Value: data.Draw(t, "header")}
			}), 0, 4).Draw(t, "headers"),
			TimeMS: rapid.Int64Range(0, 1<<41).Draw(t, "time"),
		}
	}), 1, 40).Draw(t, "records")
}

type plain struct {
	Key, Value []byte
	Headers    []string
	TimeMS     int64
	Offset     int64
}

func formatRecord(key, value []byte) string {
	if value == nil {
		return string(key) + "=null"
	}
	return string(key) + "=" + string(value)
}

func toPlain(recs []record.Record) []plain {
	var out []plain
	for i, r := range recs {
		p := plain{Key: r.Key, Value: r.Value, TimeMS: r.TimeMS, Offset: 1000 + int64(i)}
		for _, h := range r.Headers {
			p.Headers = append(p.Headers, formatRecord(h.Key, h.Value))
		}
		out = append(out, p)
	}
	return out
}

// sealBatch returns the record set of recs.
func sealBatch(t interface{ Fatal(...any) }, recs []record.Record, c *Codec, p Producer, seq int32) []byte {
	var b Builder
	b.Reset(new(Chunks))
	size := 0
	for i := range recs {
		b.Append(&recs[i])
		size += Size(&recs[i])
	}
	if b.Len()-overhead > size {
		t.Fatal("Size is no upper bound: ", b.Len()-overhead, " > ", size)
	}

	if err := b.Seal(c, p, seq); err != nil {
		t.Fatal(err)
	}
	return slices.Concat(b.AppendPieces(nil)...)
}

func TestTwoOtherDecodersReadOurBatches(t *testing.T) {
	t.Parallel()
	codecs := allCodecs(t)
	rapid.Check(t, func(t *rapid.T) {
		recs := drawRecords(t)
		c := rapid.SampledFrom(codecs).Draw(t, "codec")
		p := Producer{ID: rapid.Int64Range(0, 1<<50).Draw(t, "id"), Epoch: int16(rapid.IntRange(0, 32767).Draw(t, "epoch"))}
		seq := int32(rapid.IntRange(0, maxSequence).Draw(t, "sequence"))
		sealed := sealBatch(t, recs, c, p, seq)

		if d := cmp.Diff(toPlain(recs), decodeByFranz(t, sealed, p)); d != "" {
			t.Fatal(c, d)
		}
		if d := cmp.Diff(toPlain(recs), decodeBySegmentio(t, sealed, p, seq)); d != "" {
			t.Fatal(c, d)
		}
		if d := cmp.Diff(toPlain(recs), decodeByUs(t, sealed)); d != "" {
			t.Fatal(c, d)
		}
	})
}

func decodeByFranz(t *rapid.T, sealed []byte, p Producer) []plain {
	b := bytes.Clone(sealed[setPrefix:])
	// The checksum excludes the base offset of the broker.
	binary.BigEndian.PutUint64(b, 1000)
	rp := &kmsg.FetchResponseTopicPartition{RecordBatches: b, HighWatermark: 1 << 40}
	fp, _ := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{Offset: 1000, Topic: "t"}, rp, kgo.DefaultDecompressor(), nil)
	if fp.Err != nil {
		t.Fatal(fp.Err)
	}

	var out []plain
	for _, r := range fp.Records {
		if r.ProducerID != p.ID || r.ProducerEpoch != p.Epoch {
			t.Fatal("producer", r.ProducerID, r.ProducerEpoch)
		}
		x := plain{Key: r.Key, Value: r.Value, TimeMS: r.Timestamp.UnixMilli(), Offset: r.Offset}
		for _, h := range r.Headers {
			x.Headers = append(x.Headers, formatRecord([]byte(h.Key), h.Value))
		}
		out = append(out, x)
	}

	return out
}

func decodeBySegmentio(t *rapid.T, sealed []byte, p Producer, seq int32) []plain {
	b := bytes.Clone(sealed)
	binary.BigEndian.PutUint64(b[setPrefix:], 1000)
	var rs protocol.RecordSet
	if _, err := rs.ReadFrom(bytes.NewReader(b)); err != nil {
		t.Fatal(err)
	}

	st, ok := rs.Records.(*protocol.RecordStream)
	if !ok || len(st.Records) != 1 {
		t.Fatalf("%T", rs.Records)
	}

	rb, ok := st.Records[0].(*protocol.RecordBatch)
	if !ok || rb.ProducerID != p.ID || rb.ProducerEpoch != p.Epoch || rb.BaseSequence != seq {
		t.Fatalf("%+v", st.Records[0])
	}

	all := func(b protocol.Bytes) []byte {
		if b == nil {
			return nil
		}
		p, err := io.ReadAll(b)
		if err != nil {
			t.Fatal(err)
		}
		return p
	}

	var out []plain
	for {
		r, err := rb.ReadRecord()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		x := plain{Key: all(r.Key), Value: all(r.Value), TimeMS: r.Time.UnixMilli(), Offset: r.Offset}
		for _, h := range r.Headers {
			x.Headers = append(x.Headers, formatRecord([]byte(h.Key), h.Value))
		}
		out = append(out, x)
	}
}

func decodeByUs(t *rapid.T, sealed []byte) []plain {
	var out []plain
	for b, err := range fetched.Batches(sealed[setPrefix:]) {
		if err != nil {
			t.Fatal(err)
		}
		list, err := b.Stream()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, toPlain(readRest(t, list))...)
	}
	return out
}

// readRest returns the records that are left in list.
func readRest(t interface{ Fatal(...any) }, list *fetched.Stream) (recs []record.Record) {
	defer list.Close()
	for {
		var x fetched.Record
		ok, err := list.Next(&x, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return recs
		}
		recs = append(recs, record.Record{Key: x.Key, Value: x.Value, Headers: x.Headers, TimeMS: x.TimeMS})
	}
}

// TestSequenceWrapsAt2To31: the sequence after 2³¹−1 is 0.
func TestSequenceWrapsAt2To31(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ from, n, want int32 }{
		{0, 1, 1},
		{maxSequence - 1, 1, maxSequence},
		{maxSequence, 1, 0},
		{maxSequence - 1, 2, 0},
		{maxSequence - 1, 5, 3},
	} {
		if got := NextSequence(c.from, c.n); got != c.want {
			t.Errorf("%d records from %d: next is %d, want %d", c.n, c.from, got, c.want)
		}
	}
}

// TestAnUnknownCodecIsNamed: the error names the unknown codec.
func TestAnUnknownCodecIsNamed(t *testing.T) {
	t.Parallel()
	if _, err := ParseCodec("brotli"); err == nil || !strings.Contains(err.Error(), "zstd") {
		t.Errorf("an unknown codec: %v", err)
	}
}

func TestAppendAndSealDoNotAllocate(t *testing.T) {
	rec := record.Record{Key: []byte("key"), Value: make([]byte, 1000), Headers: []record.Header{{Key: []byte("id"), Value: make([]byte, 36)}}, TimeMS: 1}

	for _, name := range []string{"none", "snappy", "lz4", "zstd"} {
		c, err := ParseCodec(name)
		if err != nil {
			t.Fatal(err)
		}
		var chunks Chunks
		var b Builder

		n := testing.AllocsPerRun(20, func() {
			b.Reset(&chunks)
			for range 500 {
				b.Append(&rec)
			}
			if err := b.Seal(c, Producer{}, 0); err != nil {
				t.Fatal(err)
			}
		})

		// A stream codec may allocate a writer, but a record must not allocate.
		if n > 25 {
			t.Errorf("%s: %.0f allocations for a batch of 500 records", name, n)
		}
		if name == "none" && n > 0 {
			t.Errorf("%.0f allocations without a codec", n)
		}
	}
}

func BenchmarkEncode1KB(b *testing.B) {
	rec := record.Record{Key: []byte("order-123456"), Value: make([]byte, 1000), Headers: []record.Header{{Key: []byte("id"), Value: make([]byte, 36)}, {Key: []byte("type"), Value: []byte("OrderPlaced")}}}
	var chunks Chunks
	var w Builder
	w.Reset(&chunks)
	b.ReportAllocs()
	b.SetBytes(1000)

	for b.Loop() {
		if w.Len()+Size(&rec) > 1<<20 {
			if err := w.Seal(None(), Producer{}, 0); err != nil {
				b.Fatal(err)
			}
			w.Reset(&chunks)
		}
		w.Append(&rec)
	}
}
