// Package kit is the harness of the tests that run the relay as processes of its own.
//
// A [Scene] is one watcher with its own database, topics and state on real servers. It starts `outrelay run` children
// ([Process]: killed, stopped and continued by pid), writes through pkg/outbox while a [Ledger] remembers what was
// committed and what was rolled back, reads the topics with a second Kafka client ([Topics]), and compares the two:
// lost, phantom, repeated, out of order, changed (promises I1 to I4 and I8). [History] follows the watcher document with
// the image after each of its writes and holds it against I5.
//
// Every wait is for a signal (a line of the log, a change of a document, a record) and ends with the test. Programs are
// built once per test process, into a directory that [Main] removes.
package kit
