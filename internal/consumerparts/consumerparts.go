// Package consumerparts gives other packages of this module the parts of a consumer.Consumer that are not exported.
package consumerparts

// IsHeld reports whether c, which must be a *consumer.Consumer, is paused, or one of its handlers is suspended. Package
// consumer sets the function: an import in the other direction would be a cycle.
var IsHeld func(c any) bool
