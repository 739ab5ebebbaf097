package fetched_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/kafkawire/fetched"
)

// twoRecords returns a batch of two records from the relay's encoder, as a broker would store it at
// offset 5.
func twoRecords(tb testing.TB, codec string) []byte {
	tb.Helper()
	c, err := batch.ParseCodec(codec)
	if err != nil {
		tb.Fatal(err)
	}

	var b batch.Builder
	b.Reset(new(batch.Chunks))
	for _, key := range []string{"a", "b"} {
		b.Append(&record.Record{Key: []byte(key), TimeMS: 1000, Headers: []record.Header{{Key: []byte("h"), Value: []byte(key)}}})
	}

	if err := b.Seal(c, batch.Producer{ID: 7, Epoch: 3}, 0); err != nil {
		tb.Fatal(err)
	}

	p := slices.Concat(b.AppendPieces(nil)...)[4:]
	binary.BigEndian.PutUint64(p, 5)
	return p
}

// responseOf returns the body of a response with one partition.
func responseOf(v int16, records []byte) []byte {
	be := binary.BigEndian
	b := make([]byte, 4) // throttle
	if v >= 7 {
		b = append(b, 0, 0, 0, 0, 0, 0) // error code, session
	}

	b = be.AppendUint32(b, 1)
	b = append(be.AppendUint16(b, 1), 't')
	b = be.AppendUint32(b, 1)
	b = be.AppendUint32(b, 2) // partition
	b = be.AppendUint16(b, 3) // error code
	b = be.AppendUint64(b, 40)
	b = be.AppendUint64(b, 30)
	if v >= 5 {
		b = be.AppendUint64(b, 4)
	}

	b = be.AppendUint32(b, 1)
	b = be.AppendUint64(b, 8)
	b = be.AppendUint64(b, 9)
	if v >= 11 {
		b = be.AppendUint32(b, 1)
	}

	return append(be.AppendUint32(b, uint32(len(records))), records...)
}

// responseWithIDs returns the body of a response in version 13 with one partition. Each part of it has a tagged field.
func responseWithIDs(records []byte) []byte {
	be := binary.BigEndian
	tags := []byte{1, 0, 2, 7, 7} // one field with number 0 and two bytes
	b := be.AppendUint32(bytes.Clone(tags), 1000)
	b = append(b, 0, 0, 0, 0, 0, 0) // error code, session
	b = append(b, 2)                // one topic
	b = append(append(b, make([]byte, 15)...), 't')
	b = be.AppendUint32(append(b, 2), 2) // one partition
	b = be.AppendUint16(b, 3)            // error code
	b = be.AppendUint64(be.AppendUint64(be.AppendUint64(b, 40), 30), 4)
	b = be.AppendUint64(be.AppendUint64(append(b, 2), 8), 9) // one aborted transaction
	b = be.AppendUint32(append(b, tags...), 1)
	b = append(binary.AppendUvarint(b, uint64(len(records)+1)), records...)
	b = append(append(b, tags...), tags...) // of the partition and of the topic
	return append(b, tags...)
}

func TestEachVersionOfAResponseIsRead(t *testing.T) {
	t.Parallel()
	records := twoRecords(t, "none")
	for v := int16(4); v <= 11; v++ {
		want := fetched.Partition{
			TopicPartition: record.TopicPartition{Topic: "t", Partition: 2}, Code: 3, High: 40, Stable: 30,
			Aborted: []fetched.Aborted{{Producer: 8, First: 9}}, Replica: -1, Set: records,
		}
		if v >= 11 {
			want.Replica = 1
		}
		body := responseOf(v, records)
		got, err := fetched.Parse(body, v)
		if err != nil {
			t.Fatal(v, err)
		}
		if d := cmp.Diff([]fetched.Partition{want}, got.Partitions); d != "" {
			t.Error(v, d)
		}
		if _, err := fetched.Parse(body[:len(body)-1], v); err == nil {
			t.Errorf("version %d: a response that was cut off is no error", v)
		}
		framed := append(binary.BigEndian.AppendUint64(nil, uint64(len(body)+4)<<32|1), body...)
		if m, err := fetched.Read(bytes.NewReader(framed), v, 1); err != nil || cmp.Diff(got, m) != "" {
			t.Errorf("version %d over the wire: %v, %v", v, m, err)
		}
		if _, err := fetched.Read(bytes.NewReader(framed), v, 2); err == nil {
			t.Errorf("version %d: the response to another request is no error", v)
		}
	}

	want := fetched.Partition{
		TopicPartition: record.TopicPartition{Topic: "00000000000000000000000000000074", Partition: 2}, Code: 3, High: 40, Stable: 30,
		Aborted: []fetched.Aborted{{Producer: 8, First: 9}}, Replica: 1, Set: records,
	}
	body := responseWithIDs(records)
	got, err := fetched.Parse(body, 13)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(&fetched.Response{Throttle: time.Second, Partitions: []fetched.Partition{want}}, got); d != "" {
		t.Error(d)
	}
	for n := range body {
		if _, err := fetched.Parse(body[:n], 13); err == nil {
			t.Errorf("a response that was cut off after %d of %d bytes is no error", n, len(body))
		}
	}

	for _, v := range []int16{3, 12} {
		if _, err := fetched.Parse(responseOf(11, nil), v); err == nil {
			t.Errorf("version %d is no error", v)
		}
	}
}

func TestRecordsOfEachCodecAreRead(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		var keys, headers []string
		cutOff := twoRecords(t, codec)[:70]

		for b, err := range fetched.Batches(append(twoRecords(t, codec), cutOff...)) {
			if err != nil || b.Base != 5 || b.End != 7 || b.Producer != 7 || b.Epoch != 3 {
				t.Fatalf("%s: %+v, %v", codec, b, err)
			}

			list, err := b.Stream()
			if err != nil {
				t.Fatal(codec, err)
			}

			var x fetched.Record
			for {
				more, err := list.Next(&x, 0)
				if err != nil {
					t.Fatal(codec, err)
				}
				if !more {
					break
				}

				if x.Offset != 5+int64(len(keys)) || x.TimeMS != 1000 {
					t.Errorf("%s: %+v", codec, x)
				}
				keys = append(keys, string(x.Key))
				headers = append(headers, string(x.Headers[0].Value))
			}
		}

		want := []string{"a", "b"}
		if d := cmp.Diff(want, keys) + cmp.Diff(want, headers); d != "" {
			t.Error(codec, d)
		}
	}
}

func TestCorruptBatchesAreErrors(t *testing.T) {
	t.Parallel()
	good, bad := twoRecords(t, "none"), twoRecords(t, "none")
	bad[len(bad)-1] ^= 1
	// This batch claims to have no bytes.
	short := make([]byte, 20)

	for name, tail := range map[string][]byte{"checksum": bad, "length": short} {
		n, last := 0, error(nil)
		for b, err := range fetched.Batches(append(bytes.Clone(good), tail...)) {
			if n++; err == nil && b.Base != 5 {
				t.Errorf("%s: %+v", name, b)
			}
			last = err
		}

		if n != 2 || !errors.Is(last, fetched.ErrCorrupt) {
			t.Errorf("%s: %d batches, %v", name, n, last)
		}
	}
}

func TestNoBytesMakeItPanic(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		p := twoRecords(t, rapid.SampledFrom([]string{"none", "gzip", "snappy", "lz4", "zstd"}).Draw(rt, "codec"))

		for range rapid.IntRange(1, 6).Draw(rt, "changes") {
			p[rapid.IntRange(0, len(p)-1).Draw(rt, "at")] = rapid.Byte().Draw(rt, "to")
		}
		if rapid.Bool().Draw(rt, "sealed") {
			binary.BigEndian.PutUint32(p[17:], crc32.Checksum(p[21:], crc32.MakeTable(crc32.Castagnoli)))
		}

		for b, err := range fetched.Batches(p) {
			if err != nil {
				continue
			}
			list, err := b.Stream()
			if err != nil {
				continue
			}

			var x fetched.Record
			for more := true; more; {
				if more, err = list.Next(&x, 0); err != nil {
					break
				}
			}
			list.Close()
		}
		_, _ = fetched.Parse(p, int16(rapid.IntRange(4, 13).Draw(rt, "version")))
	})
}
