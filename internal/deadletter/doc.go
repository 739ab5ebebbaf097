// Package deadletter moves envelopes that can never be delivered out of the outbox into the
// collection `<outbox>_dead`, together with the reason, and puts them back when an operator asks
// for it.
//
// A move is a fenced transaction that only the owner of the watcher can make: it writes the letter
// and removes the envelope, or does neither (N3). It is idempotent: if a crash happens before the
// watermark has passed the envelope, the next owner moves it again, and nothing changes. The letter
// is made from the event of the stream. So the letter is complete even if the envelope was deleted
// in the meantime (N16), and a malformed envelope keeps its bytes.
//
// One transaction holds at most [mongodb.MaxDocuments] letters and [mongodb.MaxBytes] bytes. A single larger letter
// is allowed, and a slow server gets fewer letters, because the transaction must end well within
// the lease. [Move] blocks while the lease is suspended. It costs one round trip for the server
// time. Each transaction costs the fence, one bulk write and one delete per collection, and the
// commit.
//
// Letters are kept until they are discarded, or for the time given to [SetExpiry]. A requeued
// letter stays, marked with the actor and the new delivery.
//
// Processes other than the owner use [Desk]. A requeue consists of parts. Each part is one
// transaction with the fence of the watcher (N3). The owner cannot renew its lease during a part,
// so parts are bounded like moves, and there is a pause between two parts in which the owner
// renews. Each part costs four reads, one bulk write and one update.
//
// [List], [Count] and [Summarize] query several collections, four at a time. A page reads as many
// index entries as it has letters. A total reads as many index entries as letters match. A
// condition without an index reads all letters in its time range.
package deadletter
