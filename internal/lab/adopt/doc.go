// Package adopt takes over the position of another publisher: of Debezium, of the MongoDB Kafka connector, or a resume token or a time.
//
// [Plan] finds the position and checks it against the servers, without any write. [Write] stores it in the documents of a watcher
// that no node owns. The relay opens its stream at the time of the position and drops the events up to the token, as after a change of
// the watched collections. So the token may come from a stream over other collections.
//
// Blocking: Plan and Write block until the servers respond. Cost: Plan reads the change stream from the position on, at
// some ten thousand events a second. Write is one transaction over the documents of the watcher: all slots get the
// position, or none.
package adopt
