package kafkawire

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"
)

// newPair returns both ends of a TCP connection, the first of which counts time without progress.
func newPair(t *testing.T, idle time.Duration) (*progressConn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return newProgressConn(client, idle), server
}

func TestTimeLimitCountsFromTheLastByteThatMoved(t *testing.T) {
	t.Parallel()
	const idle = 400 * time.Millisecond

	t.Run("response", func(t *testing.T) {
		t.Parallel()
		c, server := newPair(t, idle)
		go func() {
			for range 10 {
				<-time.After(idle / 4)
				_, _ = server.Write([]byte("x"))
			}
		}()
		if n, err := io.ReadFull(c, make([]byte, 10)); err != nil {
			t.Errorf("%d bytes of a slow response: %v", n, err)
		}
		began := time.Now()
		if _, err := c.Read(make([]byte, 1)); !TimedOut(err) || time.Since(began) < idle {
			t.Errorf("a response that does not continue: %v after %v", err, time.Since(began))
		}
	})

	t.Run("request", func(t *testing.T) {
		t.Parallel()
		c, server := newPair(t, idle)
		_ = server.(*net.TCPConn).SetReadBuffer(64 << 10)
		const size = 8 << 20
		go func() {
			for left := size; left > 0; {
				<-time.After(idle / 8)
				n, _ := io.CopyN(io.Discard, server, int64(min(left, 256<<10)))
				left -= int(n)
			}
			<-time.After(idle / 2)
			_, _ = server.Write([]byte("x"))
		}()
		began := time.Now()
		if n, err := c.Write(bytes.Repeat([]byte("x"), size)); err != nil {
			t.Fatalf("%d bytes of a request to a slow reader: %v", n, err)
		}
		// The system still sends a part of the request while the response is awaited.
		if _, err := c.Read(make([]byte, 1)); err != nil {
			t.Errorf("the response: %v after %v", err, time.Since(began))
		}
	})

	t.Run("interrupt", func(t *testing.T) {
		t.Parallel()
		c, _ := newPair(t, time.Hour)
		time.AfterFunc(idle/8, c.interrupt)
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("an interrupted read returns no error")
		}
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a read after the interrupt returns no error")
		}
	})
}

// recordingConn records the writes of a TLS connection.
type recordingConn struct {
	net.Conn
	sent   []byte
	writes int
}

func (c *recordingConn) Write(data []byte) (int, error) {
	c.sent = append(c.sent, data...)
	c.writes++
	return len(data), nil
}

// TestOnlySmallPiecesAreCopiedTogether: with TLS, the small pieces of a large request share a write, and each chunk has its own.
func TestOnlySmallPiecesAreCopiedTogether(t *testing.T) {
	t.Parallel()
	conn := &recordingConn{}
	producer := &Producer{}
	var want []byte
	for i, size := range []int{9, 65, 512, 1 << 10, 32 << 10, 32 << 10, 7, 65, 100, 32 << 10} {
		piece := bytes.Repeat([]byte{byte('a' + i)}, size)
		producer.pieces = append(producer.pieces, piece)
		want = append(want, piece...)
	}

	written, err := producer.writePieces(&Link{conn: conn}, len(want))
	if err != nil || written != len(want) || !bytes.Equal(conn.sent, want) {
		t.Errorf("%d of %d bytes were written: %v", written, len(want), err)
	}
	if conn.writes != 5 {
		t.Errorf("%d writes, want 5: two of small pieces, and one of each chunk", conn.writes)
	}
}
