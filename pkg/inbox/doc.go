// Package inbox makes the effect of a message happen once, however often the message comes: it remembers in MongoDB what
// was handled, in the same transaction as the effect.
//
// Two things are kept. A marker says that one identity (consumer, namespace and id) was handled; it is removed when its
// retention, seven days by default, is over. A watermark says for one consumer, partition and lane up to which offset
// everything was dealt with; it is never removed, so a record that Kafka delivers again is refused for ever, at the cost
// of at most [Lanes] documents for each partition and consumer. Markers are needed for what a producer sent twice and for
// messages that have no place in a partition.
//
// # Modes
//
//   - None keeps nothing: the handler runs for every delivery.
//   - Optimistic writes the marker inside the handler's transaction. A failure leaves nothing behind. Two that try at once
//     cost a write conflict; the loser is run again by outbox.Transaction and then sees the duplicate. For handlers whose
//     effects are all in the transaction.
//   - Eager commits a claim, with a lease and an epoch by the server's clock, before the handler begins, so that of two
//     at once only one begins at all. For handlers that also act outside of the database. A holder that died is followed
//     by another when its lease is over, and can then not finish any more: such an action may happen again, its effect in
//     the database cannot.
//
// # What it promises
//
// An effect written in the transaction that Admit, Once or Claim.Handled ran in is committed at most once for an identity
// within the retention, and at most once for a place in a partition for ever. No promise needs the clocks of the machines
// to agree: every time is the server's.
//
// Order is the caller's matter: records of one lane must be admitted in the order of their offsets, because a watermark
// that has moved refuses all before it. A lane is a pure function of the record's key ([Lane]), so records of one key are
// in one lane.
//
// # Cost
//
// Admit is one read of watermarks and one of markers, one insert of markers and one update of watermarks for the whole
// batch, all in the caller's transaction. Different lanes write different documents and never conflict. Nothing blocks but the single-flight guard
// of Once, which lets the second of two calls with the same identity in one process wait for the first. There are no
// background goroutines; Claim.Run belongs to the caller. After an Attach, the first Admit in each server session costs one
// write more, beside the transaction, so that the transactions of a killed process can be ended by who comes after it.
package inbox
