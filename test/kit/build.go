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

// programs holds the built programs of this test process, by build tags.
var programs struct {
	sync.Mutex
	dir   string
	paths map[string]string
}

// Main runs the tests of a package and removes the programs that they built. Six tests run in parallel,
// because they mostly wait for leases to expire. Packages that call Main do not run at the same time.
// Main fails if goroutines are left.
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

// Binary builds the outrelay program with tags ("" for none) on the first call, and returns its path.
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
	// Without tables for debuggers, which no test needs, linking takes half the time.
	cmd := exec.Command("go", "build", "-tags", tags, "-ldflags", "-s -w", "-o", out, "./cmd/outrelay")
	cmd.Dir = root
	if output, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building outrelay: %w\n%s", err, output)
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
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("no go.mod above %s", dir)
		}
		dir = parent
	}
}
