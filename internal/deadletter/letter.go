package deadletter

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/record"
)

// Bounds of a move.
const (
	MaxLetters = 1000     // in one transaction (N20)
	MaxBytes   = 8 << 20  // in one transaction (N3), unless one letter alone is larger
	MaxInline  = 15 << 20 // an envelope above it is stored in chunks, for it must fit a document with its reason (N20)
	ChunkSize  = 4 << 20
	maxReason  = 8 << 10 // bytes of the reason, and of that of each attempt
	maxHistory = 50      // attempts kept, the latest
	maxDepth   = 150     // of an envelope that is stored as a document
)

// Source is who gave the envelope up.
type Source struct {
	Kind    string `bson:"kind"` // "relay" or "handler"
	Watcher string `bson:"watcher,omitempty"`
	Group   string `bson:"group,omitempty"`   // of a handler
	Handler string `bson:"handler,omitempty"` // of a handler
	Node    string `bson:"node,omitempty"`
	Epoch   int64  `bson:"epoch,omitempty"`
	Version string `bson:"version,omitempty"`
}

// Attempt is one failed delivery.
type Attempt struct {
	At     time.Time    `bson:"at"`
	Topic  string       `bson:"topic,omitempty"`
	Class  record.Class `bson:"class"`
	Reason string       `bson:"reason"`
	Node   string       `bson:"node,omitempty"`
}

// Letter is an envelope to give up.
type Letter struct {
	NS        string // "db.collection" of the outbox
	Raw       []byte // the whole envelope, a BSON document with its _id: the stream's image
	Class     record.Class
	Reason    string // for people: never payload
	Topic     string // "" where none was found
	Partition int32  // record.AnyPartition where none was chosen
	Pos       string // `_data` of its stream event; "" if it did not come from the stream
	Source    Source
	Attempts  []Attempt // earlier ones; empty makes this failure the only one
	// FirstFailure defaults to the first attempt, or to the server's time of the move.
	FirstFailure time.Time
	ReplayOf     string // the replay that sent it, "" for a first delivery
	// Shared says that Topic alone refused it: an envelope that waits for other topics stays, and is sent to those.
	Shared bool
}

// ID names a letter: the namespace, the envelope's _id with its BSON type, and the delivery (N18).
type ID struct {
	NS       string        `bson:"ns"`
	ID       bson.RawValue `bson:"id"`
	Delivery int32         `bson:"delivery"`
}

// Dead is a letter as stored. Envelope is whole, also if it was stored in chunks, when it comes from [Open].
type Dead struct {
	ID           ID       `bson:"_id"`
	Envelope     bson.Raw `bson:"envelope,omitempty"`
	Chunks       int      `bson:"chunks,omitempty"` // number of documents that hold the envelope instead
	Facts        `bson:",inline"`
	Size         int          `bson:"size"` // bytes of the envelope
	Class        record.Class `bson:"class"`
	Reason       string       `bson:"reason"`
	Topic        string       `bson:"topic,omitempty"`
	Partition    *int32       `bson:"partition,omitempty"`
	Pos          string       `bson:"pos,omitempty"`
	Source       Source       `bson:"source"`
	Attempts     []Attempt    `bson:"attempts"`
	FirstFailure time.Time    `bson:"firstFailure"`
	LastFailure  time.Time    `bson:"lastFailure"`
	MovedAt      time.Time    `bson:"movedAt"` // of the server
	ReplayOf     string       `bson:"replayOf,omitempty"`
	// Version counts what operators did to the letter; an edit names the one it was made from.
	Version  int32     `bson:"version,omitempty"`
	Replayed *Replayed `bson:"replayed,omitempty"` // nil: nobody requeued it
}

// Replayed says that a letter was requeued.
type Replayed struct {
	At       time.Time `bson:"at"` // of the server
	Actor    string    `bson:"actor"`
	Delivery int32     `bson:"delivery"`         // the one that it was requeued as
	Run      string    `bson:"run"`              // the action that did it, as the events log names it
	Edited   []string  `bson:"edited,omitempty"` // fields of the envelope that were changed on the way
}

// Collection is the name of the dead letters of the outbox collection coll.
func Collection(coll string) string { return coll + "_dead" }

// Letters is the filter that leaves out the chunks of large letters.
func Letters() bson.D {
	return bson.D{{Key: "_id.chunk", Value: bson.D{{Key: "$exists", Value: false}}}}
}

// String is the letter's id as text: what `replayOf` of a requeued envelope says.
func (id ID) String() string {
	return fmt.Sprintf("dead:%s/%s/%d", id.NS, canonicalText(id.ID), id.Delivery)
}

// Text is the canonical text of the envelope's id, as in the header `id` of its records.
func (id ID) Text() string { return canonicalText(id.ID) }

// preparedLetter is a letter ready to be written, but for the times that are the server's.
type preparedLetter struct {
	db, coll string
	id       ID
	raw      []byte
	dead     Dead
	firstAttempt      bool // the only attempt is this failure
	keepIfWaiting   bool
	firstFailure    time.Time
}

// estimateSize is about what the letter, without its chunks, adds to a transaction.
func (p *preparedLetter) estimateSize() int {
	return len(p.dead.Envelope) + len(p.dead.Reason) + 512 + len(p.dead.Attempts)*256
}

func prepareLetter(l Letter) (preparedLetter, error) {
	db, coll, ok := strings.Cut(l.NS, ".")
	if !ok || db == "" || coll == "" {
		return preparedLetter{}, fmt.Errorf("dead letter: namespace %q is not <database>.<collection>", l.NS)
	}
	if l.Class == "" {
		return preparedLetter{}, fmt.Errorf("dead letter of %s: it has no class", l.NS)
	}
	if err := bson.Raw(l.Raw).Validate(); err != nil {
		return preparedLetter{}, fmt.Errorf("dead letter of %s: its envelope is not BSON: %w", l.NS, err)
	}
	id, err := bson.Raw(l.Raw).LookupErr("_id")
	if err != nil {
		return preparedLetter{}, fmt.Errorf("dead letter of %s: its envelope has no _id: %w", l.NS, err)
	}
	p := preparedLetter{db: db, coll: coll, raw: l.Raw, id: ID{NS: l.NS, ID: id, Delivery: readDelivery(l.Raw)}, firstAttempt: len(l.Attempts) == 0, keepIfWaiting: l.Shared, firstFailure: l.FirstFailure}
	p.dead = Dead{
		ID: p.id, Size: len(l.Raw), Facts: readFacts(l.Raw), Class: l.Class, Reason: truncateText(l.Reason, maxReason), Topic: truncateText(l.Topic, 1024), Pos: l.Pos,
		Source: l.Source, Attempts: keepLatestAttempts(l), ReplayOf: cmp.Or(l.ReplayOf, stringField(l.Raw, "replayOf")),
	}
	if l.Partition >= 0 && l.Topic != "" {
		p.dead.Partition = &l.Partition
	}
	if len(l.Raw) > MaxInline || exceedsDepth(l.Raw, maxDepth) {
		p.dead.Chunks = (len(l.Raw) + ChunkSize - 1) / ChunkSize
	} else {
		p.dead.Envelope = l.Raw
	}
	return p, nil
}

// setTimes fills in the server's time of the move.
func (p *preparedLetter) setTimes(now time.Time) {
	d := &p.dead
	d.MovedAt = now
	if p.firstAttempt {
		d.Attempts[0].At = now
	}
	d.FirstFailure, d.LastFailure = p.firstFailure, d.Attempts[len(d.Attempts)-1].At
	if d.FirstFailure.IsZero() {
		d.FirstFailure = d.Attempts[0].At
	}
}

// exceedsDepth reports whether documents nest deeper than left. The server refuses depths above 180, and the letter adds one.
func exceedsDepth(doc bson.Raw, left int) bool {
	if left == 0 {
		return true
	}
	elems, err := doc.Elements()
	if err != nil {
		return true
	}
	for _, e := range elems {
		switch v := e.Value(); v.Type {
		case bson.TypeEmbeddedDocument, bson.TypeArray:
			if exceedsDepth(v.Value, left-1) {
				return true
			}
		}
	}
	return false
}

// readDelivery is the envelope's count of requeues; anything but a number is a first delivery.
func readDelivery(raw bson.Raw) int32 {
	v, err := raw.LookupErr("delivery")
	if err != nil {
		return 0
	}
	n, ok := v.AsInt64OK()
	if !ok || n < 0 || n > 1<<31-1 {
		return 0
	}
	return int32(n)
}

// keepLatestAttempts is the attempts that are kept; this failure alone where there were none before.
func keepLatestAttempts(l Letter) []Attempt {
	if len(l.Attempts) == 0 {
		return []Attempt{{Topic: truncateText(l.Topic, 1024), Class: l.Class, Reason: truncateText(l.Reason, maxReason), Node: l.Source.Node}}
	}
	kept := l.Attempts[max(0, len(l.Attempts)-maxHistory):]
	out := make([]Attempt, len(kept))
	for i, a := range kept {
		a.Reason = truncateText(a.Reason, maxReason)
		out[i] = a
	}
	return out
}

// truncateText cuts s to n bytes of valid UTF-8, as BSON wants it.
func truncateText(s string, n int) string {
	if len(s) > n {
		s = s[:n]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}
