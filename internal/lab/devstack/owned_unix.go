//go:build unix

package devstack

import (
	"fmt"
	"os"
	"syscall"
)

// checkOwned returns an error unless dir is a directory of this user that nobody else may write or read.
func checkOwned(dir string) error {
	// A link would lead to a directory of its owner's choice.
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}

	owner, ok := info.Sys().(*syscall.Stat_t)
	switch {
	case !info.IsDir():
		return fmt.Errorf("%s is not a directory", dir)
	case !ok || int(owner.Uid) != os.Getuid():
		return fmt.Errorf("%s belongs to another user", dir)
	case info.Mode().Perm() != 0o700:
		return fmt.Errorf("%s has the mode %#o instead of 0700", dir, info.Mode().Perm())
	}
	return nil
}
