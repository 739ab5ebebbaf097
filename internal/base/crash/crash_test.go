package crash

import "testing"

// If the points were not off in a program that the linker did not prepare, this process would be killed here.
func TestPointsAreOffUnlessTheLinkerEnabledThem(t *testing.T) {
	t.Setenv("OUTRELAY_CRASH_AT", "here")
	At("here")
}
