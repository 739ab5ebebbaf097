package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// once is the start of a test package. Its function first returns true only in the first of two runs.
const once = `package x

import (
	"flag"
	"os"
	"testing"
)

var given = flag.String("x.given", "", "")

func first() bool {
	_, err := os.Stat("was-run")
	_ = os.WriteFile("was-run", nil, 0o644)
	return err != nil
}

func TestOther(t *testing.T) { t.Log("a line of a test that passes") }
`

func TestOnlyATestThatFailsTwiceFailsTheRun(t *testing.T) {
	t.Parallel()
	program := filepath.Join(t.TempDir(), "rerun")
	if words, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("building rerun: %v\n%s", err, words)
	}

	for name, c := range map[string]struct {
		test       string
		code       int
		wantOutput string
		unwanted   string
	}{
		"good":   {`func TestX(t *testing.T) {}`, 0, "ok  \texample.com/x", "FLAKY"},
		"flaky":  {`func TestX(t *testing.T) { t.Run("sub", func(t *testing.T) { if *given != "1" || first() { t.Error("not this time") } }) }`, 0, "FLAKY example.com/x.TestX", "a line of a test that passes"},
		"broken": {`func TestX(t *testing.T) { t.Error("never") }`, 1, "FAILED example.com/x.TestX", "FLAKY"},
		"panic":  {`func TestX(t *testing.T) { if first() { panic("x") } }`, 1, "FAILED example.com/x: panic", "FLAKY"},
		"hangs":  {`func TestX(t *testing.T) { if first() { select {} } }`, 1, "FAILED example.com/x: panic or timeout", "FLAKY"},
		"race": {`func TestX(t *testing.T) { os.Stdout.WriteString("WARNING: DATA RACE\nwhere it is\n") }
			func TestY(t *testing.T) { t.Error("race detected") }`, 1, "where it is", "FLAKY"},
		"build": {`func TestX(t *testing.T) { absent() }`, 1, "FAILED example.com/x: build failed", "FLAKY"},
		"main":  {`func TestMain(m *testing.M) { m.Run(); if first() { os.Exit(1) } }`, 1, "although none of its tests did", "FLAKY"},
		"cut": {`func TestX(t *testing.T) { if first() { t.Error("not this time") } }
			func TestY(t *testing.T) { os.Exit(1) }`, 1, "FAILED example.com/x: it ended before TestY did", "FLAKY"},
		"many":    {"func TestX(t *testing.T) { t.Error() }\n" + manyTests(), 1, "too many to be run again", "FLAKY"},
		"skipped": {`func TestX(t *testing.T) { t.Skip("why") }`, 0, "1 passed, 0 failed, 1 skipped", "FLAKY"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			for file, text := range map[string]string{"go.mod": "module example.com/x\n\ngo 1.26\n", "x_test.go": once + c.test + "\n"} {
				if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}

			// A busy machine starts a package late, and only one of them has to reach its timeout.
			timeout := "60s"
			if name == "hangs" {
				timeout = "10s"
			}
			cmd := exec.CommandContext(t.Context(), program, "-timeout", timeout, "--", ".", "-args", "-x.given=1")
			cmd.Dir = dir
			out, _ := cmd.CombinedOutput()
			if code := cmd.ProcessState.ExitCode(); code != c.code || !strings.Contains(string(out), c.wantOutput) || strings.Contains(string(out), c.unwanted) {
				t.Errorf("exit code %d, want %d; output must contain %q and not %q:\n%s", code, c.code, c.wantOutput, c.unwanted, out)
			}
		})
	}
}

// manyTests returns more failing tests than rerun runs again.
func manyTests() string {
	var b strings.Builder
	for i := range maxReruns {
		b.WriteString("func TestMany" + string(rune('A'+i)) + "(t *testing.T) { t.Error() }\n")
	}
	return b.String()
}
