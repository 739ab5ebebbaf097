//go:build unix

package kit

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// Patience is the time limit of each wait. It is long, because the machine may be busy.
const Patience = 60 * time.Second

// Context returns a context for a program that a test runs. It ends with the test, and 30 s before the
// time limit of all tests, so that the test can still stop the program and show its output.
func Context(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	if deadline, ok := t.Deadline(); ok {
		return context.WithDeadline(t.Context(), deadline.Add(-30*time.Second))
	}
	return context.WithCancel(t.Context())
}

// Process is an `outrelay` child process. Its methods are safe for concurrent use.
type Process struct {
	Node string // the node name in the watcher document
	HTTP string // base URL of health and metrics; "" if it serves none

	// ConfigFile is the configuration file of a relay; "" for other commands.
	ConfigFile string

	tb   testing.TB
	cmd  *exec.Cmd
	log  lineLog
	done chan struct{}
}

// Launch starts a program with the name node. The end of the test kills it.
func Launch(tb testing.TB, node, binary string, env []string, args ...string) *Process {
	tb.Helper()
	process := &Process{Node: node, tb: tb, cmd: exec.Command(binary, args...), done: make(chan struct{})}
	process.log.changed = make(chan struct{})
	process.cmd.Env = append(os.Environ(), env...)
	process.cmd.Stdout, process.cmd.Stderr = &process.log, &process.log
	if err := process.cmd.Start(); err != nil {
		tb.Fatal(err)
	}

	go func() {
		defer close(process.done)
		_ = process.cmd.Wait()
	}()

	tb.Cleanup(func() {
		process.signal(syscall.SIGCONT)
		if tb.Failed() {
			process.logState()
		}
		process.signal(syscall.SIGKILL)
		<-process.done
	})
	return process
}

// logState logs the end of the process's log. If the process still runs, it also logs its goroutines, which ends the
// process: they show where a process stands still that logs nothing.
func (p *Process) logState() {
	p.tb.Logf("log of %s:\n%s", p.Node, p.log.lastLines(120))
	select {
	case <-p.done:
		return
	default:
	}

	before := p.log.countLines()
	p.DumpGoroutines()
	select {
	case <-p.done:
	case <-time.After(Patience):
	}
	p.tb.Logf("goroutines of %s:\n%s", p.Node, p.log.lastLines(p.log.countLines()-before))
}

func (p *Process) signal(signal syscall.Signal) { _ = p.cmd.Process.Signal(signal) }

// Kill sends SIGKILL and waits until the process has ended.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// Terminate sends SIGTERM and returns at once.
func (p *Process) Terminate() { p.signal(syscall.SIGTERM) }

// Interrupt sends SIGINT, as Ctrl-C does, and returns at once.
func (p *Process) Interrupt() { p.signal(syscall.SIGINT) }

// Reload sends SIGHUP, so that the process reloads its configuration.
func (p *Process) Reload() { p.signal(syscall.SIGHUP) }

// DumpGoroutines sends SIGQUIT: the Go runtime prints all goroutines and ends the process.
func (p *Process) DumpGoroutines() { p.signal(syscall.SIGQUIT) }

// Freeze stops the process with SIGSTOP. When it returns, the process sends nothing more.
func (p *Process) Freeze() {
	p.tb.Helper()
	if err := devstack.PauseProcess(p.cmd.Process); err != nil {
		p.tb.Fatal(err)
	}
}

// Continue sends SIGCONT, which ends Freeze.
func (p *Process) Continue() { p.signal(syscall.SIGCONT) }

// Done returns a channel that is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// WaitExit waits until the process has ended and returns its exit code, or −1 after a signal.
func (p *Process) WaitExit() int {
	p.tb.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(Patience):
		p.tb.Fatalf("waiting for the end of %s timed out", p.Node)
		return 0
	}
}

// Killed waits until the process has ended, and reports whether SIGKILL ended it.
func (p *Process) Killed() bool {
	p.WaitExit()
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// WaitTookOver waits until the node has taken over.
func (p *Process) WaitTookOver() {
	p.tb.Helper()
	p.WaitForLog("took over")
}

// WaitForLog waits for a log line that contains text, and returns the line. If the process ends before,
// the test fails.
func (p *Process) WaitForLog(text string) string {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(p.tb.Context(), Patience)
	defer cancel()
	line, err := p.log.awaitLine(ctx, p.done, text)
	if err != nil {
		p.tb.Fatalf("waiting for %q in the log of %s: %v\n%s", text, p.Node, err, p.log.lastLines(30))
	}
	return line
}

// HasLogged reports whether a log line contains text.
func (p *Process) HasLogged(text string) bool { return p.log.findLine(text) != "" }

// ReadLog returns the log so far.
func (p *Process) ReadLog() string { return p.log.lastLines(1 << 20) }

// LogLine is a line of the text format.
type LogLine struct{ Level, Message, Attrs string }

var textLine = regexp.MustCompile(`^[0-9:.]+ (DEBUG|INFO|WARN|ERROR) (.*?)((?: [a-z_]+=.*)?)$`)

// ReadLines returns the lines above the level debug, after the first skipped lines of the log. It fails the test if a line has another
// format.
func (p *Process) ReadLines(skipped int) (lines []LogLine) {
	p.tb.Helper()
	for _, text := range strings.Split(p.ReadLog(), "\n")[skipped:] {
		m := textLine.FindStringSubmatch(text)
		if m == nil {
			p.tb.Fatalf("no line of the text format: %q", text)
		}
		if m[1] != "DEBUG" {
			lines = append(lines, LogLine{m[1], m[2], m[3]})
		}
	}
	return lines
}

// lineLog collects lines, and wakes the goroutines that wait for a line.
type lineLog struct {
	mu      sync.Mutex
	lines   []string
	rest    []byte
	changed chan struct{}
}

// Write implements io.Writer.
func (j *lineLog) Write(data []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rest = append(j.rest, data...)
	for {
		line, rest, found := bytes.Cut(j.rest, []byte("\n"))
		if !found {
			break
		}
		j.lines = append(j.lines, string(line))
		j.rest = bytes.Clone(rest)
	}

	close(j.changed)
	j.changed = make(chan struct{})
	return len(data), nil
}

// findLine returns the first line that contains text, or "".
func (j *lineLog) findLine(text string) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, l := range j.lines {
		if strings.Contains(l, text) {
			return l
		}
	}
	return ""
}

var errEnded = errors.New("the process has ended")

// awaitLine waits for a line that contains text. It returns errEnded if the process ends before.
func (j *lineLog) awaitLine(ctx context.Context, ended <-chan struct{}, text string) (string, error) {
	for {
		j.mu.Lock()
		news := j.changed
		j.mu.Unlock()
		if line := j.findLine(text); line != "" {
			return line, nil
		}

		select {
		case <-news:
		case <-ended:
			if line := j.findLine(text); line != "" {
				return line, nil
			}
			return "", errEnded
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

func (j *lineLog) countLines() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.lines)
}

func (j *lineLog) lastLines(n int) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines[max(0, len(j.lines)-n):], "\n")
}
