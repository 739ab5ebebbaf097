// Package reply checks the replies of Kafka brokers before kafka-go decodes them.
//
// kafka-go allocates each array with the length that the reply states, before it reads the elements. A reply of fewer than
// 100 bytes can therefore claim a hundred gigabytes and end the process, and so can a server that speaks another protocol.
// [Check] puts a connection in front of kafka-go that passes a reply on only if every length in it fits the bytes that have
// arrived.
package reply

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"

	"github.com/segmentio/kafka-go/protocol"
)

var (
	// ErrNotKafka reports bytes that no Kafka broker sends.
	ErrNotKafka = errors.New("the listener does not speak the Kafka protocol")
	// ErrTLS reports that the listener replied with a TLS alert.
	ErrTLS = errors.New("the listener replies with a TLS alert: it expects TLS")
	// ErrOldSASL reports a broker whose SASL exchange has no frames, as before Kafka 1.0.
	ErrOldSASL = errors.New("the broker only supports version 0 of SaslHandshake: SASL needs Kafka 1.0 or later")
)

const (
	// maxReply bounds every reply but that of a Fetch. The metadata of 500,000 partitions take about 25 MB.
	maxReply = 32 << 20
	headSize = 8 // length and correlation id

	keepBuffer = 64 << 10 // a larger buffer is not kept for the next reply
	firstRead  = 4 << 20  // the most that ReadBody allocates before any byte has arrived
)

// Check returns nc with checked replies, for the Kafka protocol in plain text: above TLS. It reads from in, which reads from
// nc. The address is for errors.
//
// Replies to Fetch pass unchecked: package fetched decodes them. Reads and writes may run at the same time.
func Check(nc net.Conn, in *bufio.Reader, addr string) net.Conn {
	return &conn{Conn: nc, addr: addr, in: in}
}

type conn struct {
	net.Conn
	addr string

	// The state of the writer: the head of the request that is being written, and how many bytes follow it.
	head []byte
	rest int

	mu    sync.Mutex
	asked []request // without a reply yet; a broker replies in this order

	// The state of the reader: a checked reply, or what precedes and how long is one that passes unchecked.
	in      *bufio.Reader
	buf     []byte
	reply   []byte
	through int
	err     error
}

type request struct {
	key         protocol.ApiKey
	version     int16
	correlation int32
}

// requestHead is the length, API key, version and correlation id of a request.
const requestHead = 12

// Write notes which requests pass, so that Read knows the format of each reply.
func (c *conn) Write(p []byte) (int, error) {
	be := binary.BigEndian
	for b := p; len(b) > 0; {
		if c.rest > 0 {
			n := min(c.rest, len(b))
			c.rest -= n
			b = b[n:]
			continue
		}
		n := min(requestHead-len(c.head), len(b))
		c.head = append(c.head, b[:n]...)
		b = b[n:]
		if len(c.head) < requestHead {
			continue
		}
		q := request{protocol.ApiKey(be.Uint16(c.head[4:])), int16(be.Uint16(c.head[6:])), int32(be.Uint32(c.head[8:]))}
		if q.key == protocol.SaslHandshake && q.version == 0 {
			return 0, fmt.Errorf("connecting to %s: %w", c.addr, ErrOldSASL)
		}
		c.rest = int(be.Uint32(c.head)) + 4 - requestHead
		c.head = c.head[:0]
		c.mu.Lock()
		c.asked = append(c.asked, q)
		c.mu.Unlock()
	}
	return c.Conn.Write(p)
}

// Read returns bytes of checked replies. After an error the connection is of no use.
func (c *conn) Read(p []byte) (int, error) {
	if c.err == nil && len(c.reply) == 0 && c.through == 0 {
		c.err = c.next()
	}
	if c.err != nil {
		return 0, c.err
	}
	if len(c.reply) > 0 {
		n := copy(p, c.reply)
		c.reply = c.reply[n:]
		return n, nil
	}
	n, err := c.in.Read(p[:min(len(p), c.through)])
	c.through -= n
	return n, err
}

// next reads one reply and checks it.
func (c *conn) next() error {
	head, err := c.in.Peek(headSize)
	if len(head) >= 3 && head[0] == 0x15 && head[1] == 3 { // an alert, of any version of TLS
		return fmt.Errorf("%s: %w", c.addr, ErrTLS)
	}
	if err != nil {
		return err
	}

	size, correlation := int(int32(binary.BigEndian.Uint32(head))), int32(binary.BigEndian.Uint32(head[4:]))
	c.mu.Lock()
	if len(c.asked) == 0 || c.asked[0].correlation != correlation {
		c.mu.Unlock()
		return c.notKafka("its reply does not belong to the request")
	}
	q := c.asked[0]
	c.asked = slices.Delete(c.asked, 0, 1)
	c.mu.Unlock()

	if q.key == protocol.Fetch && size >= 4 {
		c.buf = append(c.buf[:0], head...)
		_, _ = c.in.Discard(headSize)
		c.reply, c.through = c.buf, size-4
		return nil
	}
	if size < 4 || size > maxReply {
		return c.notKafka("it claims a reply of %d bytes", size)
	}
	if cap(c.buf) > keepBuffer {
		c.buf = nil
	}
	if c.buf, err = ReadBody(c.in, c.buf, 4+size); err != nil {
		return err
	}
	if err := check(q.key, q.version, c.buf[headSize:]); err != nil {
		return c.notKafka("its reply to %v version %d is not valid: %v", q.key, q.version, err)
	}
	c.reply = c.buf
	return nil
}

// notKafka names the listener and what to do.
func (c *conn) notKafka(format string, args ...any) error {
	return fmt.Errorf("%s: %w: %s; check the host and port of the brokers", c.addr, ErrNotKafka, fmt.Sprintf(format, args...))
}

// ReadBody reads n bytes into buf, which grows no faster than the bytes arrive: a length in a reply is only a claim.
func ReadBody(r io.Reader, buf []byte, n int) ([]byte, error) {
	buf = buf[:0]
	for len(buf) < n {
		if len(buf) == cap(buf) {
			buf = slices.Grow(buf, min(n-len(buf), max(len(buf), firstRead)))
		}
		m, err := io.ReadFull(r, buf[len(buf):min(cap(buf), n)])
		buf = buf[:len(buf)+m]
		if err != nil {
			return buf, err
		}
	}
	return buf, nil
}
