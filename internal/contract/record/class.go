package record

import (
	"errors"
	"time"
)

// Class is the reason why an envelope was not sent: the class of its dead letter, a filter and a
// metric label.
type Class string

// The classes of errors. The set is closed.
const (
	Malformed           Class = "malformed"
	MessageTooLarge     Class = "message_too_large"
	NotAllowed          Class = "not_allowed"
	PartitionOutOfRange Class = "partition_out_of_range"
	Expired             Class = "expired"
	RecordRejected      Class = "record_rejected"
	AttemptsExhausted   Class = "attempts_exhausted"
	Skipped             Class = "skipped" // an operator passed over it
)

// Dropped is the class of an envelope that a rule discards. It never becomes a dead letter.
const Dropped Class = "dropped"

// DeadAtOnce reports whether an envelope of this class goes to the dead letters without a retry (N17).
func (c Class) DeadAtOnce() bool {
	switch c {
	case Malformed, MessageTooLarge, NotAllowed, PartitionOutOfRange, Expired, Dropped, Skipped:
		return true
	case RecordRejected, AttemptsExhausted:
	}
	return false
}

// IsDiscarded reports whether envelopes of this class leave no dead letter. dropExpired is the configured handling of expired ones.
func (c Class) IsDiscarded(dropExpired bool) bool { return c == Dropped || c == Expired && dropExpired }

// Rejection is an error that is the fault of one envelope or record. It does not affect others.
type Rejection struct {
	Class  Class
	Reason string // for people: the fault, the value and the limit, never payload
	// Fields are the fields of the envelope, by their names in the contract, that are missing or wrong; nil for another fault.
	Fields []string
}

func (r *Rejection) Error() string { return string(r.Class) + ": " + r.Reason }

// RejectionOf returns the error of a malformed envelope as a rejection. An error without a class gets the class Malformed.
func RejectionOf(malformed error) *Rejection {
	var rejected *Rejection
	if errors.As(malformed, &rejected) {
		return rejected
	}
	return &Rejection{Class: Malformed, Reason: malformed.Error()}
}

// Attempt is one failed attempt to deliver an envelope. The history of a waiting envelope and its dead letter store it.
type Attempt struct {
	Class  Class     `bson:"class" json:"class"`
	Reason string    `bson:"reason" json:"reason"` // for people: never payload
	Topic  string    `bson:"topic,omitempty" json:"topic,omitempty"`
	At     time.Time `bson:"at" json:"at"`
	Node   string    `bson:"node,omitempty" json:"node,omitempty"`
}
