// Rerun runs go test, and runs each failed test once more, alone. If the test then passes, it is
// printed as FLAKY and does not fail the run. If it fails twice, the run fails. CI uses this program:
// on a loaded machine, a few of a thousand tests with real servers exceed their time limits, and such a
// test must not hide whether a change is good.
//
//	rerun [FLAG of go test]... -- PACKAGE... [-args FLAG of the tests...]
//
// Some failures do not depend on load and fail the run at once: a build failure, a panic, a data race,
// a timeout, a package that ends before its tests do (for example because it was killed), one that fails although all its tests pass
// (for example because of leaked goroutines), and more than ten failed tests. The option --rerun-fails of gotestsum does the same, except that
// it passes a package that fails although all its tests pass: its second run has no tests.
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

// maxReruns is the maximum number of failed tests that load can explain.
const maxReruns = 10

func main() {
	flags, packages, args, err := splitArgs(os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "rerun:", err)
		os.Exit(2)
	}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok := runTests(ctx, os.Stdout, flags, packages, args)
	stop()
	if !ok {
		os.Exit(1)
	}
}

// splitArgs splits the command line into flags of go test, packages, and -args with the flags of the tests.
func splitArgs(line []string) (flags, packages, args []string, err error) {
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

// runTests runs the tests, runs the failed tests again, and reports whether the run succeeds.
func runTests(ctx context.Context, out io.Writer, flags, packages, args []string) bool {
	first := newTestRun(out)
	ok := first.runGoTest(ctx, slices.Concat(flags, packages, args))
	failures, reasons := first.collectFailures()
	if ok && failures == 0 && len(reasons) == 0 {
		fmt.Fprintln(out, first.summary(0))
		return true
	}

	if failures > maxReruns {
		reasons = append(reasons, fmt.Sprintf("%d tests failed: too many to be run again", failures))
	}
	if !ok && failures == 0 && len(reasons) == 0 {
		reasons = append(reasons, "go test failed")
	}

	var flaky []string
	if len(reasons) == 0 {
		flaky, reasons = first.rerunFailed(ctx, flags, args)
	}
	for _, name := range flaky {
		fmt.Fprintf(out, "FLAKY %s: failed, and passed when it was run again\n", name)
	}
	for _, why := range reasons {
		fmt.Fprintf(out, "FAILED %s\n", why)
	}
	fmt.Fprintln(out, first.summary(len(flaky)))
	return len(reasons) == 0
}

// event is a line of go test -json.
type event struct {
	Action, Package, Test, Output, FailedBuild string
}

// testRun holds the results of one run of go test.
type testRun struct {
	out             io.Writer
	packages        map[string]*packageResult
	names           []string // packages in the order in which they ended
	passed, skipped int      // tests, without subtests
}

type packageResult struct {
	out    io.Writer
	output map[string][]string // by test, without subtests; "" is the output of the package
	begun  []string            // tests without a result, without subtests
	failed []string            // tests, without subtests
	reason string              // why the package failed, unless only tests failed
}

func newTestRun(out io.Writer) *testRun {
	return &testRun{out: out, packages: map[string]*packageResult{}}
}

// runGoTest runs go test -json and prints the usual output of go test. It reports whether the exit code is 0.
func (r *testRun) runGoTest(ctx context.Context, line []string) bool {
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
		var event event
		if text != "" && json.Unmarshal([]byte(text), &event) == nil {
			r.handleEvent(event)
		} else {
			fmt.Fprint(r.out, text)
		}
		if err != nil {
			break
		}
	}
	return cmd.Wait() == nil
}

func (r *testRun) handleEvent(event event) {
	// The output of a build belongs to no package.
	if event.Package == "" {
		fmt.Fprint(r.out, event.Output)
		return
	}

	result := r.packages[event.Package]
	if result == nil {
		result = &packageResult{out: r.out, output: map[string][]string{}}
		r.packages[event.Package] = result
	}

	test, _, isSubtest := strings.Cut(event.Test, "/")
	if event.Action == "output" {
		result.addOutput(test, event.Output)
		return
	}
	if event.Test == "" {
		if event.Action == "pass" || event.Action == "fail" || event.Action == "skip" {
			r.names = append(r.names, event.Package)
			result.finishPackage(event)
		}
		return
	}
	// Only whole tests are run again, and the output of subtests is printed with them.
	if isSubtest {
		return
	}

	switch event.Action {
	case "run":
		result.begun = append(result.begun, test)
	case "pass", "fail", "skip":
		result.begun = slices.DeleteFunc(result.begun, func(name string) bool { return name == test })
	}

	switch event.Action {
	case "fail":
		result.failed = append(result.failed, test)
		result.printOutput(test)
	case "pass":
		r.passed++
		result.printRace(test)
		delete(result.output, test)
	case "skip":
		r.skipped++
		delete(result.output, test)
	}
}

// addOutput keeps a line of output until its test, or the package, has ended.
func (p *packageResult) addOutput(test, line string) {
	switch {
	case strings.HasPrefix(line, "panic: ") || strings.HasPrefix(line, "fatal error: "):
		p.reason = "panic or timeout"
	case isRace(line):
		p.reason = "data race"
	case strings.HasPrefix(line, "=== ") || test == "" && line == "PASS\n":
		// go test prints these lines only with -v.
		return
	}
	p.output[test] = append(p.output[test], line)
}

// printRace prints the output of a passed test if it contains a report of the race detector. go test
// adds the report to the output of the test that wrote last, which may be a different test than the one
// that it fails.
func (p *packageResult) printRace(test string) {
	if slices.ContainsFunc(p.output[test], isRace) {
		p.printOutput(test)
	}
}

func isRace(line string) bool { return strings.HasPrefix(line, "WARNING: DATA RACE") }

func (p *packageResult) printOutput(test string) {
	fmt.Fprint(p.out, strings.Join(p.output[test], ""))
	delete(p.output, test)
}

// finishPackage prints the remaining output when the package has ended, including that of tests that a
// panic interrupted.
func (p *packageResult) finishPackage(event event) {
	if event.Action == "fail" {
		for test := range p.output {
			if test != "" {
				p.printOutput(test)
			}
		}

		switch {
		case event.FailedBuild != "":
			p.reason = "build failed"
		case p.reason != "":
		case len(p.begun) > 0:
			// The tests after these did not run, so no second run of a failed test shows that the package is good.
			p.reason = "it ended before " + strings.Join(p.begun, ", ") + " did"
		case len(p.failed) == 0:
			p.reason = "the package failed, although none of its tests did"
		}
	}
	p.printOutput("")
}

// collectFailures returns the number of failed tests, and the packages that failed for another reason.
func (r *testRun) collectFailures() (n int, reasons []string) {
	for _, name := range r.names {
		result := r.packages[name]
		n += len(result.failed)
		if result.reason != "" {
			reasons = append(reasons, name+": "+result.reason)
		}
	}
	return n, reasons
}

// rerunFailed runs the failed tests once more by name, one package at a time.
func (r *testRun) rerunFailed(ctx context.Context, flags, args []string) (flaky, reasons []string) {
	for _, name := range r.names {
		failed := r.packages[name].failed
		if len(failed) == 0 {
			continue
		}

		fmt.Fprintf(r.out, "\nrunning again: %s %s\n", name, strings.Join(failed, " "))
		second := newTestRun(r.out)
		only := []string{"-count=1", "-run", "^(" + strings.Join(failed, "|") + ")$", name}
		ok := second.runGoTest(ctx, slices.Concat(flags, only, args))

		for _, test := range failed {
			if ok && second.passed == len(failed) {
				flaky = append(flaky, name+"."+test)
			} else {
				reasons = append(reasons, name+"."+test+": failed, and not all tests passed when they were run again")
			}
		}
	}
	return flaky, reasons
}

// summary returns the last line of the output.
func (r *testRun) summary(flaky int) string {
	failed, _ := r.collectFailures()
	return fmt.Sprintf("%d passed, %d failed, %d skipped", r.passed+flaky, failed-flaky, r.skipped)
}
