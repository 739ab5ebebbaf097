package devstack

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// Cleaned is an entry that [Clean] removed from the cache directory.
type Cleaned struct {
	Name string
	MB   float64
}

// Clean removes from [CacheDir] all programs that were fetched (servers and browser) and the data of
// runs that have ended. It removes nothing and returns an error while a stack of this machine runs. The
// next start fetches again what it needs.
func Clean(ctx context.Context) ([]Cleaned, error) {
	c, err := openCache()
	if err != nil {
		return nil, err
	}

	// A new stack waits for this lock before it makes its directory.
	unlock, err := c.acquireLock(ctx, "run", func() {})
	if err != nil {
		return nil, err
	}
	defer unlock()
	removeDeadStacks(c.path("run"))
	running, err := filepath.Glob(c.path("run", "stack-*.lock"))
	if err != nil {
		return nil, err
	}
	if len(running) > 0 {
		return nil, fmt.Errorf("%d stacks of this machine still run (%s): stop them first; servers of tests stop 20 s after the last test", len(running), c.path("run"))
	}

	entries, err := os.ReadDir(c.root)
	if err != nil {
		return nil, err
	}
	var cleaned []Cleaned
	for _, e := range entries {
		// Lock files stay: another process may wait for one of them.
		if !e.IsDir() || e.Name() == "run" || e.Name() == "shared" {
			continue
		}
		// A fetch that is under way holds the lock of its entry, so this waits for it. A fetch that died
		// left a directory.
		lock := e.Name()
		if entry, ok := strings.CutPrefix(lock, fillingPrefix); ok {
			lock = entry[:max(0, strings.LastIndexByte(entry, '-'))]
		}
		mb := megabytes(c.path(e.Name()))
		if err := c.removeEntry(ctx, lock, e.Name()); err != nil {
			return cleaned, err
		}
		cleaned = append(cleaned, Cleaned{Name: e.Name(), MB: mb})
	}
	return cleaned, nil
}
