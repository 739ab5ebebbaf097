// Package letterparts has the parts of a deadletter.Desk that only packages of this module use: the counts of its letters, and the
// key of its methods for consumers.
package letterparts

// Key is an argument of the functions that only packages of this module call: other modules cannot name it.
type Key struct{}
