// Package sweep reads the envelopes that a lost stretch of a change stream contains from the outbox collections.
//
// A [Sweep] reads every watched collection for the envelopes of a stretch of time whose stream is lost,
// and delivers each to a [Publisher].
//
// Order: first the envelopes without a stamp of the server, in the order of insertion, and then the
// others in the order of their stamps, over all collections. This is the order of commits if one
// transaction started after the other committed. Concurrent transactions may be delivered in either
// order. If a writer stamps only some envelopes of a key, these have no order with the others.
//
// Repeated events: a transaction that is open at the end of the gap, T1, has stamps below T1 and commits after it.
// The ids that were swept within M of T1 are kept as 128-bit hashes, so that the stream does not repeat them. If
// the held stream falls off the oplog in turn, the next gap is from T1 to T2, and the same set excludes swept
// envelopes. A snapshot read at T1 would need no such set, but the server keeps snapshots for only five minutes.
// If the token is in the cluster's future, it does not belong to this history, and everything is swept.
//
// Blocking: Run blocks in Deliver, which is the only limit on its speed, and retries failed reads until
// they succeed. Memory: responses of the given bytes, or a single larger one, and a [Skip]. Cost: one read of an index range for
// each collection, or several if the memory is too small for one response of each, and no writes. Limit: an envelope that was
// copied into the outbox with an old stamp from before the stretch is not found, because only the lost
// stream showed that it was new. Nor is one without a stamp whose id is from more than a day before the
// stretch, unless the ids of the collection are irregular, or the purge had removed all envelopes of that time.
package sweep
