package letters

import (
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
)

// Source describes the process that gave the envelope up.
type Source struct {
	Kind    string `bson:"kind" json:"kind"` // "relay" or "handler"
	Watcher string `bson:"watcher,omitempty" json:"watcher,omitempty"`
	Group   string `bson:"group,omitempty" json:"group,omitempty"`     // of a handler
	Handler string `bson:"handler,omitempty" json:"handler,omitempty"` // of a handler
	Node    string `bson:"node,omitempty" json:"node,omitempty"`
	Epoch   int64  `bson:"epoch,omitempty" json:"epoch,omitempty"`
	Version string `bson:"version,omitempty" json:"version,omitempty"`
}

// Letter is an envelope that can never be delivered, before it is stored.
type Letter struct {
	Watcher string
	NS      string            // "db.collection" of the outbox
	Mapping *envelope.Mapping // reads the envelope; nil: it is one of the contract
	Raw     []byte            // the whole envelope, a BSON document with its _id
	// Delivery is 0 for the first delivery, which the stream made. A requeue counts it up.
	Delivery int32
	Key      string // canonical text of the ordering key; "" reads it from the envelope
	Slot     int32  // value of the envelope's field slot; 0 if it is missing or invalid
	Class    record.Class
	Reason   string // for operators; must not contain payload
	// Topic is the topic that rejected the envelope, or "" if the whole envelope died. An envelope that two topics
	// reject leaves two letters.
	Topic     string
	Partition int32  // record.AnyPartition if no partition was chosen
	Pos       string // position of the envelope, as in package outboxes
	Origin    string // how the envelope came to be sent, as in package outboxes
	ReplayOf  string // the requeue or replay that sent the envelope, or "" for a first delivery
	Source    Source
	Attempts  []record.Attempt // earlier attempts; if empty, this failure is the only attempt
	// FirstFailure defaults to the time of the first attempt, or to the time of the letter.
	FirstFailure time.Time
	// Expire is the time after which the server removes the letter, also if it was requeued; 0 keeps it until it is
	// discarded.
	Expire time.Duration
}

// Dead is a stored letter. [Open] returns it with the whole envelope, even if that is stored in
// chunks.
type Dead struct {
	ID      string `bson:"_id"` // see [Letter.id]
	Content `bson:",inline"`
}

// Content is a letter without its id.
type Content struct {
	Watcher      string         `bson:"watcher"`
	NS           string         `bson:"ns"`
	EnvelopeID   bson.RawValue  `bson:"id,omitempty"` // see [ShortID]
	Delivery     int32          `bson:"delivery"`
	Slot         int32          `bson:"slot"`
	Pos          string         `bson:"pos"`
	Stamp        bson.Timestamp `bson:"stamp"` // of the insert of the envelope; zero if there is none
	Origin       string         `bson:"origin,omitempty"`
	Envelope     bson.Raw       `bson:"envelope,omitempty"`
	Chunks       int            `bson:"chunks,omitempty"` // number of documents that contain the envelope instead
	Facts        `bson:",inline"`
	Size         int              `bson:"size"`             // bytes of the envelope
	Digest       []byte           `bson:"digest,omitempty"` // of the envelope, see [DigestOf]
	Class        record.Class     `bson:"class"`
	Reason       string           `bson:"reason"`
	Fingerprint  string           `bson:"fingerprint"` // see [record.Failure]
	Failure      string           `bson:"failure"`     // its message
	Topic        string           `bson:"topic,omitempty"`
	Partition    *int32           `bson:"partition,omitempty"`
	Source       Source           `bson:"source"`
	Attempts     []record.Attempt `bson:"attempts"`
	FirstFailure time.Time        `bson:"firstFailure"`
	LastFailure  time.Time        `bson:"lastFailure"`
	MovedAt      time.Time        `bson:"movedAt"` // server time
	Ending       `bson:",inline"`
	ReplayOf     string   `bson:"replayOf,omitempty"`
	Requeued     *Requeue `bson:"requeued,omitempty"` // nil: not requeued
}

// Version returns the version of the letter. An edit names the version that it was made from.
func (d *Dead) Version() int32 { return VersionOf(d.Delivery, d.Requeued != nil) }

// VersionOf returns the version of a letter. Only a requeue changes a letter, and only once. The version includes the delivery, because an id
// selects the letter of the latest one: an edit of an earlier letter must not change a later one.
func VersionOf(delivery int32, isRequeued bool) int32 {
	version := 2 * delivery
	if isRequeued {
		version++
	}
	return version
}

// Ending states when the server removes a letter.
type Ending struct {
	ExpireAt *time.Time `bson:"expireAt,omitempty"` // nil: it stays
	Archived *Archived  `bson:"archived,omitempty"` // nil: not discarded
}

// Archived describes how a letter came into the archive: it was discarded, and stays until its ExpireAt.
type Archived struct {
	At    time.Time `bson:"at" json:"at"` // server time
	Actor string    `bson:"actor" json:"actor"`
}

// Requeue describes how a letter was requeued.
type Requeue struct {
	At       time.Time `bson:"at" json:"at"` // server time
	Actor    string    `bson:"actor" json:"actor"`
	Delivery int32     `bson:"delivery" json:"delivery"`                 // number of the new delivery
	Run      string    `bson:"run" json:"run"`                           // id of the action, as in the audit log
	Topic    string    `bson:"topic,omitempty" json:"topic,omitempty"`   // that the action has chosen; "": all that the envelope routes to
	Edited   []string  `bson:"edited,omitempty" json:"edited,omitempty"` // fields of the envelope that the requeue changed
	Handlers []string  `bson:"-" json:"handlers,omitempty"`              // names of the handlers that get it; only for a letter of a handler
}

// IDText returns the text of the envelope's id, as [IDText] does.
func (c *Content) IDText() string { return IDText(c.EnvelopeID) }

// IsSameEvent reports whether two letters are of the same envelope, perhaps of two deliveries or topics.
func (c *Content) IsSameEvent(content *Content) bool {
	return c.NS == content.NS && c.EnvelopeID.Equal(content.EnvelopeID) && c.Pos == content.Pos
}
