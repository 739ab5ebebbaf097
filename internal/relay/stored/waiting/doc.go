// Package waiting is the store of the envelopes that the stream could not send at once: the collection `waiting` of the state
// database. It holds the whole envelope, so the outbox may delete, expire or change its document at any time.
//
// [Enter] is the only way in. The relay's own writes are part of fenced transactions (N3); a requeue or a replay of an operator
// only adds documents, and needs no fence. A [Store] reads the documents of one slot of a watcher.
package waiting
