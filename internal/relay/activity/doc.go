// Package activity summarizes the latest deliveries of an owner: figures of each topic over the last minute, the last
// place in each topic, and a sample of the events.
//
// It has one [Log] for each term of ownership, in memory. The owner stores a [Report] of it every few seconds, so that other
// processes can show it.
//
// Cost: [Log.Observe] takes one lock for each acked batch and allocates only for the first record of a topic.
// [Log.Sample] costs one atomic load for each envelope, and a lock and allocations for the first [sampledPerSecond] envelopes
// of a second. Memory is about 3 KB for each topic, up to 1,000 topics. Further topics share one entry. Nothing blocks on I/O.
package activity
