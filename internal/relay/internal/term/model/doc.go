// Package model runs the delivery of a watcher on a world in memory: random schedules of commits, crashes, frozen owners, delays,
// rejections and outages, thousands in a second or two. It contains tests only.
//
// Real is the code that decides: pump, dispatcher, resolver, gates, resolved position, outlet, sender of waiting envelopes, decisions and
// digests of the ledger, identities of the read-back. Modeled are the servers and the parts that are little more than statements
// on them:
//
//   - MongoDB: the outboxes, the stream, the watcher document, the stores. A write of an owner is fenced by its epoch (N1, N3).
//   - Kafka: logs with epochs and markers (N4), requests and responses that are on their way.
//   - sink: queues, one request in flight for each partition, opening of topics (N9), parking (N11), rejections.
//   - the writes of the ledger (N16), the claims of scheduled envelopes (N19), the order of a takeover.
//
// Each schedule is a list of steps with a seed each. A schedule that breaks a promise is shortened, and its trace printed. Each undo
// switch removes one rule from the model, or one fix, and a test shows that the schedules find it.
//
// In some worlds the configuration names another outbox at some time, which is swept then (N27), and deliveries are recorded there.
//
// Outside of the model are times (deadlines, TTLs, clocks that differ), sizes (budget, batches), gaps and purges, several slots, and
// compaction.
package model
