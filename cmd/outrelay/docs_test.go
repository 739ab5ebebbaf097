package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/outrelay/outrelay/test/generated"
)

// docs/cli.md is the current output of the command.
func TestTheReferenceOfCommandsIsCurrent(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "cli.md")
	if code, out, errOut := runCommand(t, []string{"OUTRELAY_CONFIG=/somewhere"}, "docs", "--markdown", file); code != exitOK || out != "" || errOut != "" {
		t.Fatalf("exit code %d, stdout %q, stderr %q", code, out, errOut)
	}

	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	generated.Check(t, "docs/cli.md", string(got))
	if code, out, _ := runCommand(t, nil, "docs", "--markdown", "-"); code != exitOK || out != string(got) {
		t.Errorf("on standard output: %d, %d bytes of %d", code, len(out), len(got))
	}
	if code, _, _ := runCommand(t, nil, "docs"); code != exitConfig {
		t.Errorf("without flags: %d", code)
	}
}

// Each command has a manual page, a completion in each shell, and a description.
func TestEveryCommandIsDocumented(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "man1")
	if code, _, errOut := runCommand(t, nil, "docs", "--man", dir); code != exitOK {
		t.Fatalf("exit code %d, stderr %q", code, errOut)
	}

	text, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}

	n := 0
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}

		n++
		page, err := os.ReadFile(filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1"))
		if err != nil || !bytes.Contains(page, []byte(`.TH "OUTRELAY" "1" "Jan 2026" "outrelay `+thisBuild().Version+`"`)) {
			t.Errorf("manual page of %s: %v", c.CommandPath(), err)
		}
		if c.HasParent() && !strings.Contains(string(text), "# "+c.CommandPath()+"\n") {
			t.Errorf("%s is not in the reference", c.CommandPath())
		}
		if c.Short == "" || strings.HasSuffix(c.Short, " ") {
			t.Errorf("%s: %q", c.CommandPath(), c.Short)
		}

		for _, sub := range c.Commands() {
			visit(sub)
		}
	}

	visit(newReferenceRoot())
	if n < 50 {
		t.Errorf("%d commands", n)
	}

	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if code, out, _ := runCommand(t, nil, "completion", shell); code != exitOK || len(out) < 1000 {
			t.Errorf("%s: %d", shell, code)
		}
	}
}

// Each command has a row in the table of operations.md.
func TestTheOperationsPageNamesEveryCommand(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}

	for _, c := range newReferenceRoot().Commands() {
		if c.Hidden || c.Name() == "help" {
			continue
		}
		if !strings.Contains(string(text), "outrelay "+c.Name()) && !strings.Contains(string(text), "`"+c.Name()) {
			t.Errorf("operations.md does not name outrelay %s", c.Name())
		}
	}
}
