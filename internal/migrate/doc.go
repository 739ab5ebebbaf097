// Package migrate brings the collections of the relay to what this version declares, and tells how they differ from it.
//
// What was done once is in a ledger, `migrations` of the state database: one document for each [Step], by an id that is
// never used again, with the checksum of what the step declares. A step is a list of indexes to make and to drop on kinds
// of collections, so each is idempotent and may run several times: it is recorded once it is done on every collection.
// Steps run in the order of their ids, under a lock in the same collection that is judged on the server's clock and lapses
// when its holder is dead.
//
// Collections that appear later, as those of a new tenant, get their indexes by [Migrator.Prepare] without an entry in the
// ledger: the ledger says which steps were taken, [Migrator.Verify] what each collection looks like.
//
// Indexes are a matter of speed, so a missing privilege fails nothing: it is in the report, with what to grant. Nothing is
// lost without an index.
//
// [Migrator.Up] with nothing to do costs a read of the ledger and a listIndexes for each collection, four at a time. Every
// function blocks until it is done or its context ends; index builds may take long. The goroutines of a call end before
// it returns.
package migrate
