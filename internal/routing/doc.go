// Package routing decides what a Kafka record looks like: which topics an envelope goes to ([Router]) and the key, value,
// headers and timestamp of its records ([Preset]).
//
// Both are pure: no I/O, no waiting, no clock. Payload and headers come out byte for byte as they went in. On the healthy
// path nothing is allocated: decisions are cached per (aggregatetype, type), and records are filled from buffers that the
// next one reuses. A Router may be used by several goroutines, a [Filler] by one.
package routing
