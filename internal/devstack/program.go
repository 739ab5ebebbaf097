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

// Program is a run of a program of the caller's beside the servers. It ends when the stack stops, and when the process
// that started the stack ends in whatever way. Its methods may be called from any goroutine.
type Program struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{}
	err  error // of Wait; valid once done is closed
}

// Run starts the program in a process group of its own, so that a Ctrl-C of the terminal does not reach it, with its
// output in the log name.log of the stack's directory. The name must be new in the stack; a nil env is this process's own.
func (s *Stack) Run(name string, env []string, path string, args ...string) (*Program, error) {
	p := &Program{name: name, log: filepath.Join(s.dir, name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	defer log.Close()
	if p.cmd, err = s.guard.start(s.dir, log, env, path, args); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	go func() {
		defer close(p.done)
		p.err = p.cmd.Wait()
		s.guard.forget(p.cmd.Process.Pid)
	}()
	return p, nil
}

// Dir is the stack's directory, for files that shall go with it.
func (s *Stack) Dir() string { return s.dir }

// Name is what Run was given.
func (p *Program) Name() string { return p.name }

// PID is the process id, also after the end.
func (p *Program) PID() int { return p.cmd.Process.Pid }

// Done is closed when the program has ended.
func (p *Program) Done() <-chan struct{} { return p.done }

// Running reports whether it has not ended.
func (p *Program) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Err says how the program ended: nil for exit code 0. It waits for the end.
func (p *Program) Err() error {
	<-p.done
	return p.err
}

// Kill ends the program by SIGKILL and returns when it is gone; one that has ended is no error.
func (p *Program) Kill() error {
	if err := p.sendSignal(killProcess); err != nil {
		return err
	}
	<-p.done
	return nil
}

// Terminate sends SIGTERM and does not wait; one that has ended is no error.
func (p *Program) Terminate() error { return p.sendSignal(terminateProcess) }

// Pause stops the program by SIGSTOP, Resume lets it go on.
func (p *Program) Pause() error { return p.sendSignal(pauseProcess) }

// Resume undoes Pause.
func (p *Program) Resume() error { return p.sendSignal(resumeProcess) }

func (p *Program) sendSignal(how func(*os.Process) error) error {
	if err := how(p.cmd.Process); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signalling %s: %w", p.name, err)
	}
	return nil
}

// LastLines are up to n lines from the end of its log.
func (p *Program) LastLines(n int) []string {
	const most = 64 << 10
	f, err := os.Open(p.log)
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return nil
		}
	}
	b := make([]byte, most)
	read, _ := io.ReadFull(f, b)
	text := strings.TrimSpace(string(b[:read]))
	if text == "" {
		return nil
	}
	lines := strings.Split(text, "\n")
	return lines[max(0, len(lines)-n):]
}
