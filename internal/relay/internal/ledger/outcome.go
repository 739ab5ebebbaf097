// Package ledger stores the results of sends. Every envelope that was not sent in the order of the stream, or whose delivery is
// recorded, has one [Outcome]. One queue and one writer store all of them, in fenced transactions of the state database.
//
// Order: outcomes are stored in the order of Add. Stored is called after the transaction is majority-committed, so a
// checkpoint never passes an envelope that is neither sent nor stored (N3, N8).
//
// Rejected writes: a write that MongoDB rejects for its content is isolated by halving, and ends as a dead letter; in the last
// resort as one with the id and the reason only. Every other failed write is repeated and reported.
package ledger

import (
	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/letters"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
	"github.com/outrelay/outrelay/internal/relay/stored/waiting"
)

// End is the kind of an outcome.
type End uint8

// The kinds of outcomes.
const (
	Sent     End = iota // each target has it
	Retrying            // it failed, and waits for its next attempt
	Waiting             // it waits; no attempt is counted
	Dead                // it is a dead letter
	Dropped             // it expired and was discarded, or a rule discards it
	Gone                // it was removed from the store while it was in flight
	endCount
)

func (e End) String() string {
	return [...]string{"finished", "retrying", "waiting", "dead", "dropped", "gone"}[e]
}

// Waits reports whether the envelope still waits.
func (e End) Waits() bool { return e == Retrying || e == Waiting }

// Outcome is the result of a send of one envelope to some of its topics.
type Outcome struct {
	End End

	// Doc is the stored document of an envelope that waits already, without its envelope. It is nil for an envelope of the stream,
	// of a sweep or of a claim, which is stored now.
	Doc *waiting.Document
	// Claim is the claim that has the envelope, or nil. An envelope that was not sent leaves the claim.
	Claim *ClaimRef

	NS  string
	Raw bson.Raw // the envelope, of the stream, of a sweep or of a claim
	// EnvelopeID is the `_id` of the envelope of a delivery that is recorded, without its other fields.
	EnvelopeID bson.RawValue
	Pos        string // position of its event
	Key        string // canonical text of the ordering key
	MayBeSent  bool   // a record of it may be in a topic already
	StreamMS   int64  // time of its records, of the stream

	Headers // of a record that the sink gave back

	Topics    []string         // if it waits, or is dead in the store: the topics that do not have it; nil: all that it routes to
	Reason    waiting.Reason   // if it waits
	Topic     string           // topic that rejected the record; empty if none did
	Rejection record.Rejection // why it failed or died
	// Partition of the rejected record, or record.AnyPartition.
	Partition int32

	Rejected []record.Result // by topics, of a waiting envelope
	Held     []string        // topics that gave it back or did not accept it

	Sent []outboxes.Place // its records in Kafka
	// Stamp is the server's stamp of the envelope in the outbox. It is zero if the envelope has none, or if the stamp is older than
	// the event by more than the margin: then the envelope was copied here, and its stamp is not the time of the copy (N25).
	Stamp bson.Timestamp
	// DeadTargets reports that some targets of a sent envelope have a dead letter in place of the record.
	DeadTargets bool
	// Partial reports that a sent envelope waits for further topics. Their delivery is recorded later, and completes the record.
	Partial bool
	// Recorded requests that the delivery is recorded on the document of the outbox, as configured.
	Recorded bool

	// Stored is called once when the outcome is majority-committed, on the goroutine of the ledger. End may have changed: a
	// waiting envelope may be dead or gone. It must not block. May be nil.
	Stored func(o *Outcome)

	uncounted bool                // another topic still waits
	entry     *waiting.Entry      // to be stored as waiting
	letters   []*letters.Prepared // to be stored as dead letters
	change    *waiting.Change     // of the stored document
}

// Headers identify the envelope of a record that the sink gave back. It has no image: it is read again by the number of its event, or from
// the outbox by these values of its headers.
type Headers struct {
	Event    uint64
	ID       []byte
	StringID bool   // ID is a string that looks like another type
	NSHash   []byte // value of the record's namespace header
}

// ClaimRef is an envelope of a claim, or a whole claim.
type ClaimRef struct {
	ID    string
	Index int32
	// Leaves means that the envelope leaves the claim also if it was sent.
	Leaves bool
	// Ends means that all envelopes of the claim have outcomes, which are stored. The outcome removes the claim and has no envelope.
	Ends bool
}

// HeaderID returns the id in the headers of a record that the sink gave back. A header marks a string that looks like an id of
// another type.
func (o *Outcome) HeaderID() eventid.ID {
	if o.StringID {
		return eventid.New(string(o.ID))
	}
	return eventid.Parse(string(o.ID))
}

// needsImage reports whether the envelope has to be read again.
func (o *Outcome) needsImage() bool {
	return o.Doc == nil && o.Claim == nil && o.Raw == nil && o.End != Sent
}
