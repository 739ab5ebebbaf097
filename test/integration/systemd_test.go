//go:build unix

package integration

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/outrelay/outrelay/test/kit"
)

// A relay notifies a service manager that it is ready, of its status, with watchdog signals, and that it stops.
func TestServiceManager(t *testing.T) {
	t.Parallel()
	// The path of a socket must be short, and t.TempDir is long.
	dir, err := os.MkdirTemp("", "sd")
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	conn, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = conn.Close() })
	buf := make([]byte, 4096)
	until := func(want string) {
		t.Helper()
		var received []string
		for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); {
			if err := conn.SetReadDeadline(deadline); err != nil {
				t.Fatal(err)
			}

			n, err := conn.Read(buf)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if got := string(buf[:n]); strings.HasPrefix(got, want) {
				return
			} else {
				received = append(received, got)
			}
		}

		t.Fatalf("waiting for notification %q timed out; received %q", want, received)
	}

	s := kit.New(t, kit.Options{Env: []string{
		"NOTIFY_SOCKET=" + filepath.Join(dir, "notify"),
		// An empty WATCHDOG_PID applies to any process.
		"WATCHDOG_USEC=1500000", "WATCHDOG_PID=",
	}})

	p := s.StartRelay()
	until("READY=1")
	until("STATUS=owner of watcher ")
	until("WATCHDOG=1")
	until("WATCHDOG=1")
	p.Terminate()
	until("STOPPING=1")
}
