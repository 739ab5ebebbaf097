// Package kit is the harness of the tests that run the relay as separate processes.
//
// A [Scene] is one watcher with its own database, topics and state on real servers. It starts `outrelay
// run` children (see [Process]), which a test can kill, freeze and continue. It writes events through
// pkg/outbox, and its [Ledger] records which events were committed or rolled back. A second Kafka
// client ([Topics]) reads the topics. [Ledger.Compare] compares both and finds lost, phantom, repeated,
// reordered and changed events (promises I1 to I4 and I8). [History] reads each version of the watcher
// document and checks I5.
//
// Methods whose names begin with Wait block until a signal arrives (a log line, a change of a document,
// a record). They fail the test after [Patience]. Programs are built once per test process, in a
// directory that [Main] removes.
package kit
