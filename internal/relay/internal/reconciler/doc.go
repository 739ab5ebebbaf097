// Package reconciler sends the envelopes that wait: retried, blocked, parked, requeued and replayed ones. A [Sender] publishes
// each of them when its turn comes, and leaves the result to the ledger.
package reconciler
