package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// ErrExternal is the error for a signal to a server named by the environment. The stack may not break it.
var ErrExternal = errors.New("server is named by the environment and does not belong to the stack")

// ErrNotRunning is the error for a signal to a member that does not run.
var ErrNotRunning = errors.New("member is not running")

// A Member is one mongod or one broker of a stack. Its address stays the same across restarts. Its methods
// are safe for concurrent use.
type Member struct {
	name, addr, dir string
	id              int   // node id of a broker, number of a mongod from 1
	ports           []int // all listeners
	listeners       map[Listener]int

	launch func(log *os.File) (instance, error)
	check  func(ctx context.Context) error // nil once the member serves

	mu  sync.Mutex
	run instance // nil while it does not run
}

// instance is one run of a member.
type instance interface {
	pid() int
	kill() error
	pause() error
	resume() error
	terminate() error
	done() <-chan struct{}
}

// Name returns the name of the member, unique in its stack: "mongod-1", "kafka-3".
func (m *Member) Name() string { return m.name }

// Addr returns host:port, on loopback.
func (m *Member) Addr() string { return m.addr }

// ID returns the node id of the broker, or the number of the mongod, from 1.
func (m *Member) ID() int { return m.id }

// PID returns the process id, or 0 if the member does not run, is a container or is external.
func (m *Member) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.run == nil {
		return 0
	}
	return m.run.pid()
}

// Done returns a channel that is closed when the current run ends. It returns nil if the member does not run.
func (m *Member) Done() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.run == nil {
		return nil
	}
	return m.run.done()
}

// Kill ends the member with SIGKILL, even if it is paused, and blocks until it has ended.
func (m *Member) Kill() error { return m.signalAndWait(instance.kill) }

// Shutdown ends the member with SIGTERM and blocks until it has ended. A mongod steps down first, and a
// broker moves its leaders. A paused member ends only after Resume.
func (m *Member) Shutdown() error { return m.signalAndWait(instance.terminate) }

// Pause stops the member with SIGSTOP, and blocks until it has stopped. Its connections stay open but do not respond.
func (m *Member) Pause() error { return m.sendSignal(instance.pause) }

// Resume undoes Pause.
func (m *Member) Resume() error { return m.sendSignal(instance.resume) }

// Start starts a stopped member with its previous address and data. It does not wait until the member serves;
// see WaitReady.
func (m *Member) Start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.startLocked()
}

// Restart kills the member if it runs, starts it again and waits until it serves.
func (m *Member) Restart(ctx context.Context) error {
	if err := m.Kill(); err != nil && !errors.Is(err, ErrNotRunning) {
		return err
	}

	if err := m.Start(); err != nil {
		return err
	}
	return m.WaitReady(ctx)
}

// WaitReady blocks until the member serves: a mongod is primary or secondary, and a broker lists itself in the
// cluster. If the member ends, it returns an error that quotes the log.
func (m *Member) WaitReady(ctx context.Context) error { return m.awaitReady(ctx, m.check) }

// awaitReady repeats check until it succeeds, the member ends or ctx ends.
func (m *Member) awaitReady(ctx context.Context, check func(context.Context) error) error {
	m.mu.Lock()
	run := m.run
	m.mu.Unlock()

	if run == nil && m.launch != nil {
		return fmt.Errorf("%s: %w", m.name, ErrNotRunning)
	}

	var ended <-chan struct{}
	if run != nil {
		ended = run.done()
	}

	tick := time.NewTicker(25 * time.Millisecond)
	defer tick.Stop()
	for {
		// A check that hangs must not hide that the member has ended.
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := check(try)
		cancel()
		if err == nil {
			return nil
		}

		select {
		case <-ended:
			err := fmt.Errorf("%s ended while it started; end of its log: %s", m.name, m.lastWords())
			return errors.Join(err, portTaken(m.ports))
		case <-ctx.Done():
			return fmt.Errorf("%s at %s is not ready: %w (last attempt: %w); end of its log: %s",
				m.name, m.addr, context.Cause(ctx), err, m.lastWords())
		case <-tick.C:
		}
	}
}

// startLocked starts the member if it does not run. The caller must hold m.mu.
func (m *Member) startLocked() error {
	if m.launch == nil {
		return fmt.Errorf("%s: %w", m.name, ErrExternal)
	}

	// A member that has ended may be started again.
	if m.run != nil {
		select {
		case <-m.run.done():
		default:
			return fmt.Errorf("%s is already running (process %d)", m.name, m.run.pid())
		}
	}

	log, err := os.OpenFile(m.logPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()

	run, err := m.launch(log)
	if err != nil {
		return fmt.Errorf("starting %s: %w", m.name, err)
	}
	m.run = run
	return nil
}

// signalAndWait sends a signal by how and blocks until the member has ended.
func (m *Member) signalAndWait(how func(instance) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.signalLocked(how); err != nil {
		return err
	}

	<-m.run.done()
	m.run = nil
	return nil
}

func (m *Member) sendSignal(how func(instance) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.signalLocked(how)
}

// signalLocked sends a signal by how. The caller must hold m.mu.
func (m *Member) signalLocked(how func(instance) error) error {
	if m.launch == nil {
		return fmt.Errorf("%s: %w", m.name, ErrExternal)
	}
	if m.run == nil {
		return fmt.Errorf("%s: %w", m.name, ErrNotRunning)
	}

	err := how(m.run)
	if errors.Is(err, os.ErrProcessDone) {
		m.run = nil
		return fmt.Errorf("%s: %w", m.name, ErrNotRunning)
	}
	if err != nil {
		return fmt.Errorf("signalling %s: %w", m.name, err)
	}
	return nil
}

func (m *Member) logPath() string { return filepath.Join(m.dir, m.name+".log") }

// DescribeEnd returns the error of a member that ended unexpectedly, with the end of its log.
func (m *Member) DescribeEnd() error {
	return fmt.Errorf("%s at %s ended unexpectedly; end of its log: %s", m.name, m.addr, m.lastWords())
}

// lastWords returns the end of the member's log, for an error message, or that its disk is full: the log then has no room for the
// reason either.
func (m *Member) lastWords() string {
	if err := checkRoom(m.dir, scarceRoom); err != nil {
		return err.Error()
	}

	const maxBytes = 1500
	data, err := os.ReadFile(m.logPath())
	if err != nil || len(data) == 0 {
		return "(none)"
	}

	if len(data) > maxBytes {
		data = data[len(data)-maxBytes:]
	}
	return "\n" + strings.TrimSpace(string(data))
}

// process is an instance that runs as a process of this machine.
type process struct {
	p     *os.Process
	ended chan struct{}
}

// startProcess runs the program under the guard.
func startProcess(guard *guard, dir string, log *os.File, program string, args []string) (instance, error) {
	cmd, err := guard.start(dir, log, nil, program, args)
	if err != nil {
		return nil, err
	}

	process := &process{cmd.Process, make(chan struct{})}
	go func() {
		defer close(process.ended)
		// The reason for the end is in the log.
		_ = cmd.Wait()
		guard.forget(cmd.Process.Pid)
	}()

	return process, nil
}

func (p *process) pid() int              { return p.p.Pid }
func (p *process) kill() error           { return killProcess(p.p) }
func (p *process) pause() error          { return PauseProcess(p.p) }
func (p *process) resume() error         { return resumeProcess(p.p) }
func (p *process) terminate() error      { return terminateProcess(p.p) }
func (p *process) done() <-chan struct{} { return p.ended }
