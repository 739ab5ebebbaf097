// Package outboxes knows the outbox collections: which there are, which watcher is registered for each,
// which states and positions their envelopes have, and which indexes they need.
//
// Each function does its own I/O, keeps no state and starts no goroutine. It blocks until its context
// ends.
package outboxes
