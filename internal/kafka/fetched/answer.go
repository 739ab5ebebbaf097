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
	d := decoder{b: body}
	d.skip(4) // throttle
	if v >= 7 {
		if code := d.i16(); code != 0 {
			return nil, kafka.Error(code)
		}
		d.skip(4) // session
	}
	out := &Answer{}
	for range d.count(2 + 4) {
		topic := string(d.bytes(int(d.i16())))
		for range d.count(4 + 2 + 8 + 8 + 4 + 4) {
			p := Partition{TopicPartition: record.TopicPartition{Topic: topic, Partition: d.i32()}, Start: -1}
			p.Code, p.High, p.Stable = d.i16(), d.i64(), d.i64()
			if v >= 5 {
				p.Start = d.i64()
			}
			for range d.count(16) {
				p.Aborted = append(p.Aborted, Aborted{Producer: d.i64(), First: d.i64()})
			}
			if v >= 11 {
				d.skip(4) // preferred replica
			}
			p.Set = d.bytes(int(d.i32()))
			out.Partitions = append(out.Partitions, p)
		}
	}
	if d.bad {
		return nil, errors.New("reading the answer to a fetch: it ends too early")
	}
	return out, nil
}

// decoder walks a buffer; reading past its end sets bad and yields zeros.
type decoder struct {
	b   []byte
	bad bool
}

// bytes are the next n; nil for none or a negative number, as null has.
func (d *decoder) bytes(n int) []byte {
	if n <= 0 {
		return nil
	}
	if n > len(d.b) {
		d.b, d.bad = nil, true
		return nil
	}
	x := d.b[:n:n]
	d.b = d.b[n:]
	return x
}

func (d *decoder) skip(n int) { d.bytes(n) }

func (d *decoder) i16() int16 {
	if x := d.bytes(2); x != nil {
		return int16(binary.BigEndian.Uint16(x))
	}
	return 0
}

func (d *decoder) i32() int32 {
	if x := d.bytes(4); x != nil {
		return int32(binary.BigEndian.Uint32(x))
	}
	return 0
}

func (d *decoder) i64() int64 {
	if x := d.bytes(8); x != nil {
		return int64(binary.BigEndian.Uint64(x))
	}
	return 0
}

// count is the length of an array whose elements take at least that many bytes each; a null array has none.
func (d *decoder) count(least int) int {
	n := int(d.i32())
	if n > len(d.b)/least {
		d.b, d.bad = nil, true
		return 0
	}
	return max(0, n)
}

// varint is a zigzag varint.
func (d *decoder) varint() int64 {
	x, n := binary.Varint(d.b)
	if n <= 0 {
		d.b, d.bad = nil, true
		return 0
	}
	d.b = d.b[n:]
	return x
}

// field is bytes with their length before them; nil for null alone.
func (d *decoder) field() []byte {
	n := d.varint()
	switch {
	case n < 0:
		return nil
	case n == 0:
		return []byte{}
	}
	return d.bytes(int(min(n, int64(len(d.b))+1)))
}
