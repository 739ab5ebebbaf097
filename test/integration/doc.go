// Package integration runs relays as separate processes on real servers that all tests share, and checks the
// delivered records against the promises. Each test has its own databases, topics and state.
package integration
