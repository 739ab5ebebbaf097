package lease

import (
	"slices"
	"time"
)

var processStart = time.Now()

func monotonic() time.Duration { return time.Since(processStart) }

// roundTrips remembers the durations of the last successful renewals, for the guard.
type roundTrips struct {
	last [128]time.Duration
	n    int
}

func (r *roundTrips) record(d time.Duration) {
	r.last[r.n%len(r.last)] = d
	r.n++
}

// p99 is the 99th percentile of what is remembered, 0 while there is nothing.
func (r *roundTrips) p99() time.Duration {
	n := min(r.n, len(r.last))
	if n == 0 {
		return 0
	}
	s := slices.Clone(r.last[:n])
	slices.Sort(s)
	return s[(n*99+99)/100-1]
}

// guardTime is how long before the expiry work stops: what was sent just before must have ended by then. It never takes more
// than half of ttl, else a slow server would leave no time to work in.
func guardTime(ttl, configured, p99 time.Duration) time.Duration {
	return min(max(configured, ttl/5, 2*p99), ttl/2)
}
