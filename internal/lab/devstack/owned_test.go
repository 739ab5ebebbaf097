//go:build unix

package devstack

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// Without a home directory the cache is in the temporary directory, where another user may have made it. Its programs are
// executed, so it must belong to this user.
func TestCacheInTheTemporaryDirectoryMustBeOwn(t *testing.T) {
	t.Setenv("HOME", "")
	t.Setenv("XDG_CACHE_HOME", "")
	name := fmt.Sprintf("cache-%d", os.Getuid())

	for what, c := range map[string]struct {
		prepare func(dir string) error
		ok      bool
	}{
		"nothing there":    {func(string) error { return nil }, true},
		"own":              {func(dir string) error { return os.Mkdir(dir, 0o700) }, true},
		"readable by all":  {func(dir string) error { return os.Mkdir(dir, 0o755) }, false},
		"writable by all":  {func(dir string) error { return mkdirMode(dir, 0o777) }, false},
		"a link elsewhere": {func(dir string) error { return os.Symlink(t.TempDir(), dir) }, false},
		"of another user": {func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil || os.Getuid() != 0 {
				// Only root can give a directory away. Another mode stands for it.
				return mkdirMode(dir, 0o770)
			}
			return os.Chown(dir, 4242, 4242)
		}, false},
	} {
		temp := t.TempDir()
		t.Setenv("TMPDIR", temp)
		if err := c.prepare(filepath.Join(temp, name)); err != nil {
			t.Fatal(what, err)
		}
		if _, err := openCache(); (err == nil) != c.ok {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// mkdirMode makes a directory with a mode, whatever the umask is.
func mkdirMode(dir string, mode os.FileMode) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return os.Chmod(dir, mode)
}
