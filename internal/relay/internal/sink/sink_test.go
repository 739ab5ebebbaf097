package sink

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

// recordsOfEveryShape returns n records with and without keys, values and headers.
func recordsOfEveryShape(topic string, n int) []record.Record {
	var list []record.Record
	for i := range n {
		r := newRecord(topic, fmt.Sprint("key-", i%17), fmt.Sprint("value-", i))
		r.TimeMS = 1_700_000_000_000 + int64(i*7%100)
		switch i % 5 {
		case 1:
			r.Key = nil
		case 2:
			r.Value = nil
		case 3:
			r.Key, r.Value = []byte{}, []byte{}
		case 4:
			r.Headers = append(r.Headers,
				record.Header{Key: []byte("trace"), Value: []byte{0, 1, 2}},
				record.Header{Key: []byte("trace"), Value: nil},
				record.Header{Key: []byte("empty"), Value: []byte{}})
		}
		list = append(list, r)
	}

	return list
}

// TestEveryCodecReadsBackIdentically: another client reads each record unchanged, at the offset of
// its ack.
func TestEveryCodecReadsBackIdentically(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		t.Run(codec, func(t *testing.T) {
			t.Parallel()
			topic := stacktest.Topic(t, 3)
			r := openSink(t, sinkOptions{cfg: testConfig{Compression: codec, MaxBatchBytes: 4000}})
			sent := recordsOfEveryShape(topic, 500)
			for i := range sent {
				r.send(t, sent[i])
				if i%64 == 0 {
					r.Flush()
				}
			}
			r.Flush()
			r.acks.waitResolved(len(sent))

			log := map[place]*kgo.Record{}
			for _, list := range readTopic(t, stacktest.Brokers(t), topic) {
				for _, g := range list {
					log[place{record.TopicPartition{Topic: topic, Partition: g.Partition}, g.Offset}] = g
				}
			}
			if len(log) != len(sent) {
				t.Fatalf("%d records in the topic, want %d", len(log), len(sent))
			}
			for i := range sent {
				requireSameRecord(t, &sent[i], log[r.acks.acked[record.Ticket(i)]])
			}
		})
	}
}

// requireSameRecord compares a record with the record at the offset of its ack.
func requireSameRecord(t *testing.T, want *record.Record, got *kgo.Record) {
	t.Helper()
	if got == nil {
		t.Fatalf("no record is at the offset of the ack of %q", want.Value)
	}

	eq := bytes.Equal(got.Key, want.Key) && (got.Key == nil) == (want.Key == nil) &&
		bytes.Equal(got.Value, want.Value) && (got.Value == nil) == (want.Value == nil) &&
		got.Timestamp.UnixMilli() == want.TimeMS && len(got.Headers) == len(want.Headers)
	for i := 0; eq && i < len(want.Headers); i++ {
		w, g := want.Headers[i], got.Headers[i]
		eq = g.Key == string(w.Key) && bytes.Equal(g.Value, w.Value) && (g.Value == nil) == (w.Value == nil)
	}

	if !eq {
		t.Fatalf("sent %+v, read %+v", want, got)
	}
}

// N7: a record may be in its topic if the read-back has found it, or has not read its partition.
func TestN07_AnUnreadPartitionMayHoldEveryRecord(t *testing.T) {
	t.Parallel()
	sink, topic := openSuccessor(t, 1)
	sent, other := newRecord(topic, "k", "k/0"), newRecord(topic, "k", "k/other")
	if !sink.MayHold(&sent) || sink.MayHold(&other) {
		t.Errorf("read back: %t, %t", sink.MayHold(&sent), sink.MayHold(&other))
	}

	partition := sink.topics[topic].partitions[0]
	for _, unread := range []*bool{&partition.quarantine, &partition.needsReadBack} {
		*unread = true
		if !sink.MayHold(&other) {
			t.Errorf("quarantine %t, needsReadBack %t", partition.quarantine, partition.needsReadBack)
		}
		*unread = false
	}

	unknown := newRecord("unknown."+topic, "k", "k/0")
	if sink.MayHold(&unknown) {
		t.Error("a topic that no owner has written")
	}
}
