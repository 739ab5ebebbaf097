// Package concern has the write concern of everything that must not be lost: statements of the relay, transactions of services.
// It does no I/O.
package concern

import (
	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/writeconcern"
)

// Majority returns the write concern majority, with j: true. A replica set with writeConcernMajorityJournalDefault: false would
// otherwise acknowledge a write before it is in the journals of the majority, and could lose it.
func Majority() *writeconcern.WriteConcern {
	journaled := true
	return &writeconcern.WriteConcern{W: writeconcern.WCMajority, Journal: &journaled}
}

// MajorityOfCommand returns Majority as a field of a command, which has no write concern of its collection.
func MajorityOfCommand() bson.E {
	return bson.E{Key: "writeConcern", Value: bson.D{{Key: "w", Value: writeconcern.WCMajority}, {Key: "j", Value: true}}}
}
