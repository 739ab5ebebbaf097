package stacktest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"

	"github.com/outrelay/outrelay/internal/lab/devstack"
)

// aloneFor is how long a package waits for its turn: less than `go test` waits for a package.
const aloneFor = 8 * time.Minute

// turn is held until the process ends.
var turn *flock.Flock

// Alone blocks until no other package that called Alone runs on this machine. Later callers wait until this
// process ends. It is for packages whose tests run many processes under load. On a few processors, two such
// packages would starve each other's servers, and the tests would measure the machine. TestMain calls it
// before the tests run, so that the wait does not count as their time.
func Alone() {
	path := filepath.Join(devstack.CacheDir(), "alone.lock")
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	ok := false
	turn = flock.New(path)

	if err == nil {
		if ok, err = turn.TryLock(); err == nil && !ok {
			fmt.Fprintln(os.Stderr, "waiting for the tests of another package that runs many processes")
			ctx, cancel := context.WithTimeout(context.Background(), aloneFor)
			defer cancel()
			ok, err = turn.TryLockContext(ctx, 100*time.Millisecond)
		}
	}

	if !ok {
		fmt.Fprintf(os.Stderr, "the tests run concurrently with the tests of another package (%s: %v)\n", path, err)
	}
}
