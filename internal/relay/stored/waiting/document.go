package waiting

import (
	"bytes"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// Document is a waiting envelope as it is stored. Its values alias the bytes it was read from, except for its strings.
type Document struct {
	DocumentID  [IDSize]byte
	NS          string
	ID          bson.RawValue // `_id` of the envelope
	Delivery    int32
	Key         string // canonical text of the ordering key
	Pos         string
	Pending     []string // nil if it does not list its targets
	Reason      Reason
	Origin      string
	NextAt      int64 // Unix milliseconds; 0: when its turn comes
	Attempts    int32
	Uncounted   int32            // of the attempts: another topic was still waiting, so they do not make the envelope dead
	Error       *record.Attempt  // the latest failed attempt; nil if there is none, or it was not read
	History     []record.Attempt // the latest failed attempts, oldest first; nil if it was not read
	Redelivered bool
	StreamMS    int64 // as of an Entry
	ReplayOf    string
	Sent        []outboxes.Place // of its records so far, if deliveries are recorded on the envelope
	Envelope    bson.Raw         // nil if it was not read
	Size        int              // bytes of the envelope
}

// IsOfStream reports whether the envelope has a place in the order of the stream's events of its key.
func (d *Document) IsOfStream() bool { return d.Origin == OriginStream || d.Origin == OriginSweep }

// NextTime returns the time of NextAt, or nil.
func (d *Document) NextTime() *time.Time {
	if d.NextAt == 0 {
		return nil
	}
	at := time.UnixMilli(d.NextAt).UTC()
	return &at
}

// UnmarshalBSON implements bson.Unmarshaler. It copies raw.
func (d *Document) UnmarshalBSON(raw []byte) error {
	*d = ReadDocument(bytes.Clone(raw))
	return nil
}

// ReadDocument reads a stored document. Only the store's writers make one, so a field of another type counts as missing.
func ReadDocument(raw bson.Raw) (document Document) {
	// A takeover reads a million of them, and the driver's elements cost twice as much.
	rest, _ := envelope.Elements(raw)
	for len(rest) > 0 {
		kind, name, value, after, ok := envelope.SplitElement(rest)
		if !ok {
			return document
		}
		rest = after
		rawValue := bson.RawValue{Type: kind, Value: value}

		switch string(name) {
		case "_id":
			_, id, _ := rawValue.BinaryOK()
			copy(document.DocumentID[:], id)
		case "ns":
			document.NS, _ = rawValue.StringValueOK()
		case "id":
			document.ID = rawValue
		case "delivery":
			n, _ := rawValue.AsInt64OK()
			document.Delivery = int32(min(max(n, 0), math.MaxInt32))
		case "key":
			document.Key, _ = rawValue.StringValueOK()
		case "pos":
			document.Pos, _ = rawValue.StringValueOK()
		case "topics":
			text, _ := rawValue.StringValueOK()
			document.Pending = splitTopics(text)
		case "reason":
			text, _ := rawValue.StringValueOK()
			document.Reason = Reason(text)
		case "origin":
			document.Origin, _ = rawValue.StringValueOK()
		case "nextAt":
			document.NextAt, _ = rawValue.DateTimeOK()
		case "attempts":
			n, _ := rawValue.AsInt64OK()
			document.Attempts = int32(n)
		case "uncounted":
			n, _ := rawValue.AsInt64OK()
			document.Uncounted = int32(n)
		case "redelivered":
			document.Redelivered, _ = rawValue.BooleanOK()
		case "streamMs":
			document.StreamMS, _ = rawValue.AsInt64OK()
		case "replayOf":
			document.ReplayOf, _ = rawValue.StringValueOK()
		case "envelope":
			doc, _ := rawValue.DocumentOK()
			document.Envelope, document.Size = doc, len(doc)
		// Their errors can be ignored: only the store's writers make these.
		case "sent":
			_ = bson.UnmarshalValue(rawValue.Type, rawValue.Value, &document.Sent)
		case "error":
			_ = bson.UnmarshalValue(rawValue.Type, rawValue.Value, &document.Error)
		case "history":
			_ = bson.UnmarshalValue(rawValue.Type, rawValue.Value, &document.History)
		}
	}
	return document
}
