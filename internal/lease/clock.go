package lease

import (
	"slices"
	"time"
)

var processStart = time.Now()

func monotonic() time.Duration { return time.Since(processStart) }

// roundTrips holds the durations of the last successful renewals. The guard time depends on them.
type roundTrips struct {
	last [128]time.Duration
	n    int
}

func (r *roundTrips) record(d time.Duration) {
	r.last[r.n%len(r.last)] = d
	r.n++
}

// p99 returns the 99th percentile of the recorded durations, or 0 if there are none.
func (r *roundTrips) p99() time.Duration {
	n := min(r.n, len(r.last))
	if n == 0 {
		return 0
	}

	s := slices.Clone(r.last[:n])
	slices.Sort(s)
	return s[(n*99+99)/100-1]
}

// guardTime returns how long before the expiry work stops, so that everything sent until then has
// ended when the lease expires: 20 % of ttl, or twice the 99th percentile of the renewals' round
// trips if that is longer. It is at most half of ttl, because otherwise a slow server would leave
// no time to work.
func guardTime(ttl, p99 time.Duration) time.Duration {
	return min(max(ttl/5, 2*p99), ttl/2)
}
