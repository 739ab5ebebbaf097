package stacktest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sync/errgroup"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// The shared stack belongs to a keeper: a process that the first test process starts from its own program (see init)
// and that outlives it. Locks of the file system show which processes exist. The kernel releases them when a process
// ends, in any way:
//
//	use.lock     shared by every test process that uses the stack, until it ends
//	start.lock   held while a test process searches for a keeper or starts one
//	keeper.lock  held by the keeper until it ends
//	set0.lock, … held by the test process that has this replica set for itself, until it ends
//
// They are acquired in this order. The keeper stops the stack when no process has held use.lock for a while
// (idleFor). While it stops the stack, it holds use.lock itself, so that a new test process waits and then
// starts another keeper.
const (
	keeperVar = "OUTRELAY_DEVSTACK_KEEPER" // the shared directory, in a keeper's environment
	idleVar   = "OUTRELAY_DEVSTACK_IDLE"   // another idleFor, as a duration
	idleFor   = 20 * time.Second

	// replicaSets is how many replica sets of one member the stack has. go test runs two packages concurrently on two
	// processors. Then no test waits for the fail point that a test of the other package uses.
	replicaSets = 2
)

// errKeeperEnded is the error if the keeper ends before its servers serve.
var errKeeperEnded = errors.New("the keeper of the servers ended")

// address is the content of state.json. The keeper writes the file, and it exists while the stack runs.
type address struct {
	MongoURIs []string `json:"mongo_uris"` // one for each replica set
	Brokers   []string `json:"brokers"`
	PID       int      `json:"pid"`
}

// init makes a process that was started as the keeper run as the keeper, before any test runs.
func init() {
	dir := os.Getenv(keeperVar)
	if dir == "" {
		return
	}
	_ = os.Unsetenv(keeperVar)
	if err := runKeeper(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

var (
	sharedOnce sync.Once
	sharedAt   address
	sharedSet  int // index of the replica set that the tests of this process use
	errShared  error
	inUse      *flock.Flock // held until the process ends
	ownSet     *flock.Flock // held until the process ends, if it has the replica set for itself
)

// shared returns the stack that all test processes of this machine share. It starts the stack if necessary.
func shared(tb testing.TB) address {
	tb.Helper()
	sharedOnce.Do(func() {
		if sharedAt, errShared = joinShared(sharedDir(), testing.Verbose()); errShared == nil {
			sharedSet, errShared = takeReplicaSet(sharedDir())
		}
	})
	if errShared != nil {
		tb.Fatalf("shared test servers: %v", errShared)
	}
	return sharedAt
}

func sharedDir() string { return filepath.Join(devstack.CacheDir(), "shared", "servers") }

// joinShared marks the stack as used by this process, and finds or starts it. If show is set, it shows the start.
func joinShared(dir string, show bool) (address, error) {
	// A first call may have to fetch the servers.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()

	if err := os.MkdirAll(dir, 0o755); err != nil {
		return address{}, err
	}

	inUse = flock.New(filepath.Join(dir, "use.lock"))
	if _, err := inUse.TryRLockContext(ctx, 100*time.Millisecond); err != nil {
		return address{}, fmt.Errorf("waiting for another stack to end: %w", err)
	}

	starting := flock.New(filepath.Join(dir, "start.lock"))
	if _, err := starting.TryLockContext(ctx, 100*time.Millisecond); err != nil {
		return address{}, fmt.Errorf("waiting for another process that starts the servers: %w", err)
	}
	defer starting.Close()

	for {
		found := keeperAlive(dir)
		if !found {
			_ = os.Remove(statePath(dir))
			if err := startKeeper(dir); err != nil {
				return address{}, err
			}
		}

		at, err := awaitState(ctx, dir, show && !found)
		if found && errors.Is(err, errKeeperEnded) {
			// That keeper was about to end. Start a new one.
			continue
		}
		return at, err
	}
}

// takeReplicaSet returns the index of a replica set that no other process uses. If there is none, the process shares one.
func takeReplicaSet(dir string) (int, error) {
	for i := range replicaSets {
		ownSet = flock.New(filepath.Join(dir, fmt.Sprintf("set%d.lock", i)))
		free, err := ownSet.TryLock()
		if err != nil {
			return 0, fmt.Errorf("locking a replica set: %w", err)
		}
		if free {
			return i, nil
		}
		_ = ownSet.Close()
	}
	return os.Getpid() % replicaSets, nil
}

// keeperAlive reports whether a keeper runs.
func keeperAlive(dir string) bool {
	flock := flock.New(filepath.Join(dir, "keeper.lock"))
	defer flock.Close()
	free, err := flock.TryLock()
	return err == nil && !free
}

// startKeeper starts this program once more, in its own session and with its output in a file, so that neither a
// terminal nor the go command waits for it. It blocks until the keeper holds its lock.
func startKeeper(dir string) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}

	log, err := os.Create(logPath(dir))
	if err != nil {
		return err
	}
	defer log.Close()

	reader, writer, err := os.Pipe()
	if err != nil {
		return err
	}
	defer reader.Close()

	cmd := exec.Command(exe)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), keeperVar+"="+dir)
	cmd.Stdout, cmd.Stderr = writer, log
	detach(cmd)

	err = cmd.Start()
	_ = writer.Close()
	if err != nil {
		return fmt.Errorf("starting the keeper of the servers: %w", err)
	}

	// The keeper closes its standard output when it holds its lock. The output of a dead keeper is closed too.
	var started [1]byte
	_, _ = reader.Read(started[:])
	return cmd.Process.Release()
}

// awaitState blocks until the keeper has written its state, and then checks that the brokers respond. If show is set, it
// copies the log of the keeper to the standard error.
func awaitState(ctx context.Context, dir string, show bool) (address, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	shown := 0
	for {
		// Checked before the file is read, because a keeper removes the file before it ends.
		alive := keeperAlive(dir)

		at, err := readState(dir)
		if show {
			words, _ := os.ReadFile(logPath(dir))
			_, _ = os.Stderr.Write(words[min(shown, len(words)):])
			shown = len(words)
		}

		if err == nil {
			return at, checkBrokers(at)
		}
		if !alive {
			words, _ := os.ReadFile(logPath(dir))
			return at, fmt.Errorf("%w; its log:\n%s", errKeeperEnded, words)
		}

		select {
		case <-ctx.Done():
			return at, fmt.Errorf("waiting for the servers (see %s): %w", logPath(dir), ctx.Err())
		case <-tick.C:
		}
	}
}

func readState(dir string) (stored address, err error) {
	data, err := os.ReadFile(statePath(dir))
	if err != nil {
		return stored, err
	}
	return stored, json.Unmarshal(data, &stored)
}

func checkBrokers(stored address) error {
	for _, b := range stored.Brokers {
		conn, err := net.DialTimeout("tcp", b, 5*time.Second)
		if err != nil {
			return fmt.Errorf("the servers of keeper %d do not respond (end that process to get new ones): %w", stored.PID, err)
		}
		_ = conn.Close()
	}
	return nil
}

func statePath(dir string) string { return filepath.Join(dir, "state.json") }
func logPath(dir string) string   { return filepath.Join(dir, "keeper.log") }

// runKeeper starts the servers and writes their addresses. It stops them when no process has used them for
// idleFor, or after a signal.
func runKeeper(dir string) error {
	mine := flock.New(filepath.Join(dir, "keeper.lock"))
	if ok, err := mine.TryLock(); err != nil || !ok {
		return errors.Join(errors.New("another keeper runs the servers"), err)
	}
	defer mine.Close()

	// This signals startKeeper that the lock is held.
	_ = os.Stdout.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()

	stacks, err := startStacks(ctx)
	if err != nil {
		return err
	}

	at := address{PID: os.Getpid()}
	var members []*devstack.Member
	for _, stack := range stacks {
		defer stack.Stop()
		at.MongoURIs, at.Brokers = append(at.MongoURIs, stack.MongoURI()), append(at.Brokers, stack.Brokers()...)
		members = slices.Concat(members, stack.Mongods(), stack.Kafkas())
	}

	if err := writeState(dir, at); err != nil {
		return err
	}
	defer os.Remove(statePath(dir))

	idle := idleFor
	if duration, err := time.ParseDuration(os.Getenv(idleVar)); err == nil {
		idle = duration
	}
	return awaitIdle(ctx, dir, members, idle)
}

// startStacks starts a stack for each replica set. The first one has the broker, too. If a start fails, startStacks stops the others.
func startStacks(ctx context.Context) ([]*devstack.Stack, error) {
	stacks := make([]*devstack.Stack, replicaSets)
	var all errgroup.Group
	for i := range stacks {
		all.Go(func() (err error) {
			stacks[i], err = devstack.Start(ctx, devstack.Options{
				Mongods: 1, Brokers: max(0, 1-i), Quick: true, Progress: devstack.Lines(os.Stderr),
			})
			return err
		})
	}

	err := all.Wait()
	if err != nil {
		for _, stack := range stacks {
			if stack != nil {
				stack.Stop()
			}
		}
	}
	return stacks, err
}

// awaitIdle blocks until no process has used the stack for the duration idle, ctx ends, or a server dies. If
// the stack is idle, the process keeps holding use.lock until it ends.
func awaitIdle(ctx context.Context, dir string, members []*devstack.Member, idle time.Duration) error {
	use := flock.New(filepath.Join(dir, "use.lock"))
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()

	last := time.Now()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		for _, member := range members {
			select {
			case <-member.Done():
				return member.DescribeEnd()
			default:
			}
		}

		// Each process with a test that uses the stack holds a shared lock on this file.
		free, err := use.TryLock()
		if err != nil {
			return err
		}

		switch {
		case !free:
			last = time.Now()
		case time.Since(last) > idle:
			return nil
		default:
			if err := use.Unlock(); err != nil {
				return err
			}
		}
	}
}

func writeState(dir string, stored address) error {
	encoded, err := json.Marshal(stored)
	if err != nil {
		return err
	}
	tmp := statePath(dir) + ".new"
	if err := os.WriteFile(tmp, encoded, 0o644); err != nil {
		return err
	}
	return os.Rename(tmp, statePath(dir))
}
