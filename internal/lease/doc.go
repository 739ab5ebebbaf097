// Package lease owns the watcher document: who runs a watcher, from which position, and what the next owner must know.
//
// One document per `<watcher>/<i>of<N>` holds the lease, the checkpoint and the senders of the Kafka sink, so that
// renewing and checkpointing are one atomic write. What the package promises:
//
//   - At most one owner for each epoch, and the epoch grows by one with each acquisition (N1). Expiry is judged by the
//     server's clock alone; the clocks of the processes are never compared.
//   - Each write of the owner's fields names owner and epoch, is majority committed, and is refused once another process
//     has acquired. The token, the epoch and seq never go back.
//   - [Held.Valid] is false from before the moment at which another process could acquire, also after the machine was
//     suspended. That is suspension, not loss: only the document says that the lease is lost (N2).
//   - Whatever [Held.Fenced] writes is committed by the owner or not at all (N3).
//
// It does not promise that a deposed owner notices at once: what it does between must be refused elsewhere, by the fence
// of the sink or by Fenced.
//
// Cost: one findOneAndUpdate for each checkpoint or renewal, whichever is due; a standby holds one change stream on the
// document. A standby's look at a held lease writes nothing. [Held.Valid] reads one clock and one word of memory.
// [Lease.Acquire] blocks while another process owns the watcher; no call to the server lasts longer than
// [Config.CallTimeout].
package lease
