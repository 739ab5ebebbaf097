// Package changestream reads the inserts of outbox collections from a MongoDB change stream, in the
// order of their commits, and continues after every fault that does not lose history.
//
// # Promises
//
// Order and completeness: the batches of one Run contain each event of the scope once, in the order
// of the stream, from the start position on. After a fault, Run reopens the stream at the position of
// the last batch that it sent to the caller, and drops events at or before that position (N23). So
// reopening neither repeats nor skips an event. If Run cannot keep this promise, it ends with a
// *GapError. It never continues from the present. If the collection of a collection stream is dropped
// or renamed, Run sends the event to the caller and then ends with an *InvalidateError.
//
// Positions: a batch carries the position after its last document. An idle stream sends empty
// batches, at most about two a second, whose position moves with the oplog. Directly after an event,
// the idle position remains the event's position until the next write to the oplog.
//
// Blocking: Run blocks on the server, for at most one await time if there is nothing to read, and on
// the channel to the caller. With an unbuffered channel, exactly one batch is fetched ahead of the
// batch that the caller works on. When the context of Run ends, Run sends no further batch. It
// returns when the pending request to the server ends. Run kills that request's cursor, so that no
// cursor is left on the server. The server notices the kill at the next write to its oplog, for
// example the release of a lease, and at the latest after the await time. So a caller that must be
// quick should not wait for Run before it writes.
//
// Cost: a batch has at most 2,000 documents or about 2 MiB. A larger document is a batch alone.
// Nothing is copied: documents alias the server's response, which Release frees. The reader allocates a
// few times per batch and never per event.
//
// # Limits
//
// The package does not validate envelopes, and it has no notion of the owner of a watcher: each writer
// does its own fencing. Events of a rename or of a dropDatabase may concern other collections. Use
// Scope.Matches to check them.
//
// # Why the driver's ChangeStream
//
// A loop of aggregate and getMore with RunCommand would be as fast, and would show every response. But
// it cannot pin its requests to the server that holds the cursor. With more than one mongos, every
// second getMore would fail with CursorNotFound, and behind a load balancer every getMore would. The
// driver's stream is read without copies (TryNext and Current). It requests a new response only when the
// last one is used up, so its automatic resume starts at the same token as this package would. The
// package detects an automatic resume by the new cursor id, and counts it. Run handles every error
// that the driver does not resume, by the server's code, never by the text of a message.
//
// A stream is always opened with startAfter, never with resumeAfter. The two differ only for the
// token of an invalidate event, which only startAfter accepts. Such a token becomes a start position
// only if the caller decides to continue after an *InvalidateError.
package changestream
