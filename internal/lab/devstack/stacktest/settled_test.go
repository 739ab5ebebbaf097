package stacktest

import (
	"errors"
	"testing"
)

func TestSettledWaitsForGoroutinesThatAreAboutToEnd(t *testing.T) {
	t.Parallel()
	// After failed tests there is no wait.
	for code, want := range map[int]int{0: 3, 1: 0} {
		calls := 0
		m := Settled(settled(func() int { return code }), func(...int) error {
			if calls++; calls < 3 {
				return errors.New("a goroutine still runs")
			}
			return nil
		})

		if got := m.Run(); got != code || calls != want {
			t.Errorf("tests that end with %d: %d after %d checks, want %d checks", code, got, calls, want)
		}
	}
}
