//go:build !release

package main

import "testing"

// A profile that cannot be written is an error of the measurement. Each write to the file of this test fails.
func TestAProfileThatCannotBeWrittenIsAnError(t *testing.T) {
	t.Parallel()
	const full = "/dev/full"
	stop, err := startProfiles("", full)
	if err != nil {
		t.Fatal(err)
	}
	if err := stop(); err == nil {
		t.Errorf("no error, although nothing can be written to %s", full)
	}
}
