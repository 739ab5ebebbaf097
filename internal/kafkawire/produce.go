package kafkawire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/segmentio/kafka-go/protocol"

	"github.com/outrelay/outrelay/internal/contract/keyhash"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/kafkawire/batch"
	"github.com/outrelay/outrelay/internal/kafkawire/response"
)

// MaxRequestBytes is the size of the largest produce request of the relay, before compression, unless one record is larger.
const MaxRequestBytes = 4 << 20

var errUnknownBroker = errors.New("the broker is not in the cluster's metadata")

// UnknownBrokerError returns the error of a connection to a broker that is not in the metadata.
func UnknownBrokerError(id int32) error {
	return &connectError{addr: fmt.Sprintf("broker %d", id), stage: stageTCP, err: errUnknownBroker}
}

// PartitionBatch is the sealed batch of one partition in a produce request.
type PartitionBatch struct {
	Topic     string
	Partition int32
	Batch     *batch.Builder
}

// ProduceResult is the response for one partition of a request.
type ProduceResult struct {
	Code       Code
	BaseOffset int64 // offset of the first record
	AppendedMS int64 // the time in the log, where the broker sets it or repeats an earlier response; otherwise -1
	Present    bool  // the partition was in the response
	BadRecords []int // indexes of the records at fault (KIP-467)
	Message    string
}

// Err returns the error of the response, with the words of the broker; nil for a batch that was appended.
func (r *ProduceResult) Err() error { return newRejection(r.Code, r.Message) }

// Producer writes produce requests and reads their responses, in versions 3 to 8. The request is the same
// in all of them. It is encoded here, straight from the batches, because kafka-go's encoder would copy
// each batch once more.
type Producer struct {
	head        []byte
	splits      []int // where the batches go between the bytes of head
	pieces      net.Buffers
	body        []byte
	correlation int32
	copyBuf     []byte
	throttle    time.Duration
}

// Throttle returns how long the client should not use the broker after the last response, because of a quota (KIP-219).
func (w *Producer) Throttle() time.Duration { return w.throttle }

const (
	minProduce, maxProduce = 3, 8
	// clientThrottleProduce is the first version after whose response the client waits. Before, the broker did.
	clientThrottleProduce = 6
	// copyLimit is the size up to which pieces are copied together and written at once. For many small
	// batches, a system call for each, and with TLS a record for each, costs more than the copy.
	copyLimit = 64 << 10
	// copyPiece is the size from which a piece of a larger request is not copied: that of a TLS record, so a copy would
	// save no system call.
	copyPiece = 16 << 10
	// ResponseSlack is the time that a response may take beyond the time limit of the broker.
	ResponseSlack = 500 * time.Millisecond
	maxResponse   = 64 << 20
	keepResponse  = 1 << 20 // a larger buffer is not kept for the next response
)

// Produce sends batches, which are grouped by topic, over link, and appends a result for each
// of them to dst, in the same order. It blocks until the response has arrived, and fails if no byte has moved for timeout
// and ResponseSlack. With ErrIncomplete, the broker has appended nothing.
func (w *Producer) Produce(
	link *Link, timeout time.Duration, batches []PartitionBatch, dst []ProduceResult,
) ([]ProduceResult, error) {
	version := link.versions[protocol.Produce]
	if version < minProduce || version > maxProduce {
		return dst, fmt.Errorf("broker does not support Produce in versions %d to %d: Kafka 0.11 or later is needed",
			minProduce, maxProduce)
	}

	w.throttle = 0
	// The broker may hold the request for the whole timeout, and the response needs time as well.
	link.wire.setIdle(timeout + ResponseSlack)
	total := w.encodeRequest(version, link.clientID, timeout, batches)
	if err := w.writeRequest(link, total); err != nil {
		return dst, err
	}
	body, err := response.Read(link.reader, w.body, w.correlation, maxResponse)
	if err != nil {
		return dst, err
	}
	if w.body = body; cap(body) > keepResponse {
		w.body = nil
	}

	link.lastUsed = time.Now()
	for range batches {
		dst = append(dst, ProduceResult{})
	}
	return dst, w.decodeResponse(version, body, batches, dst[len(dst)-len(batches):])
}

// encodeRequest fills w.pieces with the request: the pieces of the sealed batches, and of w.head between them. It returns
// the length of the request.
func (w *Producer) encodeRequest(version int16, clientID string, timeout time.Duration, batches []PartitionBatch) (total int) {
	be := binary.BigEndian
	w.correlation++

	// The length and the API key, 0 for Produce. The length is filled in at the end.
	head := append(w.head[:0], 0, 0, 0, 0, 0, 0)
	head = be.AppendUint16(head, uint16(version))
	head = be.AppendUint32(head, uint32(w.correlation))
	head = appendString(head, clientID)
	// No transactional id, and acks of all in-sync replicas.
	head = append(head, 0xff, 0xff, 0xff, 0xff)
	head = be.AppendUint32(head, uint32(timeout.Milliseconds()))

	// The counts of topics and partitions are filled in once the batches have been counted.
	topicCountAt := len(head)
	head = be.AppendUint32(head, 0)
	topics, partitionCountAt := 0, 0
	w.splits = w.splits[:0]
	for i := range batches {
		batch := &batches[i]
		if i == 0 || batches[i-1].Topic != batch.Topic {
			head = appendString(head, batch.Topic)
			topics++
			partitionCountAt = len(head)
			head = be.AppendUint32(head, 0)
		}
		be.PutUint32(head[partitionCountAt:], be.Uint32(head[partitionCountAt:])+1)
		head = be.AppendUint32(head, uint32(batch.Partition))
		w.splits = append(w.splits, len(head))
	}
	be.PutUint32(head[topicCountAt:], uint32(topics))
	w.head = head

	w.pieces = w.pieces[:0]
	from := 0
	for i := range batches {
		w.pieces = batches[i].Batch.AppendPieces(append(w.pieces, head[from:w.splits[i]]))
		from = w.splits[i]
	}

	for _, piece := range w.pieces {
		total += len(piece)
	}
	be.PutUint32(head, uint32(total-4))
	return total
}

// writeRequest writes w.pieces, which have total bytes, to link. The error is ErrIncomplete if the system has not taken all bytes.
func (w *Producer) writeRequest(link *Link, total int) error {
	written, err := w.writePieces(link, total)
	if err != nil && written < total {
		return fmt.Errorf("%w: %w", ErrIncomplete, err)
	}
	return err
}

// writePieces writes w.pieces, which have total bytes, to link. Many bytes on a plain connection need one gathering system
// call. Otherwise small pieces are copied together.
func (w *Producer) writePieces(link *Link, total int) (written int, err error) {
	pieces := w.pieces
	if link.conn == net.Conn(link.wire) && total > copyLimit {
		// WriteTo consumes its receiver.
		consumed := pieces
		n, err := link.wire.writeBuffers(&consumed)
		clear(pieces)
		return int(n), err
	}

	w.copyBuf = w.copyBuf[:0]
	write := func(data []byte) error {
		n, err := link.conn.Write(data)
		written += n
		return err
	}
	flush := func() error {
		if len(w.copyBuf) == 0 {
			return nil
		}
		err := write(w.copyBuf)
		w.copyBuf = w.copyBuf[:0]
		return err
	}
	for _, b := range pieces {
		alone := total > copyLimit && len(b) >= copyPiece
		if alone || len(w.copyBuf)+len(b) > copyLimit {
			if err := flush(); err != nil {
				return written, err
			}
		}
		if alone {
			if err := write(b); err != nil {
				return written, err
			}
			continue
		}
		w.copyBuf = append(w.copyBuf, b...)
	}
	// Otherwise the array would keep the chunks in memory until the next request.
	clear(pieces)
	err = flush()
	return written, err
}

// decodeResponse fills results, which are in the order of batches.
func (w *Producer) decodeResponse(version int16, body []byte, batches []PartitionBatch, results []ProduceResult) error {
	decoder := response.Decoder{B: body}
	next := 0
	for range decoder.Count(1) {
		topic := decoder.Bytes(int(decoder.Int16()))
		for range decoder.Count(1) {
			id := decoder.Int32()
			result := ProduceResult{Present: true, Code: Code(decoder.Int16()), BaseOffset: decoder.Int64(), AppendedMS: decoder.Int64()}
			if version >= 5 {
				decoder.Skip(8) // start of the log
			}

			if version >= 8 {
				for range decoder.Count(1) {
					result.BadRecords = append(result.BadRecords, int(decoder.Int32()))
					if message := decoder.Bytes(int(decoder.Int16())); result.Message == "" {
						result.Message = string(message)
					}
				}
				if message := decoder.Bytes(int(decoder.Int16())); result.Message == "" {
					result.Message = string(message)
				}
			}

			// A partition that is not in the request is ignored.
			if i := findBatch(batches, next, topic, id); i >= 0 {
				results[i] = result
				next = i + 1
			}
		}
	}
	throttle := time.Duration(decoder.Int32()) * time.Millisecond
	if decoder.Bad {
		return errors.New("response ends too early")
	}
	if version >= clientThrottleProduce {
		w.throttle = throttle
	}
	return nil
}

// findBatch returns the index of a partition in batches, or -1. It looks at the expected index first:
// brokers respond in the order of the request.
func findBatch(batches []PartitionBatch, expected int, topic []byte, id int32) int {
	matches := func(i int) bool {
		return batches[i].Partition == id && batches[i].Topic == string(topic)
	}
	if expected < len(batches) && matches(expected) {
		return expected
	}

	for i := range batches {
		if matches(i) {
			return i
		}
	}
	return -1
}

func appendString(dst []byte, text string) []byte {
	dst = binary.BigEndian.AppendUint16(dst, uint16(len(text)))
	return append(dst, text...)
}

// Publish writes records to one partition of the broker at addr, which leads it, as one batch with acks
// of all in-sync replicas. If the outcome is unknown and the caller sends the records again, they may be
// in the partition twice.
func (c *Client) Publish(
	ctx context.Context, addr string, tp record.TopicPartition, list []record.Record, timeout time.Duration,
) error {
	var builder batch.Builder
	builder.Reset(new(batch.Chunks))
	for i := range list {
		builder.Append(&list[i])
	}
	// The producer id -1 stands for a producer that is not idempotent.
	err := builder.Seal(batch.None(), batch.Producer{ID: -1, Epoch: -1}, -1)
	if err != nil {
		return err
	}

	var producer Producer
	var results []ProduceResult
	batches := []PartitionBatch{{tp.Topic, tp.Partition, &builder}}
	err = c.useLink(ctx, addr, timeout+ResponseSlack, func(link *Link) error {
		results, err = producer.Produce(link, timeout, batches, results[:0])
		return err
	})
	if err != nil {
		return err
	}

	if !results[0].Present {
		return errors.New("the response leaves the partition out")
	}
	return results[0].Err()
}

// ChoosePartition returns the partition that a key hashes to, as in Kafka's Java client.
func ChoosePartition(key []byte, partitions int32) int32 {
	return int32(keyhash.Murmur2(key)&0x7fffffff) % partitions
}
