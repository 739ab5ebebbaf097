//go:build !crashpoints

// Package crash marks the points at which a test can kill the process with SIGKILL. Without the build tag
// `crashpoints` a point is an empty function, and the compiler removes the call.
package crash

// At marks a crash point.
func At(string) {}
