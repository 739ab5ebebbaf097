// Package reconcile finds in the outbox collections what a change stream cannot bring.
//
// A [Sweep] reads every watched collection for the envelopes of a stretch of time whose stream is lost, and hands each to a
// publisher. Order: envelopes without a stamp of the server first, in the order in which they were inserted; then those
// with one in the order of the stamps, over all collections. That is the order of commits wherever one append waited for
// the other; two transactions that knew nothing of each other may come in either order. A writer that stamps some
// envelopes of a key and leaves others without a stamp has no order between the two.
//
// Blocking: Run blocks in Deliver, which is its only brake, and waits out every fault of the server. Memory: one reply per
// collection, which together stay near the bytes that it is given, and a [Skip]. Cost: one read of an index range for each
// collection, without a write. Not promised: envelopes that were copied into the outbox with a stamp of their own, from
// before the stretch, are not found; nothing but the lost stream knew that they are new.
//
// [Scheduled] sends envelopes with a due time when it has come by the server's clock: never before, and once, through the
// end of an owner too, as far as the read-back reaches. There is no order among them, nor with others of their key. It blocks
// nobody; Saw, for the goroutine that reads the stream, takes a lock for a moment. Cost: for each 1,000 that are due together
// one transaction that claims and one that finishes, with a read between them; a look at each collection twice a second.
package reconcile
