// Package kafkawire speaks the protocol of Kafka: connections, requests, metadata, topics and error
// codes. Its subpackages encode record batches (batch), decode fetched ones (fetched), and check
// responses before kafka-go decodes them (response). It is the only package of the relay that uses kafka-go.
//
// Blocking: a request blocks until its broker has responded, at most for its timeout. Requests that
// any broker can serve go to one broker after another.
//
// The package does not use the Writer of kafka-go, which reorders after a failed batch and duplicates
// after a timeout. It does not use the Transport either, for three reasons: the Transport continues to
// read the buffer of a request after its context has ended, it returns metadata from a cache, and it
// routes by that cache.
package kafkawire
