package record

import "errors"

// Side marks the tickets of deliveries outside of the stream's order: retried, parked, scheduled and replayed envelopes.
// They hold stored offsets like others, but never the watermark (N8).
const Side Ticket = 1 << 63

// IsSide reports whether t is the ticket of a delivery outside of the stream's order.
func (t Ticket) IsSide() bool { return t&Side != 0 }

// What Send answers for a record that has to be held. Nothing was queued.
var (
	// ErrParked says that the target cannot be written for the time being (N11).
	ErrParked = errors.New("the target is parked")
	// ErrBlocked says that an earlier envelope of the same key waits (N15).
	ErrBlocked = errors.New("an earlier envelope of the key waits")
)

// Withdrawn is a record that was taken out of the sink's queues again, to be held as an exception.
type Withdrawn struct {
	Ticket Ticket
	Topic  string
	Key    []byte // of the record; the slices are the receiver's
	// ID and NS are the values of the record's headers `id` and `outrelay-ns`.
	ID, NS []byte
	// StringID says that the id is a string which reads like another type.
	StringID bool
	Why      *Refusal // the record's own fault; nil if it only stood behind one, or its target is parked
	Held     error    // ErrParked or ErrBlocked, if Why is nil
	Bytes    int      // what it had reserved
}

// Answer is what became of one target of a delivery outside of the stream's order: it stands at Offset, or it was refused
// for a reason of its own, or nothing became of it and it has to be sent again.
type Answer struct {
	Topic     string
	Partition int32
	Offset    int64 // −1 unless it was acked
	Refused   *Refusal
	Held      error
}

// Published is a delivery outside of the stream's order when each of its targets has its answer.
type Published struct {
	Ticket  Ticket
	Answers []Answer
}

// Holder decides which records are held, and takes those that the sink cannot bring on. Its methods are called under the
// sink's lock: they return at once and call nothing of the sink.
type Holder interface {
	// Closed is ErrBlocked if the record has to wait for an earlier one of its key, else nil. Send asks it before it queues.
	Closed(rec *Record, side bool) error
	// Withdrawn takes over records that were queued, in the order in which they were sent.
	Withdrawn(list []Withdrawn)
	// Found says that a partition which could not be read at the take-over has been read, and that records of ours stand in
	// it, the lowest at offset. The stored offset of tp stays at or below that until the receiver has written down
	// what of it belongs to envelopes that are not the stream's to send: those that an earlier owner had sent outside of the
	// stream's order, and those that were given back or turned away before the partition was read (N8).
	Found(tp TopicPartition, offset int64)
	// Pressed reports whether most of the memory or of the window is taken, of the stream or of the deliveries outside of its
	// order, so that a target which does not get on would stop the others. low is the first event of the stream that is not
	// resolved.
	Pressed() (low Ticket, stream, side bool)
	// Ready says that a topic that was parked, or a partition of it, can be written again.
	Ready(topic string)
}
