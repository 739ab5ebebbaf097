package lease

import (
	"time"

	"golang.org/x/sys/unix"
)

// bootClock is the time since the machine started, including the time it was suspended. Go's own monotonic clock stands
// still in a suspended virtual machine, so a lease that ran out meanwhile would look fresh on waking (N2).
func bootClock() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return monotonic()
	}
	return time.Duration(ts.Nano())
}
