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

// ErrExternal says that a server was named by the environment: the stack may use it, not break it.
var ErrExternal = errors.New("server is named by the environment and not the stack's own")

// ErrNotRunning says that a member was to be signalled and does not run.
var ErrNotRunning = errors.New("member is not running")

// A Member is one mongod or one broker of a stack. Its address stays the same across restarts. Its
// methods may be called from any goroutine; they wait for each other.
type Member struct {
	name, addr, dir string
	id              int   // node id of a broker, number of a mongod from 1
	ports           []int // all that it listens on
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

// Name tells the member from the others of its stack: "mongod-1", "kafka-3".
func (m *Member) Name() string { return m.name }

// Addr is host:port, on loopback.
func (m *Member) Addr() string { return m.addr }

// ID is the broker's node id, or the number of the mongod, from 1.
func (m *Member) ID() int { return m.id }

// PID is the process id, 0 if the member does not run, is a container or is not the stack's own.
func (m *Member) PID() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.run == nil {
		return 0
	}
	return m.run.pid()
}

// Done is closed when the present run of the member has ended; nil if it does not run.
func (m *Member) Done() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.run == nil {
		return nil
	}
	return m.run.done()
}

// Kill ends the member by SIGKILL, paused or not, and returns when it is gone.
func (m *Member) Kill() error { return m.signalAndWait(instance.kill) }

// Shutdown ends the member by SIGTERM and returns when it is gone. A mongod steps down first, a
// broker moves its leaders; a paused member only ends after Resume.
func (m *Member) Shutdown() error { return m.signalAndWait(instance.terminate) }

// Pause stops the member by SIGSTOP: its connections stay open and silent.
func (m *Member) Pause() error { return m.sendSignal(instance.pause) }

// Resume undoes Pause.
func (m *Member) Resume() error { return m.sendSignal(instance.resume) }

// Start runs a member that does not run, on its old address and data. It does not wait until the
// member serves; see WaitReady.
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

// WaitReady waits until the member serves: a mongod is primary or secondary, a broker is known to
// itself as part of the cluster. It gives up when the member ends; the error then quotes its log.
func (m *Member) WaitReady(ctx context.Context) error { return m.awaitReady(ctx, m.check) }

// awaitReady repeats check until it succeeds.
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
		try, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := check(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ended:
			err := fmt.Errorf("%s ended while it started; its last words: %s", m.name, m.lastWords())
			return errors.Join(err, portTaken(m.ports))
		case <-ctx.Done():
			return fmt.Errorf("%s at %s is not ready: %w (last try: %w); its last words: %s", m.name, m.addr, context.Cause(ctx), err, m.lastWords())
		case <-tick.C:
		}
	}
}

func (m *Member) startLocked() error {
	if m.launch == nil {
		return fmt.Errorf("%s: %w", m.name, ErrExternal)
	}
	if m.run != nil {
		select {
		case <-m.run.done():
		default:
			return fmt.Errorf("%s runs already (process %d)", m.name, m.run.pid())
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

// lastWords is the end of the member's log, for an error message.
func (m *Member) lastWords() string {
	const most = 1500
	b, err := os.ReadFile(m.logPath())
	if err != nil || len(b) == 0 {
		return "(none)"
	}
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return "\n" + strings.TrimSpace(string(b))
}

// process is a member that runs as a process of this machine.
type process struct {
	p     *os.Process
	ended chan struct{}
}

// startProcess runs the program under the guard.
func startProcess(g *guard, dir string, log *os.File, program string, args []string) (instance, error) {
	cmd, err := g.start(dir, log, nil, program, args)
	if err != nil {
		return nil, err
	}
	p := &process{cmd.Process, make(chan struct{})}
	go func() {
		defer close(p.ended)
		_ = cmd.Wait() // how it ended is in its log; that it ended is what matters here
		g.forget(cmd.Process.Pid)
	}()
	return p, nil
}

func (p *process) pid() int              { return p.p.Pid }
func (p *process) kill() error           { return killProcess(p.p) }
func (p *process) pause() error          { return pauseProcess(p.p) }
func (p *process) resume() error         { return resumeProcess(p.p) }
func (p *process) terminate() error      { return terminateProcess(p.p) }
func (p *process) done() <-chan struct{} { return p.ended }
