package record

import (
	"errors"
	"fmt"
)

// Side marks the tickets of deliveries outside of the stream's order: retried, parked, scheduled
// and replayed envelopes. They hold stored offsets like other tickets, but never the resolved position
// (N8).
const Side Ticket = 1 << 63

// IsSide reports whether t is the ticket of a delivery outside of the stream's order.
func (t Ticket) IsSide() bool { return t&Side != 0 }

// Errors of Send for a record that has to be held. Nothing was queued.
var (
	// ErrParked means that the target cannot be written at present (N11).
	ErrParked = errors.New("the target is parked")
	// ErrPartitionParked is ErrParked for one partition. Other partitions of its topic may take records.
	ErrPartitionParked = fmt.Errorf("%w: one partition", ErrParked)
	// ErrBlocked means that an earlier envelope of the same key waits (N15).
	ErrBlocked = errors.New("an earlier envelope of the key waits")
)

// Withdrawn is a record that was removed from the sink's queues, to be stored as a waiting envelope. Its
// slices belong to the receiver.
type Withdrawn struct {
	Ticket Ticket
	Topic  string
	Key    []byte // of the record

	// ID is the id of the document, and NS the value of the header `outrelay-ns`.
	ID, NS []byte
	// StringID reports that the id is a string that looks like another type.
	StringID bool

	// Rejection is the error of this record. It is nil if the record only waited after another one, or
	// if its target is parked.
	Rejection *Rejection
	Held      error // ErrParked or ErrBlocked, if Rejection is nil
	Bytes     int   // bytes that the record had reserved
	TimeMS    int64 // of the record
	MayBeSent bool  // a request with it had no definite response
}

// Result is the outcome of one target of a delivery outside of the stream's order. Either the record
// is at Offset, or Rejection has the error of this record, or it has to be sent again.
type Result struct {
	Topic     string
	Partition int32
	Offset    int64 // −1 unless it was acked
	Rejection *Rejection
	Held      error
}

// Published is a delivery outside of the stream's order when each of its targets has its result.
type Published struct {
	Ticket  Ticket
	Results []Result
}

// Holder decides which records are held, and takes over records that the sink cannot deliver. The
// sink calls its methods under its lock, so they return at once and do not call the sink.
type Holder interface {
	// CheckGate returns ErrBlocked if the record has to wait for an earlier one of its key, else nil.
	// Send calls it before it queues a record.
	CheckGate(rec *Record, side bool) error

	// HoldOffsets keeps all stored offsets until the end of the reread. Send calls it before it queues a record of the stream below which the
	// partition has records of later events that are not claimed yet: its ack would move the stored offset past them (N8).
	HoldOffsets()

	// Withdrawn takes over records that were queued, in the order in which they were sent.
	Withdrawn(list []Withdrawn)

	// MemoryPressure reports whether most of the memory or of the window is in use, for the stream and for
	// the deliveries outside of its order. A target that makes no progress would then stop the
	// others. low is the first event of the stream that is not resolved.
	MemoryPressure() (low Ticket, stream, side bool)

	// Ready is called when a parked topic, or a partition of it, can be written again.
	Ready(topic string)
}
