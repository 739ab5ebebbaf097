// Package event defines the Event that a service appends to its outbox.
//
// A service creates an Event with New and passes it to outbox.Append. An Event is an immutable
// value, and goroutines may share it. New does not fail: all mistakes are reported together by
// Validate and by every method that encodes the event.
package event
