package kafkawire_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/contract/sasl"
	"github.com/outrelay/outrelay/internal/kafkawire"
)

// A server at a broker's address may request any number of iterations, before it has proved who it is.
func TestIterationsOfALoginAreBounded(t *testing.T) {
	t.Parallel()
	for _, iterations := range []int64{30_000_000, 2147483647, 1_000_001} {
		l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go hostileScram(c, iterations)
			}
		}()

		login := &sasl.Login{Mechanism: "SCRAM-SHA-512", User: "u", Password: func() (string, error) { return "p", nil }}
		c, err := kafkawire.NewClient(kafkawire.Config{Brokers: []string{l.Addr().String()}, SASL: login})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		began := time.Now()
		_, err = c.Dial(ctx, l.Addr().String())
		if err == nil || !strings.Contains(err.Error(), "iterations") {
			t.Errorf("%d iterations: %v", iterations, err)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the dial took %v", took)
		}
	}
}

// hostileScram is a server that responds to a login with SCRAM.
func hostileScram(c net.Conn, iterations int64) {
	defer c.Close()
	be := binary.BigEndian
	nonce := ""
	for {
		var size [4]byte
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		req := make([]byte, be.Uint32(size[:]))
		if _, err := io.ReadFull(c, req); err != nil {
			return
		}
		key, corr := be.Uint16(req), req[4:8]
		var body []byte
		switch key {
		case 18: // ApiVersions v0
			body = be.AppendUint32(make([]byte, 2), 40)
			for k := range uint16(40) {
				v := uint16(1)
				if k == 36 {
					v = 0
				}
				body = be.AppendUint16(be.AppendUint16(be.AppendUint16(body, k), 0), v)
			}
		case 17: // SaslHandshake v1
			body = be.AppendUint32(make([]byte, 2), 1)
			body = append(be.AppendUint16(body, 13), "SCRAM-SHA-512"...)
		case 36: // SaslAuthenticate v0
			if i := bytes.Index(req, []byte(",r=")); i >= 0 {
				nonce = strings.TrimRight(string(req[i+3:]), "\x00")
			}
			first := fmt.Sprintf("r=%sX,s=c2FsdHNhbHQ=,i=%d", nonce, iterations)
			body = append(make([]byte, 2), 0xff, 0xff)
			body = append(be.AppendUint32(body, uint32(len(first))), first...)
		}
		out := be.AppendUint32(nil, uint32(4+len(body)))
		if _, err := c.Write(append(append(out, corr...), body...)); err != nil {
			return
		}
	}
}
