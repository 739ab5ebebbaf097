// Package purge removes delivered envelopes from the outbox after the retention time.
//
// The purge never removes an undelivered envelope. It removes an envelope only under these conditions:
//
//   - The stamp of the envelope is older than the saved position of every slot of every watcher that is
//     registered for its collection. The distance is at least the retention, and at least the margin between
//     stamps and the order of commits (N25). An envelope without a stamp was read by the purge before a time of the
//     cluster that all these positions have passed since ([Candidates]).
//   - The envelope has no due time. The deletion itself checks this.
//   - No registered watcher has a gap.
//
// If a position does not move, the purge stops there. So a watcher that is paused or behind loses nothing. If
// the conditions cannot be evaluated, the envelope stays.
//
// The purge cannot recognize a copy. An envelope that was copied into the outbox with a stamp from before the
// cut looks like one that was delivered long ago. The stream still delivers it. But if the history is lost
// before that, the copy may be gone. To restore envelopes so that they are sent, insert them with a ts of
// Timestamp(0,0).
//
// The purge uses one goroutine and sends one statement at a time. An envelope costs the server about 15 µs, in
// bounded statements that wait for the majority. To disturb publishers little, the purge is only as fast as it
// must be to keep up, and never faster than its rate. It sends nothing past the lease's local deadline (N2). If
// the server executes a statement late, a new owner still misses nothing: the bounds of the statement come from
// saved positions, and these never go back.
package purge
