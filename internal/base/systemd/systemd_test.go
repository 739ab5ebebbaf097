package systemd

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// manager is a service manager's socket.
type manager struct {
	t    *testing.T
	conn *net.UnixConn
}

func listen(t *testing.T, watchdog time.Duration) *manager {
	t.Helper()
	// The path of a socket must be short.
	dir, err := os.MkdirTemp("", "sd")
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	address := &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"}
	conn, err := net.ListenUnixgram("unixgram", address)
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = conn.Close() })
	t.Setenv("NOTIFY_SOCKET", address.Name)
	t.Setenv("WATCHDOG_USEC", "")
	if watchdog > 0 {
		t.Setenv("WATCHDOG_USEC", strconv.FormatInt(watchdog.Microseconds(), 10))
		t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	}

	return &manager{t, conn}
}

// next is the next message, "" if none comes within wait.
func (m *manager) next(wait time.Duration) string {
	m.t.Helper()
	if err := m.conn.SetReadDeadline(time.Now().Add(wait)); err != nil {
		m.t.Fatal(err)
	}

	buf := make([]byte, 4096)
	n, err := m.conn.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ""
	}
	if err != nil {
		m.t.Fatal(err)
	}

	return string(buf[:n])
}

// until reads messages until one begins with prefix, and returns those before it.
func (m *manager) until(prefix string) (before []string, last string) {
	m.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for time.Now().Before(deadline) {
		if got := m.next(time.Second); strings.HasPrefix(got, prefix) {
			return before, got
		} else if got != "" {
			before = append(before, got)
		}
	}
	m.t.Fatalf("no message %q; %q came", prefix, before)
	return nil, ""
}

type probe struct {
	mu      sync.Mutex
	phase   string
	reasons []string
	dead    error
}

func (p *probe) set(change func(*probe)) { p.mu.Lock(); defer p.mu.Unlock(); change(p) }

func (p *probe) Live() error { p.mu.Lock(); defer p.mu.Unlock(); return p.dead }

func (p *probe) Ready() (bool, string, []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.reasons) == 0, p.phase, p.reasons
}

// runSupervisor runs a Supervisor until the test ends or stop is called.
func runSupervisor(t *testing.T, p *probe) (stop context.CancelFunc) {
	t.Helper()
	s := New("default", p, slog.New(slog.DiscardHandler))
	if s == nil {
		t.Fatal("the socket has no listener")
	}

	work, end := context.WithCancel(t.Context())
	ctx, cancel := context.WithCancel(work)
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx, work) }()
	t.Cleanup(func() {
		end()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})

	return cancel
}

func TestReadyStatusAndStopping(t *testing.T) {
	m := listen(t, 0)
	p := &probe{phase: "starting"}
	stop := runSupervisor(t, p)
	if before, status := m.until("STATUS="); len(before) > 0 || status != "STATUS=starting of watcher default: well" {
		t.Errorf("%q before %q: ready while it is starting", before, status)
	}

	p.set(func(p *probe) { p.phase = "standby" })
	if before, _ := m.until("READY=1"); len(before) > 0 {
		t.Errorf("%q before it is ready", before)
	}
	if _, status := m.until("STATUS="); status != "STATUS=standby of watcher default: well" {
		t.Errorf("%q", status)
	}

	p.set(func(p *probe) {
		p.reasons = []string{"kafka: no response from http://u:pw@k1 (for 3s)", "mongodb: a\nb (for 9s)"}
	})

	if _, status := m.until("STATUS="); status != "STATUS=standby of watcher default: kafka: no response from http://***@k1; mongodb: a b" {
		t.Errorf("%q", status)
	}

	stop()
	if before, _ := m.until("STOPPING=1"); len(before) > 0 {
		t.Errorf("%q: the same status again, or an unrequested sign of life", before)
	}
}

// TestAHungLoopStopsTheWatchdog: signs of life come while everything moves, cease when a loop hangs, and come again.
func TestAHungLoopStopsTheWatchdog(t *testing.T) {
	m := listen(t, 300*time.Millisecond)
	p := &probe{phase: "owner"}
	runSupervisor(t, p)
	m.until("WATCHDOG=1")
	m.until("WATCHDOG=1")
	p.set(func(p *probe) { p.dead = errors.New("the pump stands still") })
	// First the notifications arrive that were sent before, then none.
	for m.next(2*time.Second) != "" {
	}
	p.set(func(p *probe) { p.dead = nil })
	m.until("WATCHDOG=1")
}

func TestNobodyListens(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	s := New("default", &probe{}, slog.New(slog.DiscardHandler))
	if err := s.Run(t.Context(), t.Context()); s != nil || err != nil {
		t.Errorf("%v %v", s, err)
	}
}
