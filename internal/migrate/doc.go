// Package migrate brings the collections of the relay to the state that this version declares, and reports
// differences.
//
// The ledger, `migrations` in the state database, records the completed steps. It has one document per
// [Step], with an id that is never used again and a checksum of the step's declaration. A step is a list
// of indexes to create and to drop on kinds of collections. So a step is idempotent and may run several
// times. It is recorded once it is complete on every collection. Steps run in the order of their ids,
// under a lock in the same collection. The clock of the server decides when the lock of a dead holder
// expires.
//
// A collection that appears later, such as that of a new tenant, gets its indexes from [Migrator.Prepare]
// without an entry in the ledger. The ledger shows which steps were completed. [Migrator.Verify] shows
// the indexes that each collection has.
//
// Indexes affect only speed, so a missing privilege is not an error. The report names the privilege to
// grant. Without an index nothing is lost.
//
// If there is nothing to do, [Migrator.Up] costs one read of the ledger and one listIndexes per
// collection, four at a time. Every function blocks until it is complete or its context ends. Index
// builds may take long. The goroutines of a call end before it returns.
package migrate
