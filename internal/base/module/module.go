// Package module closes exported functions to other modules.
package module

// Key is an argument of exported functions that only packages of this module call: other modules cannot name its type.
type Key struct{}
