//go:build linux

package devstack

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// spinVar makes a test process compute without end, in more threads than the machine has processors.
const spinVar = "OUTRELAY_TEST_SPIN"

func init() {
	if os.Getenv(spinVar) == "" {
		return
	}
	threads := 4 * runtime.NumCPU()
	runtime.GOMAXPROCS(threads)
	var steps atomic.Int64
	for range threads {
		go func() {
			for {
				steps.Add(1)
			}
		}()
	}
	fmt.Println("spins")
	select {}
}

// The kernel gives SIGSTOP to one thread of a process, and the others run until it is scheduled.
func TestAPausedProcessHasStopped(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), spinVar+"=1")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}

	for round := range 50 {
		if err := PauseProcess(cmd.Process); err != nil {
			t.Fatal(err)
		}
		before := processorTime(t, cmd.Process.Pid)
		<-time.After(10 * time.Millisecond)
		if after := processorTime(t, cmd.Process.Pid); after != before {
			t.Fatalf("round %d: the paused process ran for %v", round, after-before)
		}
		if err := resumeProcess(cmd.Process); err != nil {
			t.Fatal(err)
		}
	}
}

// processorTime returns the time that the threads of a process have run.
func processorTime(t *testing.T, pid int) (total time.Duration) {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil || len(threads) == 0 {
		t.Fatalf("%d threads, %v", len(threads), err)
	}
	for _, name := range threads {
		text, err := os.ReadFile(name)
		var ran, waited time.Duration
		if _, scan := fmt.Sscan(string(text), &ran, &waited); err != nil || scan != nil {
			t.Fatal(err, scan)
		}
		total += ran
	}
	return total
}
