//go:build unix

package kit

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Patience is how long a wait for something that should come within seconds may take on a loaded machine.
const Patience = 60 * time.Second

// Context is for a program that a test runs to its end: it ends with the test, and a little before the time of all tests is
// over, so that the program is ended and the test says what it said.
func Context(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	if late, ok := t.Deadline(); ok {
		return context.WithDeadline(t.Context(), late.Add(-30*time.Second))
	}
	return context.WithCancel(t.Context())
}

// Process is one `outrelay` child. Its methods may be called from any goroutine.
type Process struct {
	Node string // as the watcher document names it
	HTTP string // base URL of its health and metrics; "" if it serves none

	// ConfigFile is what it was started with; "" if that is none of a relay.
	ConfigFile string

	tb   testing.TB
	cmd  *exec.Cmd
	log  lineLog
	done chan struct{}
}

// Launch starts a program under the name node. It ends with the test at the latest.
func Launch(tb testing.TB, node, binary string, env []string, args ...string) *Process {
	tb.Helper()
	p := &Process{Node: node, tb: tb, cmd: exec.Command(binary, args...), done: make(chan struct{})}
	p.log.changed = make(chan struct{})
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	go func() {
		defer close(p.done)
		_ = p.cmd.Wait()
	}()
	tb.Cleanup(func() {
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGKILL)
		<-p.done
		if tb.Failed() {
			tb.Logf("log of %s:\n%s", node, p.log.lastLines(120))
		}
	})
	return p
}

func (p *Process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// Kill ends it by SIGKILL and returns when it is gone.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// Terminate asks it to end and does not wait.
func (p *Process) Terminate() { p.signal(syscall.SIGTERM) }

// Reload has it read its configuration again.
func (p *Process) Reload() { p.signal(syscall.SIGHUP) }

// DumpGoroutines has the runtime print all of its goroutines and end it.
func (p *Process) DumpGoroutines() { p.signal(syscall.SIGQUIT) }

// Freeze freezes it by SIGSTOP.
func (p *Process) Freeze() { p.signal(syscall.SIGSTOP) }

// Continue undoes Stop.
func (p *Process) Continue() { p.signal(syscall.SIGCONT) }

// Done is closed when it has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// WaitExit returns its exit code, −1 after a signal, when it has ended.
func (p *Process) WaitExit() int {
	p.tb.Helper()
	select {
	case <-p.done:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(Patience):
		p.tb.Fatalf("%s did not end", p.Node)
		return 0
	}
}

// Killed reports whether SIGKILL ended it.
func (p *Process) Killed() bool {
	p.WaitExit()
	status, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGKILL
}

// WaitTookOver waits until it delivers.
func (p *Process) WaitTookOver() {
	p.tb.Helper()
	p.WaitForLog("took over")
}

// WaitForLog waits for a line of the log that contains text and returns it. A process that ends before it has said so fails
// the test.
func (p *Process) WaitForLog(text string) string {
	p.tb.Helper()
	ctx, cancel := context.WithTimeout(p.tb.Context(), Patience)
	defer cancel()
	line, err := p.log.awaitLine(ctx, p.done, text)
	if err != nil {
		p.tb.Fatalf("%s never said %q: %v\n%s", p.Node, text, err, p.log.lastLines(30))
	}
	return line
}

// HasLogged reports whether a line of the log contains text.
func (p *Process) HasLogged(text string) bool { return p.log.findLine(text) != "" }

// ReadLog is what it wrote so far.
func (p *Process) ReadLog() string { return p.log.lastLines(1 << 20) }

// lineLog collects lines and wakes who waits for one.
type lineLog struct {
	mu      sync.Mutex
	lines   []string
	rest    []byte
	changed chan struct{}
}

// Write implements io.Writer.
func (j *lineLog) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.rest = append(j.rest, b...)
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
	return len(b), nil
}

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

var errEnded = errors.New("it ended")

func (j *lineLog) awaitLine(ctx context.Context, ended <-chan struct{}, text string) (string, error) {
	for {
		j.mu.Lock()
		news := j.changed
		j.mu.Unlock()
		if l := j.findLine(text); l != "" {
			return l, nil
		}
		select {
		case <-news:
		case <-ended:
			if l := j.findLine(text); l != "" {
				return l, nil
			}
			return "", errEnded
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

func (j *lineLog) lastLines(n int) string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return strings.Join(j.lines[max(0, len(j.lines)-n):], "\n")
}
