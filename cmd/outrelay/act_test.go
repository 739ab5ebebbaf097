package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"go.mongodb.org/mongo-driver/v2/mongo"
)

func TestConfirm(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, typed     string
		yes, asks, json bool
		// want is a part of the error, or empty if there is no error.
		want string
	}{
		{name: "with --yes", yes: true},
		{name: "no terminal", want: "this would discard 7 letters; pass --yes"},
		{name: "json has no question", asks: true, json: true, want: "pass --yes"},
		{name: "typed", asks: true, typed: "Yes \n"},
		{name: "declined", asks: true, typed: "y\n", want: errUnconfirmed.Error()},
		{name: "end of input", asks: true, want: errUnconfirmed.Error()},
	} {
		var errOut bytes.Buffer
		a := &operatorCommand{p: &program{in: strings.NewReader(c.typed), errOut: &errOut}, yes: c.yes, interactive: c.asks, json: c.json}
		err := a.confirm(t.Context(), "discard 7 letters")
		if got := fmt.Sprint(err); c.want == "" && err != nil || c.want != "" && !strings.Contains(got, c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		if confirmed := strings.Contains(errOut.String(), "discard 7 letters"); confirmed != (c.asks && !c.json) {
			t.Errorf("%s: printed %q", c.name, errOut.String())
		}
	}

	in, typed := io.Pipe()
	defer typed.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a := &operatorCommand{p: &program{in: in, errOut: io.Discard}, interactive: true}
	if err := a.confirm(ctx, "wait"); !errors.Is(err, errUnconfirmed) {
		t.Errorf("interrupted: %v", err)
	}
}

func TestActingFlagsAndShow(t *testing.T) {
	t.Parallel()
	var out, errOut bytes.Buffer
	p := &program{in: strings.NewReader(""), out: &out, errOut: &errOut}
	var a *operatorCommand
	c := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return nil }}
	a = p.addChangeFlags(c)
	c.SetArgs([]string{"--json", "--dry-run", "-y", "--actor", "ann"})
	if err := c.Execute(); err != nil || !a.json || !a.dryRun || !a.yes || a.actorName() != "ann" || a.interactive || a.limit != 0 {
		t.Fatalf("%+v, %v", a, err)
	}

	people := func(w io.Writer) { fmt.Fprint(w, "people") }
	if err := a.printResult(map[string]int{"n": 1}, people); err != nil || strings.Join(strings.Fields(out.String()), "") != `{"n":1}` || errOut.Len() > 0 {
		t.Errorf("%v: %q %q", err, out.String(), errOut.String())
	}

	a.json, a.actor = false, ""
	out.Reset()
	if err := a.printResult(nil, people); err != nil || out.String() != "people" || errOut.Len() > 0 || a.actorName() == "" {
		t.Errorf("%v: %q %q", err, out.String(), errOut.String())
	}
}

func TestProgressDrawsOnATerminalOnly(t *testing.T) {
	t.Parallel()
	for _, draws := range []bool{false, true} {
		var errOut bytes.Buffer
		a := &operatorCommand{p: &program{errOut: &errOut}, onTerminal: draws}
		b := a.startProgress("requeueing", 10)
		b.setDone(10)
		b.clear()
		b.clear()
		if drawn := strings.Contains(errOut.String(), "requeueing"); drawn != draws {
			t.Errorf("on a terminal %v: %q", draws, errOut.String())
		}

		a.json = true
		errOut.Reset()
		b = a.startProgress("requeueing", -1)
		b.setDone(1)
		b.clear()
		if errOut.Len() > 0 {
			t.Errorf("next to JSON: %q", errOut.String())
		}
	}
}

func TestTableCleansAndAlignsItsCells(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	writeTable(&b, "A\tB", []cells{{"x\ty\n\x1b[31m", 1}, {"", 22}}, func(row cells) cells { return row })
	want := "A         B\nx y  [31m  1\n-         22\n"
	if lines := strings.Split(b.String(), "\n"); len(lines) != 4 || strings.ContainsAny(b.String(), "\t\x1b") {
		t.Errorf("%q, want about %q", b.String(), want)
	}
}

func TestCountsAndTimes(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0 letters", 1: "1 letter", 999: "999 letters", 1204: "1,204 letters", 1234567: "1,234,567 letters", -1000: "-1,000 letters"} {
		if got := countNoun(n, "letter"); got != want {
			t.Errorf("%d: %q, want %q", n, got, want)
		}
	}

	now := time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"": {}, "2h": now.Add(-2 * time.Hour), "2026-11-20T08:00Z": now.Add(-4 * time.Hour), "2026-11-20T09:00:00+01:00": now.Add(-4 * time.Hour),
		"2026-11-20T08:00": now.Add(-4 * time.Hour), "2026-11-20": now.Add(-12 * time.Hour),
	} {
		if got, err := parsePastTime(text, now); err != nil || !got.Equal(want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}

	for _, text := range []string{"yesterday", "-2h", "8"} {
		var c cobra.Command
		addTimeFlag(&c, &now, "from", "", parsePastTime)
		if err := c.ParseFlags([]string{"--from", text}); err == nil || !strings.Contains(err.Error(), "--from") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

func TestOutcomeOfAnAction(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]int{
		nil: exitOK, errors.New("rejected"): exitConfig, context.DeadlineExceeded: exitTemporary, context.Canceled: exitTemporary,
		fmt.Errorf("x: %w", mongo.CommandError{Code: 10107}): exitTemporary, error(&mongo.CommandError{Code: 13}): exitConfig,
	} {
		if got := exitCode(classifyError(err)); got != want {
			t.Errorf("%v: %d, want %d", err, got, want)
		}
	}
}
