// Package outboxes finds the outbox collections and registers each for one watcher. It defines the states and
// positions of their envelopes, and the indexes of the collections.
//
// Each function does its own I/O, keeps no state and starts no goroutine. It blocks until its context
// ends.
package outboxes
