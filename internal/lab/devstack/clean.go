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

// Clean removes all fetched programs (servers and browser) from [CacheDir], and the data of ended runs. While a
// stack runs on this machine, it removes nothing and returns an error. The next start fetches the programs again.
func Clean(ctx context.Context) ([]Cleaned, error) {
	cache, err := openCache()
	if err != nil {
		return nil, err
	}

	// A new stack waits for this lock before it makes its directory.
	unlock, err := cache.acquireLock(ctx, "run", func() {})
	if err != nil {
		return nil, err
	}
	defer unlock()

	removeDeadStacks(cache.path("run"))
	running, err := filepath.Glob(cache.path("run", "stack-*.lock"))
	if err != nil {
		return nil, err
	}
	if len(running) > 0 {
		return nil, fmt.Errorf("%d stacks still run on this machine (%s): stop them first; "+
			"servers of tests stop 20 s after the last test", len(running), cache.path("run"))
	}

	entries, err := os.ReadDir(cache.root)
	if err != nil {
		return nil, err
	}

	var cleaned []Cleaned
	for _, e := range entries {
		// Lock files stay: another process may wait for one of them.
		if !e.IsDir() || e.Name() == "run" || e.Name() == "shared" {
			continue
		}

		// An active fetch holds the lock of its entry, so this waits for it. A dead fetch left a directory.
		lock := e.Name()
		if entry, ok := strings.CutPrefix(lock, fillingPrefix); ok {
			lock = entry[:max(0, strings.LastIndexByte(entry, '-'))]
		}

		mb := megabytes(cache.path(e.Name()))
		if err := cache.removeEntry(ctx, lock, e.Name()); err != nil {
			return cleaned, err
		}
		cleaned = append(cleaned, Cleaned{Name: e.Name(), MB: mb})
	}
	return cleaned, nil
}
