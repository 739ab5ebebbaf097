// Package concern has the write concern of everything that must not be lost: statements of the relay, transactions of services.
// It does no I/O.
package concern

import "go.mongodb.org/mongo-driver/v2/mongo/writeconcern"

// Majority returns the write concern majority, with j: true. A replica set with writeConcernMajorityJournalDefault: false would
// otherwise acknowledge a write before it is in the journals of the majority, and could lose it.
func Majority() *writeconcern.WriteConcern {
	journaled := true
	return &writeconcern.WriteConcern{W: writeconcern.WCMajority, Journal: &journaled}
}
