package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/outrelay/outrelay/internal/operate/admin"
)

// The exit codes.
const (
	exitOK        = 0
	exitConfig    = 1  // the same command fails again
	exitTemporary = 75 // EX_TEMPFAIL: a later attempt may succeed
)

// exitRow is a row of the table of exit codes.
type exitRow struct {
	code              int
	meaning, examples string
}

// exitTable returns the exit codes of all commands. docs/cli.md contains it.
func exitTable() []exitRow {
	return []exitRow{
		{exitOK, "success", "also: a condition matched nothing, or Ctrl-C ended `run` or `--follow`"},
		{
			exitConfig, "rejected; the same command fails again",
			"wrong configuration, password or command line; an id or name that does not exist; a missing privilege; " +
				"no confirmation; only a part was done; a failed check of `doctor`, a failure in `status --check`, `nodes --check`; " +
				"`setup` left something missing; `lookup` found nothing; `run` with a state database of others",
		},
		{
			exitTemporary, "a later attempt may succeed",
			"MongoDB or Kafka do not respond, or have no primary or no leader; `run` cannot reach MongoDB at start; " +
				"interrupted before the end",
		},
	}
}

// writeExitTable writes the table of exit codes as Markdown.
func writeExitTable(out io.Writer) {
	fmt.Fprint(out, "| code | meaning | examples |\n|---|---|---|\n")
	for _, r := range exitTable() {
		fmt.Fprintf(out, "| %d | %s | %s |\n", r.code, r.meaning, r.examples)
	}
}

// codeError is an error with an explicit exit code.
type codeError struct {
	code int
	err  error
}

func (e *codeError) Error() string { return e.err.Error() }
func (e *codeError) Unwrap() error { return e.err }

// markTemporary wraps err so that the process exits with 75: a later attempt may succeed. It returns
// nil for nil.
func markTemporary(err error) error {
	if err == nil {
		return nil
	}
	return &codeError{exitTemporary, err}
}

// reportedError is a failure that the command has printed already. It only sets the exit code.
type reportedError int

func (s reportedError) Error() string { return fmt.Sprintf("exit code %d", int(s)) }

// exitCode returns the exit code of an error of a command.
func exitCode(err error) int {
	if err == nil {
		return exitOK
	}

	var coded *codeError
	if errors.As(err, &coded) {
		return coded.code
	}
	var reported reportedError
	if errors.As(err, &reported) {
		return int(reported)
	}
	return exitConfig
}

// classifyError adds the next step to an error of a command that uses the state database, and marks it as
// temporary if a later attempt may succeed.
func classifyError(err error) error {
	if err == nil || errors.As(err, new(*codeError)) || errors.As(err, new(reportedError)) {
		return err
	}
	if errors.Is(err, context.Canceled) {
		return markTemporary(err)
	}

	kind, fix := admin.Explain(err)
	if kind == admin.FailUnavailable {
		if admin.IsUnreachable(err) {
			return markTemporary(errUnreachable)
		}
		return markTemporary(err)
	}
	if fix != "" && kind == admin.FailForbidden {
		err = fmt.Errorf("%w; %s", err, fix)
	}
	return err
}

// errUnreachable replaces the error of the driver, which describes the topology and not the cause.
var errUnreachable = errors.New("MongoDB did not respond in time; run `outrelay doctor` to find the cause")
