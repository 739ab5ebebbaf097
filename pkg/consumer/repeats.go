package consumer

import (
	"sync/atomic"
	"time"
)

// repeatsLast is how long marks are read after a message that has a mark. Such messages come together: a relay that was killed
// sends the end of its stream again.
const repeatsLast = 10 * time.Second

// repeats is when a message of a handler last had a mark. It is safe for concurrent use.
type repeats struct{ at atomic.Int64 } // Unix nanoseconds

func (r *repeats) note(now time.Time) { r.at.Store(now.UnixNano()) }

// areRecent reports whether the next messages may have marks too. Then it costs less to read the marks than to begin again.
func (r *repeats) areRecent(now time.Time) bool {
	return now.UnixNano()-r.at.Load() < int64(repeatsLast)
}
