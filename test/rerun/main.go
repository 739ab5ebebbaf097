// Rerun runs go test and runs each test that failed once more, alone. A test that passes then is printed as FLAKY and fails
// nothing; a test that fails twice fails the run. It is what CI uses: on a loaded machine a few of a thousand tests with real
// servers wait too long, and one of them must not hide whether a change is good.
//
//	rerun [FLAG of go test]... -- PACKAGE... [-args FLAG of the tests...]
//
// A build failure, a panic, a data race, a time-out, a package that fails although none of its tests did (goroutines that are
// left behind), and more than ten failed tests fail the run at once: they have a reason.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

// mostReruns is how many failed tests may be a matter of load.
const mostReruns = 10

func main() {
	flags, packages, args, err := split(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "rerun:", err)
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	good := check(ctx, os.Stdout, flags, packages, args)
	stop()
	if !good {
		os.Exit(1)
	}
}

// split takes the command line apart: flags of go test, packages, and -args with the flags of the tests.
func split(line []string) (flags, packages, args []string, err error) {
	i := slices.Index(line, "--")
	if i < 0 || i+1 == len(line) {
		return nil, nil, nil, errors.New("usage: rerun [FLAG of go test]... -- PACKAGE... [-args FLAG of the tests...]")
	}
	flags, packages = line[:i], line[i+1:]
	if i := slices.Index(packages, "-args"); i >= 0 {
		packages, args = packages[:i], packages[i:]
	}
	return flags, packages, args, nil
}

// check runs the tests and those that fail once more, and reports whether nothing failed for a reason.
func check(ctx context.Context, out io.Writer, flags, packages, args []string) bool {
	first := newRun(out)
	ok := first.goTest(ctx, slices.Concat(flags, packages, args))
	failures, reasons := first.failures()
	if ok && failures == 0 && len(reasons) == 0 {
		fmt.Fprintln(out, first.counts(0))
		return true
	}
	if failures > mostReruns {
		reasons = append(reasons, fmt.Sprintf("%d tests failed: too many to be run again", failures))
	}
	if !ok && failures == 0 && len(reasons) == 0 {
		reasons = append(reasons, "go test failed")
	}

	var flaky []string
	if len(reasons) == 0 {
		flaky, reasons = first.again(ctx, flags, args)
	}
	for _, name := range flaky {
		fmt.Fprintf(out, "FLAKY %s: failed, and passed when it was run again\n", name)
	}
	for _, why := range reasons {
		fmt.Fprintf(out, "FAILED %s\n", why)
	}
	fmt.Fprintln(out, first.counts(len(flaky)))
	return len(reasons) == 0
}

// event is a line of go test -json.
type event struct {
	Action, Package, Test, Output, FailedBuild string
}

// run is what a run of go test has shown.
type run struct {
	out             io.Writer
	packages        map[string]*pkg
	names           []string // of packages, as they ended
	passed, skipped int      // tests, without their subtests
}

type pkg struct {
	out    io.Writer
	output map[string][]string // by test, without subtests; "" is the package's own
	failed []string            // tests, without their subtests
	reason string              // it failed for a reason that is not a failed test
}

func newRun(out io.Writer) *run { return &run{out: out, packages: map[string]*pkg{}} }

// goTest runs go test -json and prints what go test would print without it. It reports whether go test ended with 0.
func (r *run) goTest(ctx context.Context, line []string) bool {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, line...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "rerun:", err)
		return false
	}
	lines := bufio.NewReader(out)
	for {
		text, err := lines.ReadString('\n')
		var e event
		if text != "" && json.Unmarshal([]byte(text), &e) == nil {
			r.take(e)
		} else {
			fmt.Fprint(r.out, text)
		}
		if err != nil {
			break
		}
	}
	return cmd.Wait() == nil
}

// take handles one event.
func (r *run) take(e event) {
	if e.Package == "" { // the output of a build
		fmt.Fprint(r.out, e.Output)
		return
	}
	p := r.packages[e.Package]
	if p == nil {
		p = &pkg{out: r.out, output: map[string][]string{}}
		r.packages[e.Package] = p
	}
	test, _, sub := strings.Cut(e.Test, "/")
	switch {
	case e.Action == "output":
		p.take(test, e.Output)
	case e.Test == "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
		r.names = append(r.names, e.Package)
		p.end(e)
	case sub || e.Test == "":
		// Only tests as a whole are run again, and the output of subtests is printed with them.
	case e.Action == "fail":
		p.failed = append(p.failed, test)
		p.print(test)
	case e.Action == "pass":
		r.passed++
		p.printRace(test)
		delete(p.output, test)
	case e.Action == "skip":
		r.skipped++
		delete(p.output, test)
	}
}

// take keeps a line of output until its test, or the package, has ended.
func (p *pkg) take(test, line string) {
	switch {
	case strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: "):
		p.reason = "panic or time-out"
	case isRace(line):
		p.reason = "data race"
	case strings.HasPrefix(line, "=== ") || test == "" && line == "PASS\n":
		return // go test prints these with -v only
	}
	p.output[test] = append(p.output[test], line)
}

// printRace prints the output of a test that passed if it contains a report of the race detector: go test puts the report into
// the output of whichever test wrote last, which need not be the test that it fails.
func (p *pkg) printRace(test string) {
	if slices.ContainsFunc(p.output[test], isRace) {
		p.print(test)
	}
}

func isRace(line string) bool { return strings.HasPrefix(line, "WARNING: DATA RACE") }

func (p *pkg) print(test string) {
	fmt.Fprint(p.out, strings.Join(p.output[test], ""))
	delete(p.output, test)
}

// end prints what is left when the package has ended, also of tests that a panic has cut short.
func (p *pkg) end(e event) {
	if e.Action == "fail" {
		for test := range p.output {
			if test != "" {
				p.print(test)
			}
		}
		if e.FailedBuild != "" {
			p.reason = "build failed"
		} else if len(p.failed) == 0 && p.reason == "" {
			p.reason = "the package failed, although none of its tests did"
		}
	}
	p.print("")
}

// failures returns the number of failed tests, and the packages that failed for a reason.
func (r *run) failures() (n int, reasons []string) {
	for _, name := range r.names {
		p := r.packages[name]
		n += len(p.failed)
		if p.reason != "" {
			reasons = append(reasons, name+": "+p.reason)
		}
	}
	return n, reasons
}

// again runs the failed tests once more, by name and each package alone.
func (r *run) again(ctx context.Context, flags, args []string) (flaky, reasons []string) {
	for _, name := range r.names {
		failed := r.packages[name].failed
		if len(failed) == 0 {
			continue
		}
		fmt.Fprintf(r.out, "\nrunning again: %s %s\n", name, strings.Join(failed, " "))
		second := newRun(r.out)
		ok := second.goTest(ctx, slices.Concat(flags, []string{"-count=1", "-run", "^(" + strings.Join(failed, "|") + ")$", name}, args))
		for _, test := range failed {
			switch {
			case ok && second.passed == len(failed):
				flaky = append(flaky, name+"."+test)
			default:
				reasons = append(reasons, name+"."+test+": failed, and not all tests passed when they were run again")
			}
		}
	}
	return flaky, reasons
}

// counts is the closing line.
func (r *run) counts(flaky int) string {
	failed, _ := r.failures()
	return fmt.Sprintf("%d passed, %d failed, %d skipped", r.passed+flaky, failed-flaky, r.skipped)
}
