//go:build !linux

package lease

import "time"

// BootClock returns the monotonic clock. On macOS and Windows this clock stops while the machine is
// suspended, so a suspension is noticed only at the next renewal.
func BootClock() time.Duration { return monotonic() }
