package lease

import (
	"time"

	"golang.org/x/sys/unix"
)

// BootClock returns the time since the machine started, including the time it was suspended. The
// monotonic clock of Go stands still while a virtual machine is suspended. By that clock a lease that
// expired during the suspension would still look valid (N2).
func BootClock() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return monotonic()
	}
	return time.Duration(ts.Nano())
}
