// Package envelope reads the documents that an outbox stores. The package pkg/event writes them.
//
// Parse reads a stored document into a View in one pass, without allocation and without a copy. The
// slices of the View alias the document, so use a View only as long as the bytes of the document,
// and do not copy it. The bytes of the payload and of the headers are never changed on their way to
// Kafka.
//
// Parse never panics and never reads outside of the document, for any bytes. It does not check the
// inside of a document payload (AppendPayload does so when it converts the payload), and it does
// not check that strings are UTF-8.
package envelope
