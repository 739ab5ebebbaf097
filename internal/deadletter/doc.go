// Package deadletter moves envelopes that can never be delivered out of the outbox, with the reason, into the collection
// `<collection>_dead` beside it, and gives them back when somebody asks for it.
//
// A move is a fenced transaction: the letter is there and the envelope is not, or neither happened, and only the owner
// of the watcher can do it (N3). It is idempotent: an envelope that is moved again, after a crash before the watermark
// passed it, changes nothing. The letter is made from the stream's image, so an envelope that was deleted meanwhile is
// a letter all the same (N16), and its bytes are kept as they were, also those of a malformed one.
//
// A transaction holds at most [MaxLetters] letters and [MaxBytes] bytes, except that one letter may be larger alone, and
// fewer where the server is slow: it has to end well within the lease.
// Move blocks while the lease is suspended. It costs one round trip for the server's time, and for each transaction the
// fence, one bulk write and one delete for each collection, and the commit.
//
// Letters are kept until somebody discards them, or for as long as [SetExpiry] says. A letter that was requeued stays, marked
// with who did it and as which delivery. [Desk] is for those who are not the owner: each part of a requeue is one
// transaction with the fence of the watcher (N3), during which the owner cannot renew, so it is bounded like a move; in
// between the owner gets its turn. A requeue of many letters costs for each part four reads, one bulk write and one update.
//
// [List], [Count] and [Summarize] ask several collections at once, four at a time. A page costs as many index entries as it
// has letters, a total as many as match; a condition without an index of its own reads the letters in its window of time.
package deadletter
