package probes

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/base/metrics"
)

// A client that reaches the health port cannot delay the response to a probe with connections that it leaves open. The
// number of open connections is bounded.
func TestIdleConnectionsDoNotStopProbes(t *testing.T) {
	t.Parallel()
	s, err := Listen("127.0.0.1:0", &fake{ok: true}, metrics.New("").Registry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.Run(t.Context()) }()
	t.Cleanup(func() {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})

	var open []net.Conn
	for i := range 3 * maxConns {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		open = append(open, c)
		// The other connections never send a request.
		if i%2 == 0 {
			if _, err := fmt.Fprint(c, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if r, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || r.StatusCode != 200 {
				t.Fatalf("connection %d: %v", i, err)
			}
		}
	}
	if status, _ := get(t, "http://"+s.Addr()+"/livez"); status != 200 {
		t.Errorf("status %d", status)
	}
	closed := 0
	for _, c := range open {
		_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); err != nil && !isTimeout(err) {
			closed++
		}
	}
	if left := len(open) - closed; left > maxConns {
		t.Errorf("%d connections are open", left)
	}
}

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout()
}

// A web page whose name resolves to this machine reads neither the health nor the metrics of a relay there. Names that the
// public DNS cannot have, and requests from other machines, are responded to.
func TestMadeUpNamesReachNoMetrics(t *testing.T) {
	t.Parallel()
	url := startServer(t, &fake{ok: true, phase: "owner"})
	ask := func(path, host string) (int, string) {
		req, err := http.NewRequestWithContext(t.Context(), "GET", url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = host
		r, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
	for _, path := range []string{"/livez", "/readyz", "/metrics", "/nothing"} {
		for _, host := range []string{"rebound.example", "rebound.example:9464", "REBOUND.example.", "127.0.0.1.rebound.example", "localhost.rebound.example:80", "svc.example"} {
			if status, body := ask(path, host); status != http.StatusMisdirectedRequest || len(body) > 200 {
				t.Errorf("%s of %s: %d %.300s", path, host, status, body)
			}
		}
		for _, host := range []string{"", "localhost", "LOCALHOST.:9464", "127.0.0.1:9464", "[::1]:9464", "10.1.2.3", "relay:9464", "relay.shop.svc:9464", "relay.shop.svc.cluster.local"} {
			if status, body := ask(path, host); status == http.StatusMisdirectedRequest {
				t.Errorf("%s of %s: %d %.300s", path, host, status, body)
			}
		}
	}

	far := httptest.NewRequest("GET", "http://relay.example/livez", nil)
	far = far.WithContext(context.WithValue(far.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(10, 1, 2, 3), Port: 9464}))
	w := httptest.NewRecorder()
	rejectForeignNames(http.NotFoundHandler()).ServeHTTP(w, far)
	if w.Code != http.StatusNotFound {
		t.Errorf("from another machine: %d", w.Code)
	}
}
