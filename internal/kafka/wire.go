package kafka

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/outrelay/outrelay/internal/kafka/reply"
)

var errUnknownBroker = errors.New("the broker is not in the cluster's metadata")

// result is the response for one partition of a request.
type result struct {
	code       kafkago.Error
	baseOffset int64 // offset of the first record
	present    bool  // the partition was in the response
	badRecords []int // indexes of the records at fault (KIP-467)
	message    string
}

// wire writes produce requests and reads their responses, in versions 3 to 8. The request is the same
// in all of them. It is encoded here, straight from the batches, because kafka-go's encoder would copy
// each batch once more.
type wire struct {
	head        []byte
	splits      []int // where the batches go between the bytes of head
	pieces      net.Buffers
	body        []byte
	correlation int32
	copyBuf     []byte
}

const (
	minProduce, maxProduce = 3, 8
	// copyLimit is the size up to which pieces are copied together and written at once. For many small
	// batches, a system call for each, and with TLS a record for each, costs more than the copy.
	copyLimit = 64 << 10
	// responseSlack is the time that a response may take beyond the time limit of the broker.
	responseSlack = 500 * time.Millisecond
	maxResponse   = 64 << 20
)

// produce sends the sealed heads in flights, which are grouped by topic, and appends a result for each
// of them to dst, in the same order. It blocks until the response has arrived, at most for
// RequestTimeout and responseSlack.
func (w *wire) produce(k *link, cfg Config, flights []flight, dst []result) ([]result, error) {
	version := k.versions[protocol.Produce]
	if version < minProduce || version > maxProduce {
		return dst, fmt.Errorf("broker does not support Produce in versions %d to %d: Kafka 0.11 or later is needed",
			minProduce, maxProduce)
	}

	_ = k.conn.SetDeadline(time.Now().Add(cfg.RequestTimeout + responseSlack))
	w.encodeRequest(version, cfg, flights)
	if err := w.writeRequest(k.conn); err != nil {
		return dst, err
	}
	body, err := w.readResponse(k.reader)
	if err != nil {
		return dst, err
	}

	for range flights {
		dst = append(dst, result{})
	}
	return dst, w.decodeResponse(version, body, flights, dst[len(dst)-len(flights):])
}

// encodeRequest fills w.pieces with the request: the sealed batches, and pieces of w.head between
// them.
func (w *wire) encodeRequest(version int16, cfg Config, flights []flight) {
	be := binary.BigEndian
	w.correlation++

	// The length and the API key, 0 for Produce. The length is filled in at the end.
	h := append(w.head[:0], 0, 0, 0, 0, 0, 0)
	h = be.AppendUint16(h, uint16(version))
	h = be.AppendUint32(h, uint32(w.correlation))
	h = appendString(h, cfg.ClientID)
	h = append(h, 0xff, 0xff, 0xff, 0xff) // no transactional id; acks of all in-sync replicas
	h = be.AppendUint32(h, uint32(cfg.RequestTimeout.Milliseconds()))

	topicCountAt := len(h)
	h = be.AppendUint32(h, 0)
	topics, partitionCountAt, payload := 0, 0, 0
	w.splits = w.splits[:0]
	for i, f := range flights {
		if i == 0 || flights[i-1].partition.topic != f.partition.topic {
			h = appendString(h, f.partition.topic.name)
			topics++
			partitionCountAt = len(h)
			h = be.AppendUint32(h, 0)
		}
		be.PutUint32(h[partitionCountAt:], be.Uint32(h[partitionCountAt:])+1)
		h = be.AppendUint32(h, uint32(f.partition.tp.Partition))
		w.splits = append(w.splits, len(h))
		payload += len(f.batch.sealed)
	}
	be.PutUint32(h[topicCountAt:], uint32(topics))
	be.PutUint32(h, uint32(len(h)-4+payload))
	w.head = h

	w.pieces = w.pieces[:0]
	from := 0
	for i, f := range flights {
		w.pieces = append(w.pieces, h[from:w.splits[i]], f.batch.sealed)
		from = w.splits[i]
	}
}

// writeRequest writes w.pieces to conn. Many bytes on a plain connection need one gathering system
// call. Otherwise small pieces are copied together.
func (w *wire) writeRequest(conn net.Conn) error {
	pieces := w.pieces
	total := 0
	for _, b := range pieces {
		total += len(b)
	}

	if tcp, ok := conn.(*net.TCPConn); ok && total > copyLimit {
		consumed := pieces // WriteTo consumes its receiver
		_, err := consumed.WriteTo(tcp)
		clear(pieces)
		return err
	}

	w.copyBuf = w.copyBuf[:0]
	flush := func() error {
		if len(w.copyBuf) == 0 {
			return nil
		}
		_, err := conn.Write(w.copyBuf)
		w.copyBuf = w.copyBuf[:0]
		return err
	}
	for _, b := range pieces {
		if len(w.copyBuf)+len(b) > copyLimit {
			if err := flush(); err != nil {
				return err
			}
		}
		if len(b) > copyLimit {
			if _, err := conn.Write(b); err != nil {
				return err
			}
			continue
		}
		w.copyBuf = append(w.copyBuf, b...)
	}
	clear(pieces)
	return flush()
}

// readResponse reads the response to the last request, and returns its bytes after the correlation
// id. They are valid until the next call.
func (w *wire) readResponse(r io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(size[:]))
	if n < 4 || n > maxResponse {
		return nil, fmt.Errorf("response of %d bytes: the listener is not a Kafka broker", n)
	}

	body, err := reply.ReadBody(r, w.body, n)
	if err != nil {
		return nil, err
	}
	w.body = body
	if got := int32(binary.BigEndian.Uint32(body)); got != w.correlation {
		return nil, fmt.Errorf("response to request %d instead of %d", got, w.correlation)
	}
	return body[4:], nil
}

// decodeResponse fills results, which are in the order of flights.
func (w *wire) decodeResponse(version int16, body []byte, flights []flight, results []result) error {
	d := reply.Decoder{B: body}
	next := 0
	for range d.Count(1) {
		topic := d.Bytes(int(d.Int16()))
		for range d.Count(1) {
			id := d.Int32()
			r := result{present: true, code: kafkago.Error(d.Int16()), baseOffset: d.Int64()}
			d.Skip(8) // time of appending
			if version >= 5 {
				d.Skip(8) // start of the log
			}

			if version >= 8 {
				for range d.Count(1) {
					r.badRecords = append(r.badRecords, int(d.Int32()))
					if m := d.Bytes(int(d.Int16())); r.message == "" {
						r.message = string(m)
					}
				}
				if m := d.Bytes(int(d.Int16())); r.message == "" {
					r.message = string(m)
				}
			}

			if i := findFlight(flights, next, topic, id); i >= 0 {
				results[i] = r
				next = i + 1
			}
		}
	}
	if d.Bad {
		return errors.New("response ends too early")
	}
	return nil
}

// findFlight returns the index of a partition in flights, or -1. It looks at the expected index first:
// brokers respond in the order of the request.
func findFlight(flights []flight, expected int, topic []byte, id int32) int {
	matches := func(i int) bool {
		tp := &flights[i].partition.tp
		return tp.Partition == id && tp.Topic == string(topic)
	}
	if expected < len(flights) && matches(expected) {
		return expected
	}

	for i := range flights {
		if matches(i) {
			return i
		}
	}
	return -1
}

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}
