// Package integration runs whole relays, as processes of their own, on real servers that all tests share, and holds what
// comes out against the promises. Each test has its own databases, topics and state.
package integration
