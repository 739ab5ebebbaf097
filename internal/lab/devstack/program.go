package devstack

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Program is a run of a program of the caller. It ends when the stack stops, or when the process that started the
// stack ends. Its methods are safe for concurrent use.
type Program struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait; valid once done is closed
}

// Run starts a program. It has its own process group, so that a Ctrl-C in the terminal does not reach it. Its
// output goes to name.log in the stack's directory. The name must be new in the stack. If env is nil, the program
// gets the environment of this process.
func (s *Stack) Run(name string, env []string, path string, args ...string) (*Program, error) {
	program := &Program{name: name, log: filepath.Join(s.dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(program.log, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	defer log.Close()

	if program.cmd, err = s.guard.start(s.dir, log, env, path, args); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}

	go func() {
		defer close(program.done)
		program.err = program.cmd.Wait()
		s.guard.forget(program.cmd.Process.Pid)
	}()
	return program, nil
}

// Dir returns the stack's directory. Stop removes the directory with all its files.
func (s *Stack) Dir() string { return s.dir }

// Name returns the name from the call of Run.
func (p *Program) Name() string { return p.name }

// PID returns the process id, also after the end.
func (p *Program) PID() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the program has ended.
func (p *Program) Done() <-chan struct{} { return p.done }

// Running reports whether the program still runs.
func (p *Program) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Err blocks until the program has ended. It returns nil for exit code 0, and else the error of the run.
func (p *Program) Err() error {
	<-p.done
	return p.err
}

// Kill ends the program with SIGKILL and blocks until it has ended. If it has ended already, it returns nil.
func (p *Program) Kill() error {
	if err := p.sendSignal(killProcess); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Terminate sends SIGTERM and does not block. If the program has ended already, it returns nil.
func (p *Program) Terminate() error { return p.sendSignal(terminateProcess) }

// Pause stops the program with SIGSTOP, and blocks until it has stopped.
func (p *Program) Pause() error { return p.sendSignal(PauseProcess) }

// Resume undoes Pause.
func (p *Program) Resume() error { return p.sendSignal(resumeProcess) }

func (p *Program) sendSignal(how func(*os.Process) error) error {
	if err := how(p.cmd.Process); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signalling %s: %w", p.name, err)
	}
	return nil
}

// LastLines returns up to n lines from the end of the log.
func (p *Program) LastLines(n int) []string {
	const maxBytes = 64 << 10
	file, err := os.Open(p.log)
	if err != nil {
		return nil
	}
	defer file.Close()

	// A long log is read from its end.
	if info, err := file.Stat(); err == nil && info.Size() > maxBytes {
		if _, err := file.Seek(-maxBytes, io.SeekEnd); err != nil {
			return nil
		}
	}

	data := make([]byte, maxBytes)
	read, _ := io.ReadFull(file, data)
	text := strings.TrimSpace(string(data[:read]))
	if text == "" {
		return nil
	}

	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-n):]
}
