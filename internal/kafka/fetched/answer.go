// Package fetched takes apart what a broker answers to a Fetch, down to the records. kafka-go's decoder loses a batch's last
// offset, without which a compacted log cannot be walked, and does not tell the records of aborted transactions.
//
// Sets alias the answer, and so do the Records of a batch, or what the batch was decompressed to; those of a Stream have memory
// of their own. No bytes that a
// broker may send make it panic or run on; what is not a batch is an error.
package fetched

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/outrelay/outrelay/internal/kafka/reply"
	"github.com/outrelay/outrelay/internal/record"
)

// Answer is what a broker answers to a Fetch.
type Answer struct{ Partitions []Partition }

// Partition is the share of one partition.
type Partition struct {
	record.TopicPartition

	Code    int16 // error code; 0 is none
	High    int64 // high watermark
	Stable  int64 // last stable offset
	Start   int64 // of the log; -1 unknown
	Aborted []Aborted
	Set     []byte // whole batches, but for the last, which may be cut off
}

// Aborted is a transaction that was aborted: the records of a producer, from an offset on, up to its marker.
type Aborted struct{ Producer, First int64 }

// ApiKey makes it a message of kafka-go.
func (*Answer) ApiKey() protocol.ApiKey { return protocol.Fetch } //nolint:revive,staticcheck // the name is kafka-go's

// maxAnswer is far above what is asked for: a single batch is sent whole whatever its size.
const maxAnswer = 512 << 20

// Read reads an answer with its length and correlation id before it. Its signature is that of kafka-go's raw exchanges.
func Read(r io.Reader, version int16) (protocol.Message, error) {
	var head [8]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, fmt.Errorf("reading the answer to a fetch: %w", err)
	}
	size := int(int32(binary.BigEndian.Uint32(head[:]))) - 4
	if size < 0 || size > maxAnswer {
		return nil, fmt.Errorf("reading the answer to a fetch: impossible size %d", size)
	}
	body, err := reply.ReadBody(r, nil, size)
	if err != nil {
		return nil, fmt.Errorf("reading the answer to a fetch: %w", err)
	}
	a, err := Parse(body, version)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Parse decodes versions 4 to 11, the ones that kafka-go negotiates with brokers that know transactions.
func Parse(body []byte, v int16) (*Answer, error) {
	if v < 4 || v > 11 {
		return nil, fmt.Errorf("fetch version %d: the broker must speak 4 to 11 (Kafka 0.11 or later)", v)
	}
	d := reply.Decoder{B: body}
	d.Skip(4) // throttle
	if v >= 7 {
		if code := d.Int16(); code != 0 {
			return nil, kafka.Error(code)
		}
		d.Skip(4) // session
	}
	out := &Answer{}
	for range d.Count(2 + 4) {
		topic := string(d.Bytes(int(d.Int16())))
		for range d.Count(4 + 2 + 8 + 8 + 4 + 4) {
			p := Partition{TopicPartition: record.TopicPartition{Topic: topic, Partition: d.Int32()}, Start: -1}
			p.Code, p.High, p.Stable = d.Int16(), d.Int64(), d.Int64()
			if v >= 5 {
				p.Start = d.Int64()
			}
			for range d.Count(16) {
				p.Aborted = append(p.Aborted, Aborted{Producer: d.Int64(), First: d.Int64()})
			}
			if v >= 11 {
				d.Skip(4) // preferred replica
			}
			p.Set = d.Bytes(int(d.Int32()))
			out.Partitions = append(out.Partitions, p)
		}
	}
	if d.Bad {
		return nil, errors.New("reading the answer to a fetch: it ends too early")
	}
	return out, nil
}
