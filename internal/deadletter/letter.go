package deadletter

import (
	"cmp"
	"fmt"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/envelope"
	"github.com/outrelay/outrelay/internal/record"
)

// Bounds of a move.
const (
	maxInline = 15 << 20 // larger envelopes are stored in chunks: with the reason they do not fit a document (N20)
	chunkSize = 4 << 20

	maxReason = 8 << 10 // bytes of a reason, that of the letter and of each attempt
	maxTopic  = 1024    // bytes of the topic
	maxDepth  = 150     // of an envelope that is stored as a document
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

// Attempt is one failed delivery.
type Attempt struct {
	At     time.Time    `bson:"at" json:"at"`
	Topic  string       `bson:"topic,omitempty" json:"topic,omitempty"`
	Class  record.Class `bson:"class" json:"class"`
	Reason string       `bson:"reason" json:"reason"`
	Node   string       `bson:"node,omitempty" json:"node,omitempty"`
}

// Letter is an envelope that [Move] moves to the dead letters.
type Letter struct {
	NS        string            // "db.collection" of the outbox
	Mapping   *envelope.Mapping // reads the envelope; nil: it is one of the contract
	Raw       []byte            // the whole envelope from the event of the stream, a BSON document with its _id
	Class     record.Class
	Reason    string // for operators; must not contain payload
	Topic     string // "" if routing found no topic
	Partition int32  // record.AnyPartition if no partition was chosen
	Pos       string // `_data` of the stream event, or "" if the envelope did not come from the stream
	Source    Source
	Attempts  []Attempt // earlier attempts; if empty, this failure is the only attempt
	// FirstFailure defaults to the time of the first attempt, or to the server time of the move.
	FirstFailure time.Time
	ReplayOf     string // the requeue or replay that sent the envelope, or "" for a first delivery
	// KeepIfWaiting reports that only Topic rejected the envelope. If the envelope waits for other topics,
	// the move leaves it in the outbox, and it is sent to them.
	KeepIfWaiting bool
}

// ID identifies a letter: the namespace, the envelope's _id with its BSON type, and the delivery
// (N18).
type ID struct {
	NS       string        `bson:"ns"`
	ID       bson.RawValue `bson:"id"`
	Delivery int32         `bson:"delivery"`
}

// Dead is a stored letter. [Open] returns it with the whole envelope, even if that is stored in
// chunks.
type Dead struct {
	ID      ID `bson:"_id"`
	Content `bson:",inline"`
}

// Content is a letter without its id.
type Content struct {
	Envelope     bson.Raw `bson:"envelope,omitempty"`
	Chunks       int      `bson:"chunks,omitempty"` // number of documents that contain the envelope instead
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
	MovedAt      time.Time    `bson:"movedAt"` // server time
	ReplayOf     string       `bson:"replayOf,omitempty"`
	Replayed     *Replayed    `bson:"replayed,omitempty"` // nil: not requeued
}

// Version counts the changes that operators made to the letter. An edit names the version that it was made from. Only a
// requeue changes a letter, and only once.
func (d *Dead) Version() int32 {
	if d.Replayed != nil {
		return 1
	}
	return 0
}

// Replayed describes how a letter was requeued.
type Replayed struct {
	At       time.Time `bson:"at" json:"at"` // server time
	Actor    string    `bson:"actor" json:"actor"`
	Delivery int32     `bson:"delivery" json:"delivery"`                 // number of the new delivery
	Run      string    `bson:"run" json:"run"`                           // id of the action, as in the events log
	Edited   []string  `bson:"edited,omitempty" json:"edited,omitempty"` // fields of the envelope that the requeue changed
}

// Collection returns the name of the collection with the dead letters of the outbox coll.
func Collection(coll string) string { return coll + "_dead" }

// Letters returns a filter that matches letters, but not the chunks of large letters.
func Letters() bson.D {
	return bson.D{{Key: "_id.chunk", Value: bson.D{{Key: "$exists", Value: false}}}}
}

// String returns the id as text. It is stored in `replayOf` of a requeued envelope.
func (id ID) String() string {
	return fmt.Sprintf("dead:%s/%s/%d", id.NS, id.Text(), id.Delivery)
}

// Text returns the canonical text of the envelope's id, as in the header `id` of its records. For an id of another type
// it returns relaxed Extended JSON.
func (id ID) Text() string { return IDText(id.ID) }

// preparedLetter is a letter that is ready to be written, except for the times, which come from the
// server.
type preparedLetter struct {
	id            ID
	raw           []byte
	dead          Dead
	firstAttempt  bool // this failure is the only attempt
	keepIfWaiting bool // see [Letter.KeepIfWaiting]
	firstFailure  time.Time
}

// estimateSize returns roughly how many bytes the letter, without its chunks, adds to a
// transaction.
func (p *preparedLetter) estimateSize() int {
	return len(p.dead.Envelope) + len(p.dead.Reason) + 512 + len(p.dead.Attempts)*256
}

// prepareLetter validates l and returns the document to be stored.
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

	p := preparedLetter{
		raw:           l.Raw,
		id:            ID{NS: l.NS, ID: id, Delivery: readDelivery(l.Raw)},
		firstAttempt:  len(l.Attempts) == 0,
		keepIfWaiting: l.KeepIfWaiting,
		firstFailure:  l.FirstFailure,
	}
	p.dead = Dead{ID: p.id, Content: Content{
		Size:     len(l.Raw),
		Facts:    readFacts(l.Mapping.ToContract(l.Raw)),
		Class:    l.Class,
		Reason:   record.Clip(l.Reason, maxReason),
		Topic:    record.Clip(l.Topic, maxTopic),
		Pos:      l.Pos,
		Source:   l.Source,
		Attempts: keepLatestAttempts(l),
		ReplayOf: cmp.Or(l.ReplayOf, stringField(l.Raw, "replayOf")),
	}}
	if l.Partition >= 0 && l.Topic != "" {
		p.dead.Partition = &l.Partition
	}

	// MongoDB limits the size and the depth of a document, and the letter adds to both.
	if len(l.Raw) > maxInline || exceedsDepth(l.Raw, maxDepth) {
		p.dead.Chunks = (len(l.Raw) + chunkSize - 1) / chunkSize
	} else {
		p.dead.Envelope = l.Raw
	}
	return p, nil
}

// setTimes sets the times of the letter for a move at the server time now.
func (p *preparedLetter) setTimes(now time.Time) {
	d := &p.dead
	d.MovedAt = now
	if p.firstAttempt {
		d.Attempts[0].At = now
	}

	d.FirstFailure = p.firstFailure
	if d.FirstFailure.IsZero() {
		d.FirstFailure = d.Attempts[0].At
	}
	d.LastFailure = d.Attempts[len(d.Attempts)-1].At
}

// exceedsDepth reports whether the documents in doc are nested deeper than limit, or cannot be
// parsed. The server rejects depths above 180, and the letter adds one.
func exceedsDepth(doc bson.Raw, limit int) bool {
	if limit == 0 {
		return true
	}
	elems, err := doc.Elements()
	if err != nil {
		return true
	}

	for _, e := range elems {
		v := e.Value()
		nested := v.Type == bson.TypeEmbeddedDocument || v.Type == bson.TypeArray
		if nested && exceedsDepth(v.Value, limit-1) {
			return true
		}
	}
	return false
}

// readDelivery returns the delivery number of the envelope. If the field is missing or is not a
// valid number, the envelope counts as a first delivery, 0.
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

// keepLatestAttempts returns the attempts of l that are stored. If l has none, it returns this
// failure as the only one.
func keepLatestAttempts(l Letter) []Attempt {
	if len(l.Attempts) == 0 {
		return []Attempt{{
			Topic:  record.Clip(l.Topic, maxTopic),
			Class:  l.Class,
			Reason: record.Clip(l.Reason, maxReason),
			Node:   l.Source.Node,
		}}
	}

	latest := l.Attempts[max(0, len(l.Attempts)-record.KeptAttempts):]
	kept := make([]Attempt, len(latest))
	for i, a := range latest {
		a.Reason = record.Clip(a.Reason, maxReason)
		kept[i] = a
	}
	return kept
}
