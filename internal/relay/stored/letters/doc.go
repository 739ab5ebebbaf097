// Package letters stores the envelopes that can never be delivered, together with the reason, in one collection of the
// state database: the dead letters of all outboxes of all watchers.
//
// The owner of a watcher writes a letter in the fenced transaction in which it records the outcome of the envelope (N3): see
// [Prepare], [WriteChunks] and [Write]. The write is idempotent: if a crash happens before the resolved position has passed the
// envelope, the next owner writes the letter again, and nothing changes. The letter contains the whole envelope, so it
// does not depend on the outbox (N16), and a malformed envelope keeps its bytes. A service may use one id for two events
// after each other: each of them leaves its own letter.
//
// Letters are kept until they are discarded, or until they expire. A discarded letter stays in the archive for some time:
// it is marked, lists and counts leave it out, and its event still counts as decided. A requeued letter stays, marked with
// the actor and the new delivery.
//
// [List], [Count] and [Summarize] read one collection. A page reads as many index entries as it has letters. A total
// reads as many letters as match. A condition without an index reads all letters in its time range.
package letters
