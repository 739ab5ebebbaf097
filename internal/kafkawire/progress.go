package kafkawire

import (
	"errors"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"time"
)

// progressConn is a connection to a broker whose deadlines count from the last byte that moved, in either direction. So a
// large request or response may take as long as a slow link needs, and a broker that has stopped is still noticed in time.
type progressConn struct {
	net.Conn
	idle        atomic.Int64 // nanoseconds without progress after which a read or a write fails
	interrupted atomic.Bool
	unsentKnown bool // Write has filled the send buffer of the system since it was last found empty
}

func newProgressConn(conn net.Conn, idle time.Duration) *progressConn {
	progressConn := &progressConn{Conn: conn}
	progressConn.setIdle(idle)
	return progressConn
}

// setIdle sets the time without progress after which a read or a write fails.
func (c *progressConn) setIdle(duration time.Duration) { c.idle.Store(int64(duration)) }

// interrupt makes reads and writes fail from now on.
func (c *progressConn) interrupt() {
	c.interrupted.Store(true)
	_ = c.SetDeadline(time.Unix(1, 0))
}

// arm sets a deadline of Read or Write.
func (c *progressConn) arm(set func(time.Time) error, duration time.Duration) {
	_ = set(time.Now().Add(duration))
	// Otherwise this deadline would replace that of an interrupt at the same time.
	if c.interrupted.Load() {
		_ = c.SetDeadline(time.Unix(1, 0))
	}
}

// Read waits as long as bytes arrive, or as the system still sends what was written before.
func (c *progressConn) Read(buffer []byte) (int, error) {
	idle, moved := time.Duration(c.idle.Load()), time.Now()
	unsent := c.unsentBytes()
	for {
		step := idle - time.Since(moved)
		if unsent > 0 {
			step = min(step, idle/4)
		}
		c.arm(c.SetReadDeadline, step)
		n, err := c.Conn.Read(buffer)
		if n > 0 || !isTimeout(err) || c.interrupted.Load() {
			return n, err
		}

		if left := c.unsentBytes(); left < unsent {
			unsent, moved = left, time.Now()
		}
		if time.Since(moved) >= idle {
			return n, err
		}
	}
}

// Write waits as long as the system takes bytes.
func (c *progressConn) Write(data []byte) (written int, err error) {
	c.unsentKnown = true
	for {
		c.arm(c.SetWriteDeadline, time.Duration(c.idle.Load()))
		n, err := c.Conn.Write(data[written:])
		written += n
		if n == 0 || !isTimeout(err) || c.interrupted.Load() {
			return written, err
		}
	}
}

// writeBuffers writes pieces with few system calls, if the connection can do that. It consumes pieces.
func (c *progressConn) writeBuffers(pieces *net.Buffers) (written int64, err error) {
	c.unsentKnown = true
	for {
		c.arm(c.SetWriteDeadline, time.Duration(c.idle.Load()))
		n, err := pieces.WriteTo(c.Conn)
		written += n
		if n == 0 || !isTimeout(err) || c.interrupted.Load() {
			return written, err
		}
	}
}

// unsentBytes returns how many bytes the system has taken and the broker has not received yet. It returns 0 if that is not
// known.
func (c *progressConn) unsentBytes() int {
	if !c.unsentKnown {
		return 0
	}
	tcp, ok := c.Conn.(*net.TCPConn)
	if !ok {
		return 0
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0
	}

	n := 0
	if raw.Control(func(fd uintptr) { n = unsentOf(fd) }) != nil {
		return 0
	}
	c.unsentKnown = n > 0
	return n
}

// ErrIncomplete means that the broker has not received the whole request, so it has not acted on it.
var ErrIncomplete = errors.New("the request was not sent whole")

// ClosedByBroker reports whether err is the end of a connection that the broker, or a device on the way, has closed.
func ClosedByBroker(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// TimedOut reports whether err is the end of a request in which no byte has moved for its time limit.
func TimedOut(err error) bool { return isTimeout(err) }
