//go:build unix

package kit

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack/stacktest"
)

var (
	// program builds the outrelay program once and returns its path.
	program    = sync.OnceValues(buildProgram)
	programDir string
)

// Tests that need many seconds of both cores pass this flag to stacktest.OnlyWith, so that the others end in ten minutes.
var _ = flag.Bool("slow", false, "run the slow tests as well, as .ci/run does")

// Main is MainBeside for a package that keeps both cores busy: such packages do not run at the same time.
func Main(m *testing.M) {
	stacktest.Alone()
	MainBeside(m)
}

// MainBeside runs the tests of a package and removes the program that they built. Seven tests run in parallel,
// because they mostly wait for leases to expire. It fails if goroutines are left.
func MainBeside(m *testing.M) {
	stacktest.Wide(7)
	// A proxy that is closed while it passes data on leaves a goroutine of its library.
	ofProxy := goleak.IgnoreAnyFunction("github.com/Shopify/toxiproxy/v2/toxics.(*NoopToxic).Pipe")
	goleak.VerifyTestMain(stacktest.Settled(m, goleak.Find), ofProxy, goleak.Cleanup(func(code int) {
		if programDir != "" {
			_ = os.RemoveAll(programDir)
		}
		os.Exit(code)
	}))
}

// BinaryVersion is the version with which Binary links the program.
const BinaryVersion = "9.8.7-test.1"

// Binary builds the outrelay program, with a version and its crash points, on the first call, and returns its path.
func Binary(tb testing.TB) string {
	tb.Helper()
	path, err := program()
	if err != nil {
		tb.Fatal(err)
	}
	return path
}

func buildProgram() (string, error) {
	var err error
	if programDir, err = os.MkdirTemp("", "outrelay-test-"); err != nil {
		return "", err
	}
	return buildInto(filepath.Join(programDir, "outrelay"))
}

// buildInto builds the program out, with more flags of the compiler, and returns out.
func buildInto(out string, more ...string) (string, error) {
	root, err := findModuleRoot()
	if err != nil {
		return "", err
	}

	// Without tables for debuggers, which no test needs, linking takes half the time.
	flags := "-s -w -X main.version=" + BinaryVersion + " -X github.com/outrelay/outrelay/internal/base/crash.enabled=yes"
	cmd := exec.Command("go", slices.Concat([]string{"build"}, more, []string{"-ldflags", flags, "-o", out, "./cmd/outrelay"})...)
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
