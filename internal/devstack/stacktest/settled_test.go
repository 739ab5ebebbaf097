package stacktest

import (
	"errors"
	"testing"
)

func TestSettledWaitsForWhatIsAboutToEnd(t *testing.T) {
	t.Parallel()
	for code, want := range map[int]int{0: 3, 1: 0} { // after failed tests there is no wait
		asked := 0
		m := Settled(settled(func() int { return code }), func(...int) error {
			if asked++; asked < 3 {
				return errors.New("there is one still")
			}
			return nil
		})

		if got := m.Run(); got != code || asked != want {
			t.Errorf("tests that end with %d: %d, asked %d times, want %d", code, got, asked, want)
		}
	}
}
