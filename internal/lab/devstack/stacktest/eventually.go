package stacktest

import (
	"testing"
	"time"
)

// patience is how long Eventually waits. It is long, because the machine may be busy with other tests.
const patience = 3 * time.Minute

// Eventually calls ok until it returns true. It fails the test after [patience]. It is for conditions
// that have no signal to wait for. The message names the condition, and the results of state.
func Eventually(tb testing.TB, condition string, ok func() bool, state ...func() any) {
	tb.Helper()
	EventuallyIn(tb, patience, condition, ok, state...)
}

// EventuallyIn is Eventually with another time limit.
func EventuallyIn(tb testing.TB, limit time.Duration, condition string, ok func() bool, state ...func() any) {
	tb.Helper()
	for start := time.Now(); ; {
		before := time.Now()
		if ok() {
			return
		}
		if time.Since(start) < limit {
			// An expensive condition is checked less often, so that the checks do not slow down the
			// change.
			pause := min(max(10*time.Millisecond, 2*time.Since(before)), 400*time.Millisecond)
			<-time.After(pause)
			continue
		}

		var last []any
		for _, s := range state {
			last = append(last, s())
		}
		tb.Fatalf("%s: not within %s; last state: %v", condition, limit, last)
	}
}
