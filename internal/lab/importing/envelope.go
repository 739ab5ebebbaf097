package importing

import (
	"cmp"
	"errors"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/keyhash"
)

// kind is how a row is imported.
type kind int

const (
	pending kind = iota // for the stream
	scheduled
	retried // waits for its next attempt
	dead
)

// kindAt returns the kind of an item at the time now.
func (it *item) kindAt(now time.Time) kind {
	switch {
	case it.dead:
		return dead
	case it.attempts > 0:
		return retried
	case it.due.After(now):
		return scheduled
	}
	return pending
}

// envelope returns the envelope of an item, which the relay can parse. source names the source, and rowID the row.
func (it *item) envelope(source string, rowID bson.RawValue, kind kind, options Options) (bson.D, error) {
	// Without an aggregate, each event is ordered alone.
	if it.aggregateID == "" {
		it.aggregateID = idText(it.id)
	}
	doc := bson.D{
		{Key: "_id", Value: it.id},
		{Key: "aggregatetype", Value: it.aggregateType},
		{Key: "aggregateid", Value: it.aggregateID},
		{Key: "type", Value: it.typ},
		{Key: "payload", Value: it.payload},
	}
	add := func(present bool, name string, value any) {
		if present {
			doc = append(doc, bson.E{Key: name, Value: value})
		}
	}

	key := cmp.Or(it.key, it.aggregateID)
	var headers bson.A
	for _, h := range it.headers {
		var value any
		if h.value != nil {
			value = *h.value
		}
		headers = append(headers, bson.D{{Key: "k", Value: h.name}, {Key: "v", Value: value}})
		// The user has selected the header because the library's own key has another meaning.
		if h.name == options.KeyHeader && h.value != nil && *h.value != "" {
			key = *h.value
		}
	}
	add(key != it.aggregateID, "key", key)
	add(headers != nil, "headers", headers)
	add(it.contentType != "", "contenttype", it.contentType)
	add(!it.at.IsZero(), "time", it.at)
	add(!it.expires.IsZero(), "expiresAt", it.expires)
	add(kind == scheduled, "dueAt", it.due)
	doc = append(doc,
		// The server replaces an empty timestamp by its time.
		bson.E{Key: "ts", Value: bson.Timestamp{}},
		bson.E{Key: "slot", Value: keyhash.Slot([]byte(key))},
		bson.E{Key: "imported", Value: bson.D{{Key: "from", Value: source}, {Key: "id", Value: rowID}, {Key: "attempts", Value: it.attempts}}})

	raw, err := bson.Marshal(doc)
	if err != nil {
		return nil, err
	}
	// The rest of a document is for the fields of a delivery.
	const most = 16<<20 - 16<<10
	if len(raw) > most {
		return nil, errors.New("the envelope would be larger than a document may be")
	}
	// A row that the relay would reject is reported now, and does not become a dead letter later.
	var view envelope.View
	return doc, envelope.Parse(raw, &view)
}
