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

var errUnknownBroker = errors.New("the cluster's metadata do not name it")

// result is the answer for one partition of a request.
type result struct {
	code    kafkago.Error
	base    int64 // offset of the first record
	told    bool  // the partition was in the answer
	bad     []int // records at fault, by index (KIP-467)
	message string
}

// wire writes produce requests and reads their answers, in versions 3 to 8: the request is the same in all of them, so it
// is written by hand, straight from the batches, instead of through kafka-go's encoder, which would copy each once more.
type wire struct {
	head  []byte
	at    []int
	bufs  net.Buffers
	body  []byte
	corr  int32
	small []byte
}

const (
	minProduce, maxProduce = 3, 8
	// gather is the size up to which pieces are copied together and written at once: a system call, and with TLS a record,
	// for each of many small batches costs more than the copy.
	gather = 64 << 10
	// answerSlack is what the answer may take beyond the time that the broker was given.
	answerSlack = 500 * time.Millisecond
	maxAnswer   = 64 << 20
)

// produce sends the sealed heads of parts, grouped by topic, and appends a result for each to dst, in their order.
func (w *wire) produce(k *link, cfg Config, parts []flight, dst []result) ([]result, error) {
	version := k.versions[protocol.Produce]
	if version < minProduce || version > maxProduce {
		return dst, fmt.Errorf("the broker speaks no version of Produce between %d and %d: Kafka 0.11 or later is needed", minProduce, maxProduce)
	}
	_ = k.nc.SetDeadline(time.Now().Add(cfg.RequestTimeout + answerSlack))
	w.encode(version, cfg, parts)
	if err := w.write(k.nc); err != nil {
		return dst, err
	}
	body, err := w.read(k.in)
	if err != nil {
		return dst, err
	}
	for range parts {
		dst = append(dst, result{})
	}
	return dst, w.decode(version, body, parts, dst[len(dst)-len(parts):])
}

// encode lays out the request: pieces of head between the sealed batches.
func (w *wire) encode(version int16, cfg Config, parts []flight) {
	be := binary.BigEndian
	w.corr++
	h := append(w.head[:0], 0, 0, 0, 0, 0, 0)
	h = be.AppendUint16(h, uint16(version))
	h = be.AppendUint32(h, uint32(w.corr))
	h = appendString(h, cfg.ClientID)
	h = append(h, 0xff, 0xff, 0xff, 0xff) // no transactional id; acks of all in-sync replicas
	h = be.AppendUint32(h, uint32(cfg.RequestTimeout.Milliseconds()))
	topics := len(h)
	h = be.AppendUint32(h, 0)
	n, count, payload := 0, 0, 0
	w.at = w.at[:0]
	for i, f := range parts {
		if i == 0 || parts[i-1].p.t != f.p.t {
			h = appendString(h, f.p.t.name)
			n++
			count = len(h)
			h = be.AppendUint32(h, 0)
		}
		be.PutUint32(h[count:], be.Uint32(h[count:])+1)
		h = be.AppendUint32(h, uint32(f.p.tp.Partition))
		w.at = append(w.at, len(h))
		payload += len(f.b.sealed)
	}
	be.PutUint32(h[topics:], uint32(n))
	be.PutUint32(h, uint32(len(h)-4+payload))
	w.head = h
	w.bufs = w.bufs[:0]
	from := 0
	for i, f := range parts {
		w.bufs = append(w.bufs, h[from:w.at[i]], f.b.sealed)
		from = w.at[i]
	}
}

// write sends all pieces: large ones of a plain connection by one gathering system call, others copied together.
func (w *wire) write(nc net.Conn) error {
	pieces := w.bufs
	total := 0
	for _, b := range pieces {
		total += len(b)
	}
	if tcp, ok := nc.(*net.TCPConn); ok && total > gather {
		bufs := pieces // WriteTo consumes its receiver
		_, err := bufs.WriteTo(tcp)
		clear(pieces)
		return err
	}
	w.small = w.small[:0]
	flush := func() error {
		if len(w.small) == 0 {
			return nil
		}
		_, err := nc.Write(w.small)
		w.small = w.small[:0]
		return err
	}
	for _, b := range pieces {
		if len(w.small)+len(b) > gather {
			if err := flush(); err != nil {
				return err
			}
		}
		if len(b) > gather {
			if _, err := nc.Write(b); err != nil {
				return err
			}
			continue
		}
		w.small = append(w.small, b...)
	}
	clear(pieces)
	return flush()
}

func (w *wire) read(r io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint32(size[:]))
	if n < 4 || n > maxAnswer {
		return nil, fmt.Errorf("an answer of %d bytes: this is no Kafka broker", n)
	}
	body, err := reply.ReadBody(r, w.body, n)
	if err != nil {
		return nil, err
	}
	w.body = body
	if got := int32(binary.BigEndian.Uint32(body)); got != w.corr {
		return nil, fmt.Errorf("an answer to request %d instead of %d", got, w.corr)
	}
	return body[4:], nil
}

// decode fills results, which stand in the order of parts.
func (w *wire) decode(version int16, body []byte, parts []flight, results []result) error {
	d := reply.Decoder{B: body}
	next := 0
	for range d.Count(1) {
		topic := d.Bytes(int(d.Int16()))
		for range d.Count(1) {
			id := d.Int32()
			r := result{told: true, code: kafkago.Error(d.Int16()), base: d.Int64()}
			d.Skip(8) // time of appending
			if version >= 5 {
				d.Skip(8) // start of the log
			}
			if version >= 8 {
				for range d.Count(1) {
					r.bad = append(r.bad, int(d.Int32()))
					if m := d.Bytes(int(d.Int16())); r.message == "" {
						r.message = string(m)
					}
				}
				if m := d.Bytes(int(d.Int16())); r.message == "" {
					r.message = string(m)
				}
			}
			if i := find(parts, next, topic, id); i >= 0 {
				results[i] = r
				next = i + 1
			}
		}
	}
	if d.Bad {
		return errors.New("an answer ends too early")
	}
	return nil
}

// find looks for a partition, first where it is expected: brokers answer in the order of the request.
func find(parts []flight, next int, topic []byte, id int32) int {
	is := func(i int) bool { return parts[i].p.tp.Partition == id && parts[i].p.tp.Topic == string(topic) }
	if next < len(parts) && is(next) {
		return next
	}
	for i := range parts {
		if is(i) {
			return i
		}
	}
	return -1
}

func appendString(b []byte, s string) []byte {
	b = binary.BigEndian.AppendUint16(b, uint16(len(s)))
	return append(b, s...)
}
