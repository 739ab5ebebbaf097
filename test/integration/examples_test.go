//go:build unix

package integration

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

// The example from end to end: two relays and two instances of each program. One instance of each is killed
// with -9. The example exits with 0 only if each order had each effect once and in order, and leaves no process
// running.
func TestExampleOrders(t *testing.T) {
	t.Parallel()
	client := stacktest.Client(t)
	db := stacktest.Database(t, client)
	// The relays have a state database of their own.
	relay := client.Database(db.Name() + "_relay")
	t.Cleanup(func() { _ = relay.Drop(context.WithoutCancel(t.Context())) })
	program := filepath.Join(t.TempDir(), "orders")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/outrelay/outrelay/examples/orders")
	if words, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, words)
	}

	ctx, cancel := kit.Context(t)
	defer cancel()
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, program, "-orders", "100", "-json")
	cmd.Env = append(os.Environ(),
		devstack.EnvMongoDB+"="+stacktest.MongoURI(t), devstack.EnvKafka+"="+strings.Join(stacktest.Brokers(t), ","),
		"SHOP_DATABASE="+db.Name(), "SHOP_TOPICS="+db.Name()+".")

	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v\n%s%s", err, out.String(), errOut.String())
	}

	var a map[string]float64
	if err := json.Unmarshal(out.Bytes(), &a); err != nil {
		t.Fatal(err)
	}

	for field, want := range map[string]float64{
		"orders": 100, "paid": 90, "cancelled": 10, "charges": 100, "view_placed": 100, "view_paid": 90, "view_cancel": 10, "out_of_order": 0,
	} {
		if a[field] != want {
			t.Errorf("%s is %v, want %v", field, a[field], want)
		}
	}

	if n := strings.Count(errOut.String(), "killed with -9"); n != 4 {
		t.Errorf("%d processes were killed\n%s", n, errOut.String())
	}

	for _, line := range strings.Split(errOut.String(), "\n") {
		_, text, ok := strings.Cut(line, " pid ")
		if pid, err := strconv.Atoi(text); ok && (err != nil || syscall.Kill(pid, 0) != syscall.ESRCH) {
			t.Errorf("still running: %s, %v", line, err)
		}
	}

	t.Logf("%s%s", errOut.String(), out.String())
}
