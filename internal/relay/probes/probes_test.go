package probes

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"

	"github.com/outrelay/outrelay/internal/base/metrics"
	"github.com/outrelay/outrelay/internal/relay/problems"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find)) }

type fake struct {
	mu      sync.Mutex
	dead    error
	ok      bool
	phase   string
	reasons []string
	list    []problems.Problem
}

func (f *fake) set(change func(*fake)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change(f)
}

func (f *fake) Live() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.dead
}

func (f *fake) Ready() (bool, string, []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ok, f.phase, f.reasons
}

func (f *fake) Problems() []problems.Problem {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.list
}

// startServer runs a server for the test and returns its base URL.
func startServer(t *testing.T, h Health) string {
	t.Helper()
	set := metrics.New("9.9.9")
	set.ObservePublish("orders", metrics.Acked, 3)
	s, err := Listen("127.0.0.1:0", h, set.Registry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})

	return "http://" + s.Addr()
}

func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestLivez(t *testing.T) {
	t.Parallel()
	h := &fake{}
	url := startServer(t, h) + "/livez"
	if status, body := get(t, url); status != 200 || body != "{\"live\":true}\n" {
		t.Errorf("%d %s", status, body)
	}
	h.set(func(f *fake) { f.dead = errors.New("the reader has not moved for 30s") })
	if status, body := get(t, url); status != 503 || !strings.Contains(body, "the reader has not moved") {
		t.Errorf("%d %s", status, body)
	}
}

func TestReadyz(t *testing.T) {
	t.Parallel()
	h := &fake{phase: "starting"}
	url := startServer(t, h) + "/readyz"
	check := func(status int, want readiness) {
		t.Helper()
		got, body := get(t, url)
		var doc readiness
		if err := json.Unmarshal([]byte(body), &doc); err != nil {
			t.Fatalf("%v: %s", err, body)
		}
		if diff := cmp.Diff(want, doc); got != status || diff != "" {
			t.Errorf("%d %s", got, diff)
		}
	}

	check(503, readiness{Phase: "starting", Reasons: []string{}})
	h.set(func(f *fake) { f.ok, f.phase = true, "standby" })
	check(200, readiness{Ready: true, Phase: "standby", Reasons: []string{}})
	h.set(func(f *fake) { f.phase, f.reasons = "owner", []string{"kafka: away for 4 s", "mongodb: away"} })
	check(200, readiness{Ready: true, Phase: "owner", Reasons: []string{"kafka: away for 4 s", "mongodb: away"}})
	h.set(func(f *fake) { f.ok = false })
	check(503, readiness{Phase: "owner", Reasons: []string{"kafka: away for 4 s", "mongodb: away"}})
	list := []problems.Problem{{Kind: problems.DeadLetters, Severity: problems.Fail, Detail: "120 new", Fix: "look"}}
	h.set(func(f *fake) { f.ok, f.reasons, f.list = true, nil, list })
	// A backlog is no reason to take a process out of service.
	check(200, readiness{Ready: true, Phase: "owner", Reasons: []string{}, Problems: list})
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	url := startServer(t, &fake{})
	status, body := get(t, url+"/metrics")
	for _, want := range []string{`outrelay_published_total{result="acked",topic="orders"} 3`, `outrelay_build_info{`, `outrelay_publish_latency_seconds_bucket{le="0.0005"} 0`} {
		if status != 200 || !strings.Contains(body, want) {
			t.Errorf("%d, no %s", status, want)
		}
	}
}

func TestNothingElseIsServed(t *testing.T) {
	t.Parallel()
	url := startServer(t, &fake{ok: true})
	for _, path := range []string{"/", "/debug/pprof/", "/config", "/livez/x"} {
		if status, _ := get(t, url+path); status != 404 {
			t.Errorf("%s: %d", path, status)
		}
	}

	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/readyz", nil)
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}

	resp.Body.Close()
	if resp.StatusCode != http.StatusMethodNotAllowed {
		t.Errorf("POST: %d", resp.StatusCode)
	}
}

func TestAddressThatIsTaken(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()

	_, err = Listen(l.Addr().String(), &fake{}, metrics.New("").Registry, slog.New(slog.DiscardHandler))
	want := "http.listen: listen tcp " + l.Addr().String() + ": bind: address already in use; stop the process that uses the address, or choose another port in http.listen"
	if err == nil || err.Error() != want {
		t.Errorf("error = %v, want %s", err, want)
	}
	if _, err := Bind("http.admin.listen", "192.0.2.1:1"); err == nil || !strings.HasSuffix(err.Error(), "; correct http.admin.listen") {
		t.Errorf("an address of another machine: %v", err)
	}
}

// TestStopsBesideASlowClient holds a half-sent request open: the stop is bounded all the same.
func TestStopsBesideASlowClient(t *testing.T) {
	t.Parallel()
	s, err := Listen("127.0.0.1:0", &fake{}, metrics.New("").Registry, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	c, err := net.Dial("tcp", s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET /livez HTTP/1.1\r\nHost: x\r\n")); err != nil {
		t.Fatal(err)
	}
	if status, _ := get(t, "http://"+s.Addr()+"/livez"); status != 200 {
		t.Errorf("status = %d", status)
	}

	cancel()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(stopTimeout + 30*time.Second):
		t.Fatal("it does not stop")
	}
}
