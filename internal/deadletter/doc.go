// Package deadletter moves envelopes that can never be delivered out of the outbox, with the reason, into the collection
// `<collection>_dead` beside it.
//
// A move is a fenced transaction: the letter is there and the envelope is not, or neither happened, and only the owner
// of the watcher can do it (N3). It is idempotent: an envelope that is moved again, after a crash before the watermark
// passed it, changes nothing. The letter is made from the stream's image, so an envelope that was deleted meanwhile is
// a letter all the same (N16), and its bytes are kept as they were, also those of a malformed one.
//
// A transaction holds at most [MaxLetters] letters and [MaxBytes] bytes, except that one letter may be larger alone.
// Move blocks while the lease is suspended. It costs one round trip for the server's time, and for each transaction the
// fence, one bulk write and one delete for each collection, and the commit.
//
// Letters are kept until somebody requeues or discards them.
package deadletter
