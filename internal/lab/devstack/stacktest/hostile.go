package stacktest

import (
	"encoding/binary"
	"io"
	"net"
	"testing"
)

// The API keys of Kafka that a hostile broker uses.
const (
	apiMetadata = 3
	apiVersions = 18
)

// Hostile listens like a Kafka broker until the test ends, and returns its address. It responds to each
// request with the correlation id and the result of attack. If attack returns nil, the response to ApiVersions
// is valid, and other requests get no response.
func Hostile(tb testing.TB, attack func(key, version int16) []byte) string {
	tb.Helper()
	return serveConnections(tb, func(conn net.Conn) {
		for {
			var head [12]byte
			if _, err := io.ReadFull(conn, head[:]); err != nil {
				return
			}
			rest := int64(binary.BigEndian.Uint32(head[:])) + 4 - int64(len(head))
			if _, err := io.CopyN(io.Discard, conn, rest); err != nil {
				return
			}

			key, version := int16(binary.BigEndian.Uint16(head[4:])), int16(binary.BigEndian.Uint16(head[6:]))
			body := attack(key, version)
			if body == nil && key == apiVersions {
				body = allVersions()
			}
			if body == nil {
				continue
			}

			response := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
			response = append(append(response, head[8:12]...), body...)
			if _, err := conn.Write(response); err != nil {
				return
			}
		}
	})
}

// WebServer listens like an HTTP server until the test ends and returns its address.
func WebServer(tb testing.TB) string {
	tb.Helper()
	return serveConnections(tb, func(conn net.Conn) {
		_, _ = conn.Read(make([]byte, 100))
		_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n400 Bad Request"))
		_, _ = io.Copy(io.Discard, conn)
	})
}

// HugeArray returns a response of n bytes and the length of an array with two thousand million elements.
func HugeArray(n int) []byte { return append(make([]byte, n), 0x7f, 0xff, 0xff, 0xff) }

// HugeMetadata attacks the response to Metadata of version 3 or later. The array of brokers follows the throttle time.
func HugeMetadata(key, _ int16) []byte {
	if key == apiMetadata {
		return HugeArray(4)
	}
	return nil
}

// HugeVersions attacks the response to ApiVersions. The array of APIs follows the error code.
func HugeVersions(key, _ int16) []byte {
	if key == apiVersions {
		return HugeArray(2)
	}
	return nil
}

// allVersions returns a response to ApiVersions, version 0: no error, and the highest version of every API.
func allVersions() []byte {
	const apis = 52
	be := binary.BigEndian
	body := be.AppendUint32(make([]byte, 2), apis)
	for key := range uint16(apis) {
		body = be.AppendUint16(be.AppendUint16(be.AppendUint16(body, key), 0), 20)
	}
	return body
}

// serveConnections listens until the test ends, calls handle for each connection, and returns the address.
func serveConnections(tb testing.TB, handle func(net.Conn)) string {
	tb.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}

	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}

			tb.Cleanup(func() { _ = conn.Close() })
			go handle(conn)
		}
	}()
	tb.Cleanup(func() {
		_ = listener.Close()
		<-done
	})
	return listener.Addr().String()
}
