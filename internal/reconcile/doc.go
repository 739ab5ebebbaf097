// Package reconcile sends the envelopes of the outbox collections that a change stream cannot bring in
// its order.
//
// A [Sweep] reads every watched collection for the envelopes of a stretch of time whose stream is lost,
// and delivers each to a [Publisher].
//
// Order: first the envelopes without a stamp of the server, in the order of insertion, and then the
// others in the order of their stamps, over all collections. This is the order of commits if one
// transaction started after the other committed. Concurrent transactions may be delivered in either
// order. If a writer stamps only some envelopes of a key, these have no order with the others.
//
// Blocking: Run blocks in Deliver, which is the only limit on its speed, and retries failed reads until
// they succeed. Memory: one reply for each collection, which together stay near the given bytes, and a
// [Skip]. Cost: one read of an index range for each collection, and no writes. Limit: an envelope that was
// copied into the outbox with an old stamp from before the stretch is not found, because only the lost
// stream showed that it was new.
//
// [Scheduled] sends envelopes with a due time when they are due by the clock of the server: never
// earlier, and once, also across a takeover, as far as the read-back reaches. There is no order among
// them, nor with others of their key. Saw, which the reader of the stream calls, takes a lock for a
// moment and does not block. Cost: for each 1,000 envelopes that are due together, one transaction that
// claims them, one read, and one transaction that finishes them. Each collection is read twice a second.
//
// [Exceptions] sends retried, blocked and parked envelopes when their turn comes, and a [Finisher] writes
// the fates of all envelopes of this package.
package reconcile
