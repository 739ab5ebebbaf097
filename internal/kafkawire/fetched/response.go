// Package fetched decodes the response of a broker to a Fetch, down to the records. The decoder of
// kafka-go does not return the last offset of a batch, without which a compacted log cannot be read
// to its end. It also does not identify the records of aborted transactions.
//
// Sets alias the response. The records of a Stream have their own memory. No bytes that a broker may send
// make this package panic or loop without end: invalid bytes cause an error.
//
// Order: batches and records have the order of the log. Blocking: never; the bytes have arrived. Cost: one pass
// over the batch for its checksum, and its decompression. A Stream decompresses record by record, so a batch that
// expands without bound costs no more memory than one record.
package fetched

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// Response is the response of a broker to a Fetch.
type Response struct {
	Partitions []Partition
	// Throttle is how long the client should not fetch from the broker, because of a quota (KIP-219).
	Throttle time.Duration
}

// WithIDs is the first version in which topics have an id instead of a name. [Parse] decodes no later one.
const WithIDs = 13

// clientThrottle is the first version after whose response the client waits. Before, the broker did.
const clientThrottle = 8

// Partition is the part of one partition in a response.
type Partition struct {
	record.TopicPartition // from version 13 on, the topic is the id in hexadecimal

	Code    int16 // error code; 0 is none
	High    int64 // high watermark
	Stable  int64 // last stable offset
	Aborted []Aborted
	// Replica is the broker that the leader names for the rack of the client, with no batches; -1 for none.
	Replica int32
	Set     []byte // batches; the last batch may be incomplete
}

// Aborted is an aborted transaction: the records of Producer from the offset First up to its marker.
type Aborted struct{ Producer, First int64 }

// maxResponse is far above the size that is requested. A broker sends a single batch whole, regardless of its
// size.
const maxResponse = 512 << 20

// Read reads the response to the request with that correlation id.
func Read(reader io.Reader, version int16, correlation int32) (*Response, error) {
	body, err := response.Read(reader, nil, correlation, maxResponse)
	if err != nil {
		return nil, fmt.Errorf("reading the response to a fetch: %w", err)
	}
	return Parse(body, version)
}

// Parse decodes a response of a version from 4 to 11 or 13. kafka-go negotiates one of the versions from 4 to 11 with every
// broker that supports transactions.
func Parse(body []byte, version int16) (*Response, error) {
	if version == WithIDs {
		return parseWithIDs(body)
	}
	if version < 4 || version > 11 {
		return nil, fmt.Errorf("fetch version %d: the broker must support 4 to 11 (Kafka 0.11 or later)", version)
	}

	decoder := response.Decoder{B: body}
	throttle := time.Duration(decoder.Int32()) * time.Millisecond
	if version >= 7 {
		if code := decoder.Int16(); code != 0 {
			return nil, kafka.Error(code)
		}
		decoder.Skip(4) // session
	}

	// The argument of Count is the least size of an element in the oldest version.
	out := &Response{}
	if version >= clientThrottle {
		out.Throttle = throttle
	}
	for range decoder.Count(2 + 4) {
		topic := string(decoder.Bytes(int(decoder.Int16())))
		for range decoder.Count(4 + 2 + 8 + 8 + 4 + 4) {
			partition := Partition{TopicPartition: record.TopicPartition{Topic: topic, Partition: decoder.Int32()}, Replica: -1}
			partition.Code, partition.High, partition.Stable = decoder.Int16(), decoder.Int64(), decoder.Int64()
			if version >= 5 {
				decoder.Int64() // the start of the log
			}
			for range decoder.Count(16) {
				partition.Aborted = append(partition.Aborted, Aborted{Producer: decoder.Int64(), First: decoder.Int64()})
			}
			if version >= 11 {
				partition.Replica = decoder.Int32()
			}
			partition.Set = decoder.Bytes(int(decoder.Int32()))
			out.Partitions = append(out.Partitions, partition)
		}
	}
	if decoder.Bad {
		return nil, errors.New("reading the response to a fetch: it ends too early")
	}
	return out, nil
}

// parseWithIDs decodes a response in version WithIDs.
func parseWithIDs(body []byte) (*Response, error) {
	decoder := response.Decoder{B: body}
	decoder.SkipTags() // of the header
	out := &Response{Throttle: time.Duration(decoder.Int32()) * time.Millisecond}
	if code := decoder.Int16(); code != 0 {
		return nil, kafka.Error(code)
	}
	decoder.Skip(4) // session

	// The loops end at the end of the bytes, because each element has some.
	for n := decoder.CompactLength(); n > 0 && !decoder.Bad; n-- {
		topic := hex.EncodeToString(decoder.Bytes(16))
		for n := decoder.CompactLength(); n > 0 && !decoder.Bad; n-- {
			partition := Partition{TopicPartition: record.TopicPartition{Topic: topic, Partition: decoder.Int32()}}
			partition.Code, partition.High, partition.Stable = decoder.Int16(), decoder.Int64(), decoder.Int64()
			decoder.Skip(8) // the start of the log
			for n := decoder.CompactLength(); n > 0 && !decoder.Bad; n-- {
				partition.Aborted = append(partition.Aborted, Aborted{Producer: decoder.Int64(), First: decoder.Int64()})
				decoder.SkipTags()
			}
			partition.Replica = decoder.Int32()
			partition.Set = decoder.CompactBytes()
			decoder.SkipTags()
			out.Partitions = append(out.Partitions, partition)
		}
		decoder.SkipTags()
	}
	decoder.SkipTags()
	if decoder.Bad {
		return nil, errors.New("reading the response to a fetch: it ends too early")
	}
	return out, nil
}
