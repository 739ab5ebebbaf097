package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

// manDate stands in the manual pages instead of the day on which they were made, so that one build makes the same pages
// always.
var manDate = time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC)

func newDocsCommand(p *program) *cobra.Command {
	var man, markdown string
	c := &cobra.Command{
		Use:   "docs",
		Short: "Write the manual pages, or the reference of all commands",
		Long: `Write a manual page for each command into a directory, for man and for packages, or all commands as one Markdown document.
Both are made from the commands themselves. Completions of shells come from outrelay completion.`,
		Example: `  outrelay docs --man /usr/local/share/man/man1
  outrelay docs --markdown docs/cli.md`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if man == "" && markdown == "" {
				return errors.New("docs takes --man or --markdown")
			}
			root := newReferenceRoot()
			if man != "" {
				if err := writeMan(root, man); err != nil {
					return err
				}
			}
			if markdown == "" {
				return nil
			}
			var b bytes.Buffer
			writeReference(&b, root)
			if markdown == "-" {
				_, err := p.out.Write(b.Bytes())
				return err
			}
			if err := os.WriteFile(markdown, b.Bytes(), 0o644); err != nil { //nolint:gosec // a document for everybody
				return fmt.Errorf("--markdown: %w", err)
			}
			return nil
		},
	}
	c.Flags().StringVar(&man, "man", "", "write manual pages of section 1 into this `directory`")
	c.Flags().StringVar(&markdown, "markdown", "", "write the reference into this `file`; - is standard output")
	return c
}

// newReferenceRoot are all commands as they are on any machine: nothing of the environment shows in them.
func newReferenceRoot() *cobra.Command {
	root := newRootCommand(&program{in: strings.NewReader(""), out: io.Discard, errOut: io.Discard})
	root.InitDefaultCompletionCmd()
	root.DisableAutoGenTag = true
	return root
}

func writeMan(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // likewise
		return fmt.Errorf("--man: %w", err)
	}
	date := manDate
	header := &doc.GenManHeader{Title: "OUTRELAY", Section: "1", Source: "outrelay", Manual: "outrelay", Date: &date}
	if err := doc.GenManTree(root, header, filepath.Clean(dir)); err != nil {
		return fmt.Errorf("--man: %w", err)
	}
	return nil
}

// writeReference writes all commands as one document.
func writeReference(w io.Writer, root *cobra.Command) {
	fmt.Fprint(w, `# Commands

Made by `+"`outrelay docs --markdown docs/cli.md`"+` from the commands themselves; `+"`outrelay docs --man DIR`"+` makes manual pages,
`+"`outrelay completion bash|zsh|fish|powershell`"+` completions. What to do with them: [operations.md](operations.md).

Text for people goes to standard error, documents for programs (`+"`--json`"+`, YAML, completions) to standard output. The first
Ctrl-C or SIGTERM ends gracefully, the second at once.

## Exit codes

| code | means | such as |
|---|---|---|
| 0 | done | also: nothing was to be done, `+"`--watch` and `--follow`"+` were ended by Ctrl-C |
| 1 | refused, or not all of it is well | wrong configuration or command line, a missing privilege, a question answered with no; a failed check of `+"`doctor`, `status --check`, `nodes --check`, `migrate verify`"+`; `+"`lookup`"+` found nothing; `+"`run`"+` of a version that is too old |
| 75 | it may work later | MongoDB or Kafka do not answer, an election, a migration waits for nodes of older versions; ended before everything was done |

## Flags of every command
`)
	writeFlags(w, root.PersistentFlags())
	for _, c := range root.Commands() {
		writeCommand(w, c)
	}
}

func writeCommand(w io.Writer, c *cobra.Command) {
	if c.Hidden || c.Name() == "help" {
		return
	}
	level := "##"
	if c.Parent() != c.Root() {
		level = "###"
	}
	fmt.Fprintf(w, "\n%s %s\n\n%s.\n", level, c.CommandPath(), strings.TrimSuffix(c.Short, "."))
	if long := strings.TrimSpace(c.Long); long != "" && c.Name() != "completion" && c.Parent().Name() != "completion" {
		fmt.Fprintf(w, "\n%s\n", escapeHTML(long))
	}
	if c.Runnable() {
		fmt.Fprintf(w, "\n```text\n%s\n```\n", c.UseLine())
	}
	if c.Example != "" {
		fmt.Fprintf(w, "\n```console\n%s\n```\n", strings.ReplaceAll("$"+strings.TrimPrefix(c.Example, " "), "\n  ", "\n$ "))
	}
	writeFlags(w, c.LocalNonPersistentFlags())
	for _, sub := range c.Commands() {
		writeCommand(w, sub)
	}
}

func writeFlags(w io.Writer, flags *pflag.FlagSet) {
	head := "\n| flag | |\n|---|---|\n"
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		kind, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if kind != "" {
			name += " " + kind
		}
		if !isZeroDefault(f.DefValue) {
			usage += " (default " + f.DefValue + ")"
		}
		fmt.Fprint(w, head)
		head = ""
		fmt.Fprintf(w, "| `%s` | %s |\n", name, escapeHTML(strings.ReplaceAll(usage, "|", `\|`)))
	})
}

// isZeroDefault reports whether a default says nothing: the zero of its kind.
func isZeroDefault(value string) bool {
	switch value {
	case "", "[]", "false", "0", "0s":
		return true
	}
	return false
}

// escapeHTML keeps what looks like HTML from being taken for it.
func escapeHTML(text string) string { return strings.ReplaceAll(text, "<", "&lt;") }
