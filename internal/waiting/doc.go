// Package waiting sends the envelopes that wait outside of the stream's order: retried, blocked and
// parked ones. [Exceptions] sends them when their turn comes, and a [Finisher] writes the fates of all
// envelopes that are sent outside of the stream, scheduled ones included.
package waiting
