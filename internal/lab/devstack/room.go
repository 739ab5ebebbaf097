package devstack

import "fmt"

const (
	// leastRoom is the free space that a start requires: a mongod writes 300 MB before its first document.
	leastRoom = 1000 << 20
	// scarceRoom is the free space below which a server may have ended because of it.
	scarceRoom = 200 << 20
)

// checkRoom returns an error if the file system of dir has fewer free bytes. A server ends when its disk is full.
func checkRoom(dir string, least uint64) error {
	free, err := freeBytes(dir)
	// An unknown space must neither prevent a start nor hide the end of a log.
	if err == nil && free < least {
		return fmt.Errorf("%s has %d MiB of free space; the servers need %d MiB: free some, for example with go clean -cache, "+
			"or set XDG_CACHE_HOME to a directory on a larger disk", dir, free>>20, least>>20)
	}
	return nil
}
