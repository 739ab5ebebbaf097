package devstack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"unsafe"

	"golang.org/x/sys/windows"
)

// guard ends the members of a stack when the process that started them ends: they belong to a job
// object that kills its processes when its last handle is closed, which the system does.
type guard struct {
	job   windows.Handle
	dir   string
	mu    sync.Mutex
	boxes []string
}

func newGuard(dir string) (*guard, error) {
	job, err := windows.CreateJobObject(nil, nil)
	if err != nil {
		return nil, fmt.Errorf("making a job object: %w", err)
	}
	var info windows.JOBOBJECT_EXTENDED_LIMIT_INFORMATION
	info.BasicLimitInformation.LimitFlags = windows.JOB_OBJECT_LIMIT_KILL_ON_JOB_CLOSE
	if _, err := windows.SetInformationJobObject(job, windows.JobObjectExtendedLimitInformation,
		uintptr(unsafe.Pointer(&info)), uint32(unsafe.Sizeof(info))); err != nil {
		return nil, errors.Join(fmt.Errorf("limiting the job object: %w", err), windows.CloseHandle(job))
	}
	return &guard{job: job, dir: dir}, nil
}

func (g *guard) start(dir string, log *os.File, env []string, program string, args []string) (*exec.Cmd, error) {
	cmd := exec.Command(program, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, log, log
	cmd.SysProcAttr = &windows.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
	if err := cmd.Start(); err != nil {
		return cmd, err
	}

	// Until the process is in the job, nothing ends it with this process.
	h, err := windows.OpenProcess(windows.PROCESS_SET_QUOTA|windows.PROCESS_TERMINATE, false, uint32(cmd.Process.Pid))
	if err == nil {
		err = windows.AssignProcessToJobObject(g.job, h)
		_ = windows.CloseHandle(h)
	}
	if err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return cmd, fmt.Errorf("putting the process into the job: %w", err)
	}
	return cmd, nil
}

func (g *guard) forget(int) {}

// container remembers a container for close. One that outlives a killed process is found by its
// name, which starts with "outrelay-".
func (g *guard) container(name string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.boxes = append(g.boxes, name)
}

func (g *guard) close() {
	_ = windows.CloseHandle(g.job)
	for _, b := range g.boxes {
		_ = exec.Command("docker", "rm", "-f", "-v", b).Run()
	}
	_ = os.RemoveAll(g.dir)
}

func killProcess(p *os.Process) error { return p.Kill() }

// PauseProcess is not supported on Windows.
func PauseProcess(*os.Process) error {
	return fmt.Errorf("pausing a process: %w", errors.ErrUnsupported)
}

func resumeProcess(*os.Process) error {
	return fmt.Errorf("resuming a process: %w", errors.ErrUnsupported)
}
func terminateProcess(p *os.Process) error { return p.Kill() }

func interruptible(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, name, args...)
}
