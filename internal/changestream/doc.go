// Package changestream reads the inserts of outbox collections from a MongoDB change stream, in the order in which they
// were committed, and keeps doing so through whatever happens to the stream.
//
// # What it promises
//
// Order and completeness: the documents of the batches of one Run are the events of the scope, each once, in the order of
// the stream, from the start position on. After a failure the stream goes on from the position of the last batch that was
// handed on; an event at or before it is dropped (N23), so a reopening repeats nothing and skips nothing. Where that can
// no longer be promised, Run ends with a *GapError and never goes on from "now". A drop or rename of the collection of a
// collection stream ends Run with an *InvalidateError after its events were handed on.
//
// Positions: a batch carries the position behind its last document; an idle stream sends empty batches whose position moves
// with the oplog, about two a second at most. Right behind an event the idle position stays that event's until anything
// else is written to the oplog.
//
// Blocking: Run blocks on the server, for one await time at most while there is nothing to read, and on the channel it
// sends to. With an unbuffered channel exactly one batch is fetched ahead of the one being worked on. When its context
// ends nothing more is handed on, at once; Run returns after the request that waits on the server, whose cursor is killed so that it leaves
// none behind. The server notices that with the next write to its oplog (the release of a lease is one), at the latest
// after the await time: whoever must be quick does not wait for Run before it writes.
//
// Cost: a batch is at most 2,000 documents or about 4 MiB (one larger document comes alone); nothing is copied: documents
// alias the server's reply, which Release lets go. The reader itself allocates a few times per batch, nothing per event.
//
// # What it does not promise
//
// It does not judge envelopes, and it knows no owner: fencing is the business of whoever writes. Events of a rename or of a
// dropDatabase may concern other collections: ask the scope.
//
// # Why the driver's ChangeStream
//
// A loop of aggregate and getMore by RunCommand would be as fast, and would show every reply, but it cannot pin its
// requests to the server that holds the cursor: with more than one mongos every second getMore would end in
// CursorNotFound, and behind a load balancer all would. The driver's stream is read without copies (TryNext and Current),
// and since a new reply is only asked for when the last one is used up, its own resumption starts at the same token as ours
// would. That resumption is visible here by the change of the cursor's id and is counted. What the
// driver would do alone and does not is done by Run: every error that it does not resume, by the server's code, never by the
// text of a message.
//
// A stream is always opened with startAfter, never with resumeAfter: the two differ only for the token of an
// invalidate event, which startAfter alone accepts, and such a token only becomes a start position when the caller decides to
// go on behind an *InvalidateError.
package changestream
