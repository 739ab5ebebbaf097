//go:build unix

package devstack

import "golang.org/x/sys/unix"

// freeBytes returns the space of the file system of dir that this user may use.
func freeBytes(dir string) (uint64, error) {
	var stat unix.Statfs_t
	if err := unix.Statfs(dir, &stat); err != nil {
		return 0, err
	}
	return uint64(stat.Bavail) * uint64(stat.Bsize), nil //nolint:unconvert,gosec // the types differ between systems, and both are positive
}
