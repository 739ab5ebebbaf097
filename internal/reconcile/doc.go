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
package reconcile
