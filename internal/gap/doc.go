// Package gap sends the envelopes of the outbox collections whose change stream is lost.
//
// A [Recovery] belongs to one term. It decides how the stream continues, and saves, sweeps and closes
// gaps, in the order that recovery.go describes.
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
// stream showed that it was new. Nor is one without a stamp whose id is from more than a day before the
// stretch, unless the collection is in IrregularIDs.
package gap
