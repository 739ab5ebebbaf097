// Package event is the envelope of the outbox: the value that a service appends and the view that the relay has of the
// stored document.
//
// Event is what a service makes with New and hands to outbox.Append. It is a value: options build it, nothing changes it
// afterwards, and it may be shared between goroutines. Mistakes do not surface in New but, all at once, in Validate and in
// every method that encodes.
//
// View is what Parse finds in a stored document: one pass, no allocation, no copy. Its slices alias the document, so a
// View lives no longer than the document's bytes do, and it is not to be copied. Payload and header bytes are never
// changed on the way: bytes in are bytes out.
//
// Parse never panics and never reads outside the document, whatever the bytes are. What it does not do: check the inside
// of a document payload (AppendPayload does when it converts it) or that strings are UTF-8.
package event
