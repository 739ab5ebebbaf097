// Package sink sends records to Kafka in order, fenced against earlier owners,
// and reports the offset of each record.
//
// Order: the records of a partition are appended in the order of Send, through retries, moves of
// leaders and takeovers. At most one batch of a partition is in flight. It is sent again with the
// same bytes until its outcome is definite, and its producer id and sequence let the broker reject
// a duplicate. A partition or topic that cannot be written delays only its own records. If that
// takes long, it is parked and its records are given back in order (N11). If Kafka rejects a
// record, the record is given back together with all queued records that follow it in its key
// (N15).
//
// Blocking: Send and Flush never block on Kafka. Open blocks until earlier owners are fenced and
// read back. Run works until its context ends or the sink is fenced or broken. Callbacks come from
// the goroutines of Run, or from within Send. Acks of sent batches are called without a lock. All
// other callbacks are called under the lock of Send: nothing may be sent while Idle moves a stored
// offset, and nothing of a key may be queued while its records are given back. So a receiver must
// not call the sink under a lock that its callbacks take. Recycle is the exception, because it does
// not take the lock of Send.
//
// Cost: a record is copied once, into the bytes that are sent. No allocation happens while there
// are free chunks. There is one loop for each broker. A loop has one request in flight and sends
// the records that have gathered in the meantime, without linger, so batches grow with the load.
// All batches share the chunks of one free list, which releases unused chunks to the runtime.
package sink
