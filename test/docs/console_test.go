//go:build unix

package docs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/outrelay/outrelay/internal/devstack"
	"github.com/outrelay/outrelay/internal/devstack/stacktest"
	"github.com/outrelay/outrelay/test/kit"
)

func TestMain(m *testing.M) { kit.Main(m) }

// block is a console block that is executed.
type block struct {
	file     string
	commands []string
}

var (
	markedBlock = regexp.MustCompile("(?ms)^ *<!-- run -->\n+ *```console\n(.*?)^ *```")
	anyMark     = regexp.MustCompile(`(?m)^ *<!-- run`)
	command     = regexp.MustCompile(`(?m)^ *\$ (.*)$`)
)

// findBlocks returns the marked console blocks of a page, in order.
func findBlocks(t *testing.T, name string) (blocks []block) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	found := markedBlock.FindAllStringSubmatch(string(text), -1)
	if marks := anyMark.FindAllString(string(text), -1); len(marks) != len(found) {
		t.Errorf("%s: %d marks, but %d console blocks follow one", name, len(marks), len(found))
	}

	for _, m := range found {
		b := block{file: name}
		for _, c := range command.FindAllStringSubmatch(m[1], -1) {
			b.commands = append(b.commands, c[1])
		}
		if len(b.commands) == 0 {
			t.Errorf("%s: a marked block without a command:\n%s", name, m[1])
		}
		blocks = append(blocks, b)
	}
	return blocks
}

// The marked console blocks of the documentation run against real servers, relays and events, page after page. Each
// command has to end with 0.
func TestConsoleBlocksRun(t *testing.T) {
	t.Parallel()
	var blocks []block
	for _, pattern := range []string{"../../README.md", "../../docs/*.md", "../../docs/*/*.md"} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range files {
			blocks = append(blocks, findBlocks(t, name)...)
		}
	}
	if len(blocks) < 6 {
		t.Fatalf("only %d marked blocks", len(blocks))
	}

	shell := startDemo(t)
	for _, b := range blocks {
		for _, c := range b.commands {
			if out, err := shell(c); err != nil {
				t.Errorf("%s: $ %s: %v\n%s", filepath.Base(b.file), c, err, out)
			}
		}
	}
}

// startDemo starts `outrelay dev` on the shared servers. It returns a function that runs a command of a reader: outrelay is
// on the PATH, and the configuration is that of the demo.
func startDemo(t *testing.T) func(command string) (output string, err error) {
	t.Helper()
	binary := kit.Binary(t, "")
	env := []string{devstack.EnvMongoDB + "=" + stacktest.MongoURI(t), devstack.EnvKafka + "=" + strings.Join(stacktest.Brokers(t), ",")}
	dev := kit.Launch(t, "dev", binary, env, "dev", "--keep", "--rate", "20")
	fields := strings.Fields(dev.WaitForLog(" status --config "))
	dev.WaitForLog("  all ready  ")
	dev.WaitForLog(" events ")
	t.Cleanup(func() {
		dev.Terminate()
		if code := dev.WaitExit(); code != 0 {
			t.Errorf("exit code %d of dev", code)
		}
	})

	dir := t.TempDir()
	if err := os.Symlink(binary, filepath.Join(dir, "outrelay")); err != nil {
		t.Fatal(err)
	}
	return func(command string) (string, error) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), kit.Patience, fmt.Errorf("not over after %v", kit.Patience))
		defer cancel()
		c := exec.CommandContext(ctx, "sh", "-euc", command)
		c.Dir = dir
		c.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "OUTRELAY_CONFIG="+fields[len(fields)-1])
		out, err := c.CombinedOutput()
		if cause := context.Cause(ctx); err != nil && cause != nil {
			err = cause
		}
		return string(out), err
	}
}

// The test distinguishes a mark without a block from a block without a mark.
func TestMarkedBlocksAreFound(t *testing.T) {
	t.Parallel()
	page := filepath.Join(t.TempDir(), "page.md")
	text := "<!-- run -->\n```console\n$ outrelay a   # why\noutput\n$ outrelay b\n```\n\n```console\n$ outrelay c\n```\n\n1. In a list:\n\n    <!-- run -->\n    ```console\n    $ outrelay d\n    ```\n"
	if err := os.WriteFile(page, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, b := range findBlocks(t, page) {
		all = append(all, b.commands...)
	}
	if got, want := strings.Join(all, ";"), "outrelay a   # why;outrelay b;outrelay d"; got != want {
		t.Errorf("commands %q, want %q", got, want)
	}
}
