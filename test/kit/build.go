//go:build unix

package kit

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/devstack/stacktest"
)

// programs holds the programs of this test process, by their build tags.
var programs struct {
	sync.Mutex
	dir   string
	paths map[string]string
}

// Main runs the tests of a package, six at a time because most of their time is waiting for leases to expire and beside no
// other package that calls it, and removes the programs that they built. No goroutine may be left.
func Main(m *testing.M) {
	stacktest.Wide(6)
	stacktest.Alone()
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find), goleak.Cleanup(func(code int) {
		if programs.dir != "" {
			_ = os.RemoveAll(programs.dir)
		}
		os.Exit(code)
	}))
}

// Binary is the path of the outrelay program, built with tags ("" for none).
func Binary(tb testing.TB, tags string) string {
	tb.Helper()
	programs.Lock()
	defer programs.Unlock()
	if p := programs.paths[tags]; p != "" {
		return p
	}
	p, err := buildProgram(tags)
	if err != nil {
		tb.Fatal(err)
	}
	if programs.paths == nil {
		programs.paths = map[string]string{}
	}
	programs.paths[tags] = p
	return p
}

func buildProgram(tags string) (string, error) {
	root, err := findModuleRoot()
	if err != nil {
		return "", err
	}
	if programs.dir == "" {
		if programs.dir, err = os.MkdirTemp("", "outrelay-test-"); err != nil {
			return "", err
		}
	}
	name := "outrelay"
	if tags != "" {
		name += "-" + tags
	}
	out := filepath.Join(programs.dir, name)
	cmd := exec.Command("go", "build", "-tags", tags, "-o", out, "./cmd/outrelay")
	cmd.Dir = root
	if words, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building outrelay: %w\n%s", err, words)
	}
	return out, nil
}

func findModuleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		up := filepath.Dir(dir)
		if up == dir {
			return "", fmt.Errorf("no go.mod above %s", dir)
		}
		dir = up
	}
}
