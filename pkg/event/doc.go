// Package event defines the envelope of the outbox: the Event that a service appends, and the View
// that the relay reads from the stored document.
//
// A service creates an Event with New and passes it to outbox.Append. An Event is an immutable
// value, and goroutines may share it. New does not fail: all mistakes are reported together by
// Validate and by every method that encodes the event.
//
// Parse reads a stored document into a View in one pass, without allocation and without a copy. The
// slices of the View alias the document, so use a View only as long as the bytes of the document,
// and do not copy it. The bytes of the payload and of the headers are never changed on their way to
// Kafka.
//
// Parse never panics and never reads outside of the document, for any bytes. It does not check the
// inside of a document payload (AppendPayload does so when it converts the payload), and it does
// not check that strings are UTF-8.
package event
