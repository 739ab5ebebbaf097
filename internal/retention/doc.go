// Package retention removes delivered envelopes from the outbox once they were kept long enough.
//
// It promises never to remove what is undelivered: an envelope goes only when its stamp is older than the persisted
// position of every slot of every watcher that is registered for its collection, by the retention and at the least by the
// margin between stamps and the order of commits (N25); when it has neither a state nor a due time, which the deletion
// itself checks; and while no registered watcher has a gap. A position that stands still holds the purge with it, so a
// watcher that is paused, or behind, loses nothing. What cannot be judged is kept.
//
// It does not promise to know a copy: an envelope that was copied into the outbox with a stamp from before the cut looks
// like one that was delivered long ago. The stream brings it all the same, but should its history be lost before it does,
// the copy may be gone. Who restores envelopes to have them sent inserts them with a ts of Timestamp(0,0).
//
// One goroutine, one statement at a time. An envelope costs the server about 15 µs, in bounded statements that wait for
// the majority; so that those who publish meanwhile feel little of it, the purge goes no faster than it must to keep up,
// and never faster than its rate. Nothing is sent past the lease's local deadline (N2). A statement that arrives late all
// the same removes nothing that a new owner could miss: its bounds come from positions that were persisted, and those do
// not go back.
package retention
