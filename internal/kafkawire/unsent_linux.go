package kafkawire

import "golang.org/x/sys/unix"

// unsentOf returns how many bytes of a socket the other side has not acknowledged.
func unsentOf(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	if err != nil {
		return 0
	}
	return n
}
