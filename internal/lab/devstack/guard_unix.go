//go:build unix

package devstack

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// guardScript reads from its standard input which processes and containers run ("+ pid", "c name") and which have
// ended ("- pid"). When the process that started the stack ends, in any way, the kernel closes the other end of the
// pipe. Then the script kills the remaining members and removes the data. It runs in its own session and ignores the
// signals of the terminal.
const guardScript = `trap '' INT TERM HUP QUIT PIPE
pids= boxes=
while read -r op arg; do
  case $op in
  +) pids="$pids $arg" ;;
  c) boxes="$boxes $arg" ;;
  -) left=
     for p in $pids; do [ "$p" = "$arg" ] || left="$left $p"; done
     pids=$left ;;
  esac
done
for p in $pids; do kill -s KILL -- "-$p" || kill -s KILL "$p"; done
for b in $boxes; do docker rm -f -v "$b"; done
n=0
until rm -rf "$1" && [ ! -e "$1" ] || [ $n -ge 50 ]; do n=$((n+1)); sleep 0.1; done
rm -f "$1.lock"
`

// enrol is the shell around a member. It sends its process id to the guard before it becomes the member. So
// the member never runs without the guard.
const enrol = `echo "+ $$" >&3 && exec "$@" 3>&-`

// guard ends the members of a stack when the process that started them ends.
type guard struct {
	cmd  *exec.Cmd
	pipe *os.File
}

// newGuard starts the guard of the data directory dir.
func newGuard(dir string) (*guard, error) {
	reader, writer, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer reader.Close()

	cmd := exec.Command("/bin/sh", "-c", guardScript, "outrelay-devstack-guard", dir)
	cmd.Stdin = reader
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		_ = writer.Close()
		return nil, fmt.Errorf("starting the guard: %w", err)
	}
	return &guard{cmd, writer}, nil
}

// start starts the program in its own process group, so that a Ctrl-C in the terminal does not reach it. The
// output goes to log. If env is nil, the program gets the environment of this process.
func (g *guard) start(dir string, log *os.File, env []string, program string, args []string) (*exec.Cmd, error) {
	cmd := exec.Command("/bin/sh", append([]string{"-c", enrol, "sh", program}, args...)...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, log, log
	cmd.ExtraFiles = []*os.File{g.pipe}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	return cmd, cmd.Start()
}

func (g *guard) forget(pid int)        { _, _ = fmt.Fprintf(g.pipe, "- %d\n", pid) }
func (g *guard) container(name string) { _, _ = fmt.Fprintf(g.pipe, "c %s\n", name) }

// close kills the remaining members, removes the data, and blocks until this is done.
func (g *guard) close() {
	_ = g.pipe.Close()
	_ = g.cmd.Wait()
}

func killProcess(process *os.Process) error      { return process.Signal(syscall.SIGKILL) }
func resumeProcess(process *os.Process) error    { return process.Signal(syscall.SIGCONT) }
func terminateProcess(process *os.Process) error { return process.Signal(syscall.SIGTERM) }

// stopPatience bounds the time in which a process has to stop.
const stopPatience = 10 * time.Second

// PauseProcess sends SIGSTOP, and blocks until all threads of the process have stopped. The kernel gives the signal to one thread,
// and the others run until it is scheduled: on a busy machine a process may still respond, or write, for milliseconds.
func PauseProcess(process *os.Process) error {
	if err := process.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for began := time.Now(); !isStopped(process.Pid); time.Sleep(time.Millisecond) {
		if time.Since(began) > stopPatience {
			return fmt.Errorf("process %d has not stopped within %v", process.Pid, stopPatience)
		}
	}
	return nil
}

// isStopped reports whether all threads of a process have stopped or ended. It returns true on systems that do not list threads in /proc.
func isStopped(pid int) bool {
	// The only possible error is that of a malformed pattern.
	stats, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	for _, name := range stats {
		// A thread that has ended in the meantime has no file, and counts as stopped.
		stat, _ := os.ReadFile(name)

		// The state follows the name of the program, which is in parentheses and may contain any character.
		if i := bytes.LastIndexByte(stat, ')'); i >= 0 && i+2 < len(stat) && strings.IndexByte("TtZXx", stat[i+2]) < 0 {
			return false
		}
	}
	return true
}

// interruptible returns a command whose whole process group is killed when ctx ends.
func interruptible(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	return cmd
}
