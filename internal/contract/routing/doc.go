// Package routing decides what a Kafka record looks like. A [Router] chooses the topics of an envelope. A
// [Preset] sets the key, value, headers and timestamp of its records.
//
// Both are pure: they do no I/O, do not block and read no clock. Payload and headers are copied byte for
// byte. The usual path allocates nothing: decisions are cached per (aggregatetype, type), and records are
// filled from buffers that the next record reuses. A Router is safe for concurrent use. A [Filler] is for
// one goroutine.
package routing
