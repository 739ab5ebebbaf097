// Package inbox gives a message its effect once, even if it is delivered several times. It stores
// which messages were handled, in the same transaction as the effect. It decides; a [Store] reads and
// writes: package mongostore in MongoDB, internal/lab/memory in memory. Package pkg/inbox is its public part.
//
// The inbox stores two kinds of documents:
//
//   - A marker means that one identity (consumer, namespace and id) was handled. It is deleted after
//     the retention (default seven days). Markers detect messages that a producer has sent twice, and
//     messages that have no place in a partition.
//   - A watermark contains, for one consumer, partition and lane, the offset up to which all records
//     were handled. It is never deleted, so a record that Kafka delivers again is always rejected.
//     There are at most Lanes watermarks for each partition and consumer.
//
// # Two ways to handle a message
//
//   - Admit writes the marker in the transaction of the handler. After a failure nothing is stored. If
//     two deliveries are handled at the same time, one of them has a write conflict:
//     outbox.Box.Transaction runs it again, and then it finds the duplicate. Use it for handlers whose
//     effects are all in the transaction.
//   - Claim commits a claim before the handler begins, so that of two simultaneous deliveries only one
//     is handled. A claim has a lease and an epoch, and its times refer to the server's clock. Use it
//     for handlers that also act outside of the database. If the holder dies, another one can claim
//     the message when the lease expires, and the first holder cannot finish any more. So an action
//     outside of the database may happen twice, but an effect in the database cannot.
//
// # Guarantees
//
// An effect that is written in the transaction of Admit, Once or Claim.Handled is committed at most
// once for each identity within the retention, and at most once for each place in a partition without
// a time limit. No guarantee needs synchronized clocks: all times refer to the server's clock.
//
// The caller is responsible for order. Records of one lane must be admitted in the order of their
// offsets, because a watermark rejects all earlier offsets of the same or an earlier leader epoch. The lane depends only on the key of the
// record (see Lane), so records with the same key are in the same lane.
//
// # Cost
//
// For a whole batch, Admit needs one read of watermarks, one read of markers, one insert of markers and
// one update of watermarks, all in the transaction of the caller. Different lanes use different
// documents and never conflict.
//
// Only Once blocks: if the same process handles the same identity, the second call waits for the first.
// There are no background goroutines. The caller runs Claim.Run, and calls Heartbeat while it has partitions.
//
// After an Attach, the first Admit in each server session needs one more write outside of the
// transaction. It allows the next owner of the partition to end the transactions of a killed process.
package inbox
