//go:build !linux

package lease

import "time"

// bootClock is the monotonic clock: on macOS and Windows a suspended machine is noticed at the next renewal only.
func bootClock() time.Duration { return monotonic() }
