package devstack

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/gofrs/flock"
)

// cache is the directory of the fetched programs, the locks of the machine and the data of running stacks. Every
// entry appears by one rename, so a reader sees either the complete entry or none.
type cache struct{ root string }

// fillingPrefix starts the names of directories that become entries when they are complete.
const fillingPrefix = ".filling-"

// CacheDir returns the directory of the fetched programs and the running stacks: outrelay/devstack in the user's
// cache directory, or in the temporary directory if the user has no cache directory.
func CacheDir() string {
	base, _ := cacheBase()
	return filepath.Join(base, "outrelay", "devstack")
}

// cacheBase returns the user's cache directory. shared means that it is below the temporary directory, where other users of
// the machine may make directories of any name.
func cacheBase() (dir string, shared bool) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return filepath.Join(os.TempDir(), fmt.Sprintf("cache-%d", os.Getuid())), true
	}
	return dir, false
}

func openCache() (cache, error) {
	cache := cache{CacheDir()}
	// The programs in the cache are executed.
	if base, shared := cacheBase(); shared {
		if err := os.Mkdir(base, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return cache, fmt.Errorf("creating the cache directory: %w", err)
		}
		if err := checkOwned(base); err != nil {
			return cache, fmt.Errorf("the cache directory may belong to somebody else: %w; set HOME or XDG_CACHE_HOME", err)
		}
	}

	if err := os.MkdirAll(cache.root, 0o755); err != nil {
		return cache, fmt.Errorf("creating the cache directory: %w", err)
	}
	return cache, nil
}

func (c cache) path(elem ...string) string {
	return filepath.Join(append([]string{c.root}, elem...)...)
}

func (c cache) hasEntry(name string) bool {
	_, err := os.Stat(c.path(name))
	return err == nil
}

// fillOnce creates the entry if it does not exist. fill writes the content into a temporary directory. If several
// processes call fillOnce, one of them fills the entry and the others wait for it.
func (c cache) fillOnce(ctx context.Context, name string, waiting func(), fill func(tmp string) error) error {
	return c.fillUnless(ctx, name, func() bool { return c.hasEntry(name) }, waiting, fill)
}

// fillUnless is fillOnce for an entry that is replaced unless isGood returns true.
func (c cache) fillUnless(ctx context.Context, name string, isGood func() bool, waiting func(), fill func(tmp string) error) error {
	if isGood() {
		return nil
	}

	unlock, err := c.acquireLock(ctx, name, waiting)
	if err != nil {
		return err
	}
	defer unlock()

	// Another process may have filled it in the meantime.
	if isGood() {
		return nil
	}

	// This process has the lock, so every other directory of this name belongs to a dead process.
	if old, err := filepath.Glob(c.path(fillingPrefix + name + "-*")); err == nil {
		for _, dir := range old {
			_ = os.RemoveAll(dir)
		}
	}

	tmp, err := os.MkdirTemp(c.root, fillingPrefix+name+"-*")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)

	if err := fill(tmp); err != nil {
		return err
	}
	// A directory cannot replace another one in one step.
	if c.hasEntry(name) {
		old := c.path(fillingPrefix + name + "-old")
		defer os.RemoveAll(old)
		if err := os.Rename(c.path(name), old); err != nil {
			return err
		}
	}
	// The rename makes the entry complete in one step, also for a process that does not hold the lock.
	return os.Rename(tmp, c.path(name))
}

// FetchOnce returns the directory name in [CacheDir]. If it does not exist, fill writes its content to a temporary
// directory first. If several processes call FetchOnce, one of them calls fill and the others wait.
func FetchOnce(ctx context.Context, name string, fill func(tmp string) error) (string, error) {
	cache, err := openCache()
	if err == nil {
		err = cache.fillOnce(ctx, name, func() {}, fill)
	}
	return cache.path(name), err
}

// removeEntry removes a directory of the cache while it holds the named lock.
func (c cache) removeEntry(ctx context.Context, lock, name string) error {
	unlock, err := c.acquireLock(ctx, lock, func() {})
	if err != nil {
		return err
	}
	defer unlock()
	return os.RemoveAll(c.path(name))
}

// acquireLock acquires the named lock of the machine. If another process holds it, acquireLock calls waiting and
// blocks.
func (c cache) acquireLock(ctx context.Context, name string, waiting func()) (unlock func(), err error) {
	flock := flock.New(c.path(name + ".lock"))
	ok, err := flock.TryLock()
	if err == nil && !ok {
		waiting()
		_, err = flock.TryLockContext(ctx, 100*time.Millisecond)
	}
	if err != nil {
		_ = flock.Close()
		return nil, fmt.Errorf("waiting for %s: %w", flock.Path(), err)
	}
	return func() { _ = flock.Close() }, nil
}

// dataDir creates a directory for one stack in parent. release removes it. dataDir also removes the directories of
// dead stacks, which are left only after a power cut: otherwise the guard has removed them.
func (c cache) dataDir(ctx context.Context, parent string) (dir string, release func(), err error) {
	if parent == "" {
		parent = c.path("run")
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", nil, fmt.Errorf("creating the data directory: %w", err)
	}

	// Without the lock, another process could remove the directory before its lock file exists.
	unlock, err := c.acquireLock(ctx, "run", func() {})
	if err != nil {
		return "", nil, err
	}
	defer unlock()

	removeDeadStacks(parent)
	if err := checkRoom(parent, leastRoom); err != nil {
		return "", nil, err
	}
	dir, err = os.MkdirTemp(parent, "stack-*")
	if err != nil {
		return "", nil, err
	}

	mine := flock.New(dir + ".lock")
	if ok, err := mine.TryLock(); err != nil || !ok {
		return "", nil, fmt.Errorf("locking %s: %w", mine.Path(), errors.Join(err, os.RemoveAll(dir)))
	}

	return dir, func() {
		_ = os.RemoveAll(dir)
		_ = os.Remove(mine.Path())
		_ = mine.Close()
	}, nil
}

// removeDeadStacks removes the data of stacks whose lock is free.
func removeDeadStacks(parent string) {
	locks, err := filepath.Glob(filepath.Join(parent, "stack-*.lock"))
	if err != nil {
		return
	}

	for _, path := range locks {
		flock := flock.New(path)
		if ok, err := flock.TryLock(); err == nil && ok {
			_ = os.RemoveAll(path[:len(path)-len(".lock")])
			_ = os.Remove(path)
		}
		_ = flock.Close()
	}
}

// megabytes returns the size of all files in the directories.
func megabytes(dirs ...string) float64 {
	var n int64
	for _, dir := range dirs {
		_ = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
			if err == nil && entry.Type().IsRegular() {
				if info, err := entry.Info(); err == nil {
					n += info.Size()
				}
			}
			return nil
		})
	}
	return float64(n) / 1e6
}
