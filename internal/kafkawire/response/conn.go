// Package response checks the responses of Kafka brokers before kafka-go decodes them.
//
// kafka-go allocates each array with the length that the response states, before it reads the elements.
// So a response of fewer than 100 bytes can claim a hundred gigabytes and end the process. A server that
// uses another protocol can do the same. [Check] returns a connection for kafka-go that passes a response
// on only if every length in it fits the bytes that have arrived.
//
// Order: responses keep their order. Blocking: a read blocks until a whole response has arrived. Cost: a response
// is copied once more.
package response

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

	"github.com/outrelay/outrelay/internal/contract/record"
)

var (
	// ErrNotKafka means that the listener has sent bytes that no Kafka broker sends.
	ErrNotKafka = errors.New("the listener does not speak the Kafka protocol")
	// ErrTLS means that the listener has responded with a TLS alert.
	ErrTLS = errors.New("the listener responds with a TLS alert: it expects TLS")
	// ErrOldSASL means that the SASL exchange of the broker has no frames, as before Kafka 1.0.
	ErrOldSASL = errors.New("the broker only supports version 0 of SaslHandshake: SASL needs Kafka 1.0 or later")
)

const (
	headSize = 8 // length and correlation id

	keepBuffer = 64 << 10 // a larger buffer is not kept for the next response
	firstRead  = 4 << 20  // the most that readBody allocates before any byte has arrived
)

// Check returns a connection that checks the responses on nc. With TLS, nc is the TLS connection. Check
// reads from reader, which must read from nc. The address appears in errors.
//
// Reads and writes may run at the same time.
func Check(nc net.Conn, reader *bufio.Reader, addr string) net.Conn {
	return &conn{Conn: nc, addr: addr, in: reader}
}

type conn struct {
	net.Conn
	addr string

	// The state of the writer: the head of the request that is being written, and the number of bytes
	// that follow it.
	head     []byte
	bodyLeft int

	mu      sync.Mutex
	pending []request // without a response yet; a broker responds in this order

	// The state of the reader: the checked bytes to return next.
	in      *bufio.Reader
	buf     []byte
	checked []byte
	err     error
}

type request struct {
	key         protocol.ApiKey
	version     int16
	correlation int32
}

// requestHead is the length, API key, version and correlation id of a request.
const requestHead = 12

// Write sends data. It parses the heads of the requests, because Read needs the format of each response.
func (c *conn) Write(data []byte) (int, error) {
	be := binary.BigEndian
	for b := data; len(b) > 0; {
		// A write may begin and end in the middle of a request.
		if c.bodyLeft > 0 {
			n := min(c.bodyLeft, len(b))
			c.bodyLeft -= n
			b = b[n:]
			continue
		}

		n := min(requestHead-len(c.head), len(b))
		c.head = append(c.head, b[:n]...)
		b = b[n:]
		if len(c.head) < requestHead {
			continue
		}

		request := request{
			key:         protocol.ApiKey(be.Uint16(c.head[4:])),
			version:     int16(be.Uint16(c.head[6:])),
			correlation: int32(be.Uint32(c.head[8:])),
		}
		// After version 0, the login continues without Kafka's lengths, so its responses cannot be checked.
		if request.key == protocol.SaslHandshake && request.version == 0 {
			return 0, fmt.Errorf("connecting to %s: %w", c.addr, ErrOldSASL)
		}
		c.bodyLeft = int(be.Uint32(c.head)) + 4 - requestHead
		c.head = c.head[:0]

		c.mu.Lock()
		c.pending = append(c.pending, request)
		c.mu.Unlock()
	}
	return c.Conn.Write(data)
}

// Read returns bytes of checked responses. After an error it always returns that error.
func (c *conn) Read(buffer []byte) (int, error) {
	if c.err == nil && len(c.checked) == 0 {
		c.err = c.readResponse()
	}
	if c.err != nil {
		return 0, c.err
	}

	n := copy(buffer, c.checked)
	c.checked = c.checked[n:]
	return n, nil
}

// readResponse reads the next response and checks it.
func (c *conn) readResponse() error {
	// These bytes begin an alert in all versions of TLS.
	head, err := c.in.Peek(headSize)
	if len(head) >= 3 && head[0] == 0x15 && head[1] == 3 {
		return fmt.Errorf("%s: %w", c.addr, ErrTLS)
	}
	if err != nil {
		return err
	}

	size := int(int32(binary.BigEndian.Uint32(head)))
	correlation := int32(binary.BigEndian.Uint32(head[4:]))
	c.mu.Lock()
	if len(c.pending) == 0 || c.pending[0].correlation != correlation {
		c.mu.Unlock()
		return c.notKafka("its response does not belong to the request")
	}
	request := c.pending[0]
	c.pending = slices.Delete(c.pending, 0, 1)
	c.mu.Unlock()

	if size < 4 || size > record.MaxResponse {
		return c.notKafka("the first bytes of its response would mean a length of %d bytes", size)
	}
	// Otherwise the buffer of one large response would stay as long as the connection.
	if cap(c.buf) > keepBuffer {
		c.buf = nil
	}
	if c.buf, err = readBody(c.in, c.buf, 4+size); err != nil {
		return err
	}
	if err := checkLengths(request.key, request.version, c.buf[headSize:]); err != nil {
		return c.notKafka("its response to %v version %d is not valid: %v", request.key, request.version, err)
	}
	c.checked = c.buf
	return nil
}

// notKafka returns an ErrNotKafka with the address of the listener, the details and the fix.
func (c *conn) notKafka(format string, args ...any) error {
	details := fmt.Sprintf(format, args...)
	return fmt.Errorf("%s: %w: %s; check the host and port of the brokers", c.addr, ErrNotKafka, details)
}

// Read reads the response to the request with that correlation id, of at most limit bytes. It returns the bytes
// after the id, in buf if that is large enough. reader is a connection that [Check] does not check.
func Read(reader io.Reader, buf []byte, correlation int32, limit int) ([]byte, error) {
	var head [headSize]byte
	if _, err := io.ReadFull(reader, head[:]); err != nil {
		return nil, err
	}

	// A server that speaks another protocol sends bytes that look like a huge length.
	size := int(int32(binary.BigEndian.Uint32(head[:])))
	if size < 4 || size > limit {
		return nil, fmt.Errorf("%w: the first bytes of its response would mean a length of %d bytes", ErrNotKafka, size)
	}

	// The connection has one request in flight, so any other id means that it is out of step.
	if got := int32(binary.BigEndian.Uint32(head[4:])); got != correlation {
		return nil, fmt.Errorf("response to request %d instead of %d", got, correlation)
	}
	return readBody(reader, buf, size-4)
}

// readBody reads n bytes and returns them, in buf if it is large enough. n may be a false claim of a
// response, so the memory grows only with the bytes that arrive.
func readBody(reader io.Reader, buf []byte, n int) ([]byte, error) {
	buf = buf[:0]
	for len(buf) < n {
		if len(buf) == cap(buf) {
			buf = slices.Grow(buf, min(n-len(buf), max(len(buf), firstRead)))
		}
		got, err := io.ReadFull(reader, buf[len(buf):min(cap(buf), n)])
		buf = buf[:len(buf)+got]
		if err != nil {
			return buf, err
		}
	}
	return buf, nil
}
