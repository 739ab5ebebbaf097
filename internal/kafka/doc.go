// Package kafka is the sink: it brings records to Kafka in order, fenced against earlier owners, and says where each one
// stands.
//
// Order: the records of a partition are appended in the order of Send, through retries, moves of leaders and take-overs.
// At most one batch of a partition is in flight, it is resent with the same bytes until the answer is definite, and its
// producer id and sequence let the broker refuse what it has already. A partition or topic that cannot be written holds
// its own records and nothing else, and those not for long: it is parked, and its records are given back in order (N11).
// A record that Kafka refuses is given back with all that is queued behind it in its key (N15).
//
// Blocking: Send and Flush never block on Kafka. Open blocks until earlier owners are fenced and read back; Run works
// until its context ends or the sink is fenced or broken. Callbacks come from Run's goroutines, or from within Send. Acks of
// brokers come without a lock. Send's lock is held during all others: nothing may be sent while Idle moves a stored offset,
// and nothing of a key may be queued while its records are given back. So a receiver must not call the sink under a lock
// that its callbacks take; Recycle, which needs no lock of Send's, is the exception.
//
// Cost: a record is copied once, into the bytes that are sent; no allocation while buffers are warm. A lane (one for each
// broker) has one request in flight and sends what has gathered meanwhile, without linger: batches grow with the load.
// Buffers come from a free list in four sizes, grow on demand and are given back to the runtime when idle.
//
// kafka-go's Writer is not used: it reorders after a failed batch and duplicates after a time-out. Its Transport serves
// the transactional requests of a take-over; lanes and metadata have connections of their own, because the Transport
// goes on reading a request's buffer after its context has ended, answers metadata from a cache, and routes by it.
package kafka
