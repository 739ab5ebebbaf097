package stacktest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/gofrs/flock"
	"go.uber.org/goleak"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// childVar makes this test program a process that uses the shared stack of the named directory until
// its standard input ends.
const childVar = "OUTRELAY_STACKTEST_CHILD"

func TestMain(m *testing.M) {
	if dir := os.Getenv(childVar); dir != "" {
		_ = os.Unsetenv(childVar)
		at, err := joinShared(dir, true)
		set := 0
		if err == nil {
			set, err = takeReplicaSet(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		_ = json.NewEncoder(os.Stdout).Encode(place{at, set})
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// place is the output of a child.
type place struct {
	address
	Set int `json:"set"`
}

type child struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	log *bytes.Buffer // may be read after the process has ended
}

func startChild(t *testing.T, dir string) child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childVar+"="+dir, idleVar+"=1s")
	log := new(bytes.Buffer)
	cmd.Stderr = io.MultiWriter(os.Stderr, log)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}

	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}

	return child{cmd, in, bufio.NewReader(out), log}
}

func (c child) readAddress(t *testing.T) (at place) {
	t.Helper()
	line, err := c.out.ReadBytes('\n')
	if err == nil {
		err = json.Unmarshal(line, &at)
	}
	if err != nil {
		t.Fatal("child: ", err)
	}
	return at
}

// Three processes that come at once get the same servers from one keeper; they stay while one of the
// processes lives, however the others end, and go soon after the last.
func TestSharedByProcesses(t *testing.T) {
	t.Parallel()
	LockMachine(t)
	dir := t.TempDir()
	children := []child{startChild(t, dir), startChild(t, dir), startChild(t, dir)}
	first := children[0].readAddress(t)
	usedBy := map[int]int{first.Set: 1}
	for _, c := range children[1:] {
		at := c.readAddress(t)
		usedBy[at.Set]++
		if at.PID != first.PID || !slices.Equal(at.MongoURIs, first.MongoURIs) || len(at.MongoURIs) != replicaSets {
			t.Errorf("two processes got different servers: %+v and %+v", first, at)
		}
	}
	if len(usedBy) != replicaSets {
		t.Errorf("processes by the replica set that they use: got %v, want %d replica sets in use", usedBy, replicaSets)
	}

	// One is killed, one ends: the third still has its servers after more than the idle time.
	if err := children[0].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = children[0].cmd.Wait()
	_ = children[1].in.Close()
	_ = children[1].cmd.Wait()
	late := startChild(t, dir)
	if at := late.readAddress(t); at.PID != first.PID {
		t.Errorf("the servers changed while a process used them: %+v, then %+v", first, at)
	}
	for _, c := range []child{children[2], late} {
		_ = c.in.Close()
		_ = c.cmd.Wait()
	}

	showsStart := func(c child) bool { return bytes.Contains(c.log.Bytes(), []byte(devstack.Ready)) }
	if n := len(slices.DeleteFunc(children, func(c child) bool { return !showsStart(c) })); n != 1 || showsStart(late) {
		t.Errorf("processes that showed the start of the servers: got %d, want only the process that started them", n)
	}

	// The kernel frees the keeper's lock when the keeper ends.
	keeper := flock.New(filepath.Join(dir, "keeper.lock"))
	if err := keeper.Lock(); err != nil {
		t.Fatal(err)
	}
	defer keeper.Close()
	if _, err := os.Stat(statePath(dir)); !os.IsNotExist(err) {
		t.Errorf("the keeper left its state behind: %v", err)
	}
	if err := checkBrokers(first.address); err == nil {
		t.Error("the servers outlived their keeper")
	}
}

// A keeper that was killed is noticed, its servers die with it, and the next process has new ones.
func TestKeeperKilled(t *testing.T) {
	t.Parallel()
	LockMachine(t)
	dir := t.TempDir()
	a := startChild(t, dir)
	first := a.readAddress(t)
	p, err := os.FindProcess(first.PID)
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}

	dead := flock.New(filepath.Join(dir, "keeper.lock"))
	// The lock is free as soon as the kill has arrived.
	if err := dead.Lock(); err != nil {
		t.Fatal(err)
	}

	_ = dead.Close()
	b := startChild(t, dir)
	second := b.readAddress(t)
	if second.PID == first.PID {
		t.Error("a dead keeper's servers were handed out")
	}

	for _, c := range []child{a, b} {
		_ = c.in.Close()
		_ = c.cmd.Wait()
	}

	keeper := flock.New(filepath.Join(dir, "keeper.lock"))
	if err := keeper.Lock(); err != nil {
		t.Fatal(err)
	}

	_ = keeper.Close()
}
