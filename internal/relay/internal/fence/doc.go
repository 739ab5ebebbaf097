// Package fence takes a producer identity over from an earlier owner, partition by partition.
//
// An owner of the relay sends plain idempotent batches under a producer id that belongs to a
// transactional id. Before its first record it needs two facts about each partition. No earlier owner
// can append there any longer. And it has seen all records of earlier owners that the checkpoint does
// not contain yet. One read provides both. The new owner writes an abort marker with a higher epoch (an
// empty transaction, the barrier), and reads the partition from its stored offset until it finds that
// marker. The records below the marker are all records of the earlier owners.
//
// # Promises
//
// A partition is released only if two conditions hold for each earlier sender that may still write to
// it. A control batch of that producer id with a higher epoch was read in the partition, and the
// partition was read from its stored offset up to that marker. No response of a coordinator counts, and
// no marker of another producer id (N4). A partition without a leader, below its minimum of in-sync
// replicas, missing or unreadable is quarantined and never delays other partitions. [Session.Retry]
// fences and reads it later.
//
// Take and NextGeneration change the state that the watcher document must contain before anything is
// sent. They do not write it. The caller saves [Session.Senders] and the offsets in one fenced write,
// and sends only after that write succeeded.
//
// The stored offset of a quarantined partition must not move, because its earlier records were not read
// yet.
//
// # Blocking and cost
//
// Take blocks until the state of all partitions is known. A hanging transaction adds at most about 10 s
// to the read-back. Take waits for a coordinator that is away without a limit. It costs about 25 ms for
// 12 or 100 partitions of one broker (BenchmarkTake), plus the read-back. Each step waits while the gate
// is closed, that is while the lease is not valid. The end of the context stops everything at once, also
// in the middle of a request.
//
// # Limits
//
// If the coordinator has forgotten a producer id (its transactional id expired, or the cluster lost its
// state), no process can write a marker of that id again. The partitions are then released after the
// read alone, and an event reports it. The producer state in a partition expires too
// (producer.id.expiration.ms without a batch of that id), and the fencing with it. [Session.KeepAlive]
// prevents that.
package fence
