//go:build unix

package kit

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"syscall"
)

// IsGone reports whether a process has ended. Process 1 of a container may collect no process, and a zombie accepts signals.
func IsGone(pid int) bool {
	if errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return true
	}
	state, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && bytes.Contains(state, []byte(") Z "))
}
