// Package fence takes a producer identity over from an earlier owner, partition by partition.
//
// An owner of the relay sends plain idempotent batches under a producer id that belongs to a transactional id. Before its
// first record it has to know two things of each partition: that no earlier owner can append there any more, and what
// earlier owners have appended that the checkpoint does not know yet. Both come from one read. The new owner writes an
// abort marker with a higher epoch (an empty transaction, the barrier), and reads the partition from its stored offset
// until it has seen that marker. What stands below the marker is all there will ever be of the earlier owners.
//
// # What is promised
//
// A partition is released only when, for each earlier sender that may still write to it, a control batch of that producer
// id with a higher epoch was read in it, and the partition was read from its stored offset up to that marker. No answer of
// a coordinator counts, and no marker of another producer id (N4). A partition without a leader, under its minimum of
// in-sync replicas, missing or unreadable is quarantined and never holds the others: [Session.Retry] releases it later.
//
// Take and NextGeneration change what the watcher document must say before anything is sent. They do not write it: the
// caller saves [Session.Senders] and the offsets in one fenced write, and sends only after that write succeeded.
//
// The stored offset of a quarantined partition must not move: its earlier records have not been read yet.
//
// # Blocking and cost
//
// Take blocks until it knows, at most some 10 s longer than its reading when a transaction hangs, and for as long as
// the coordinator is away. Its cost is some 25 ms for 12 or 100 partitions of one broker (BenchmarkTake),
// and the reading of the tail. A gate (the lease is still valid) is asked between steps; a step waits while it is
// closed. Cancelling the context stops everything at once, also in the middle of a request.
//
// # What is not promised
//
// When the coordinator has forgotten a producer id (its transactional id expired, or the cluster lost its state), nobody
// can write that id's marker ever again. The partitions are then released after the read alone, and an event says so.
// Producer state in a partition expires too (producer.id.expiration.ms without a batch of that id there), and fencing
// with it: [Session.KeepAlive] is there to prevent that.
package fence
