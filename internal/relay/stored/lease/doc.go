// Package lease owns the watcher document. The document records who runs a watcher, from which
// position, and everything that the next owner needs.
//
// One document per `<watcher>/<i>of<N>` holds the lease, the checkpoint and the senders of the Kafka
// sink, so that one atomic write renews the lease and saves the checkpoint. The package promises:
//
//   - Each epoch has at most one owner, and each acquisition increments the epoch (N1). Only the clock
//     of the server decides whether a lease has expired. Clocks of processes are never compared.
//   - Each write of the owner's fields names owner and epoch and is majority committed. It fails once
//     another process has acquired the lease. The token, the epoch and seq never go back.
//   - [Held.Valid] returns false before another process can acquire, also after the machine was
//     suspended. That is suspension, not loss: only the document decides that the lease is lost (N2).
//   - A transaction of [Held.Fenced] commits only while this process owns the watcher (N3).
//
// The package does not promise that a deposed owner notices at once. The fence of the sink, or Fenced,
// must reject its writes in the meantime.
//
// Cost: each checkpoint and each renewal is one findOneAndUpdate, and a checkpoint also renews. A
// standby reads the document by its id every [pollEvery], and writes nothing while the lease is held.
// [Held.Valid] reads one clock and one word of memory. [Lease.Acquire] blocks while another process
// owns the watcher. No call to the server takes longer than [Config.CallTimeout].
package lease
