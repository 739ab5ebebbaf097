//go:build !crashpoints

// Package crash holds the points at which a test may kill the process with SIGKILL. Without the build tag `crashpoints`
// a point is an empty function that the compiler removes.
package crash

// At is a crash point.
func At(string) {}
