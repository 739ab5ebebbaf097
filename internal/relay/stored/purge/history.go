package purge

import (
	"context"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// History is the delivery of a marked envelope, or an envelope that was requested by id. It has no payload.
type History struct {
	NS                  string
	ID                  bson.RawValue
	AggregateType, Type string // canonical texts
	AggregateID, Key    bson.RawValue
	TS                  bson.Timestamp // zero: no stamp
	SentAt              *time.Time     // nil: not marked
	Sent                []outboxes.Place
	DueAt               *time.Time
}

// HistoryQuery selects envelopes by id, or marked envelopes by the time at which they were written and, if Key is not
// empty, by ordering key. That time is the stamp, which has an index. An envelope that was inserted without a stamp has
// the stamp of its delivery.
type HistoryQuery struct {
	IDs      []eventid.ID // in any state; then the other fields are ignored
	Key      string       // canonical text of the ordering key
	From, To time.Time    // of the stamp, in whole seconds: From ≤ ts < To; zero is no bound
	After    string       // HistoryPage.Next of the previous page
	Limit    int          // at most this many; 100 if 0 or less, 10,000 at most

	Mapping *envelope.Mapping // reads the documents; nil: they are envelopes of the contract
}

// HistoryPage is one page, the oldest envelope first. Next is the cursor of the following page, or "" after the last.
type HistoryPage struct {
	Envelopes []History
	Next      string
}

// MaxHistory is the largest number of envelopes of a page.
const MaxHistory = 10_000

const defaultHistoryLimit = 100

// byStamp is the order of a history. The index of an outbox has only the stamp.
var byStamp = listing.Order{Field: "ts", FieldIndex: true}

// SentHistory reads the history of coll. A page costs the entries of the index on ts that are read until the page is
// full, twice. A search for a key, or in an outbox without marks, reads the whole window. The pages are stable: an envelope that
// is delivered between two pages is on a later page, and a purged envelope is missing.
func SentHistory(ctx context.Context, coll *mongo.Collection, query HistoryQuery) (page HistoryPage, err error) {
	var docs []bson.Raw
	coll = mongodb.Majority(coll)
	doing := "reading the history of " + mongodb.Namespace(coll)
	fields := options.Find().SetProjection(query.Mapping.Project("aggregatetype", "aggregateid", "key", "type", "ts", "sentAt", "sent", "dueAt"))

	if len(query.IDs) > 0 {
		byID := bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: query.IDs}}}}
		docs, err = mongodb.FindAll[bson.Raw](ctx, coll, doing, byID, fields.SetSort(bson.D{{Key: "_id", Value: 1}}))
	} else {
		limit := min(query.Limit, MaxHistory)
		if limit <= 0 {
			limit = defaultHistoryLimit
		}
		docs, page.Next, err = listing.ReadPage[bson.Raw](ctx, coll, byStamp, query.filterSent(), query.After, limit, fields)
		err = mongodb.DescribeError(err, doing, "find", mongodb.Namespace(coll))
	}
	if err != nil {
		return HistoryPage{}, err
	}

	page.Envelopes = make([]History, len(docs))
	for i, raw := range docs {
		page.Envelopes[i] = newHistory(mongodb.Namespace(coll), raw)
	}
	return page, nil
}

// newHistory reads an envelope. A service may have stored any type in each field, and a field of another type counts as missing.
func newHistory(ns string, raw bson.Raw) History {
	history := History{
		NS:            ns,
		ID:            raw.Lookup("_id"),
		AggregateType: envelope.CanonicalText(raw.Lookup("aggregatetype")),
		AggregateID:   raw.Lookup("aggregateid"),
		Key:           raw.Lookup("key"),
		Type:          envelope.CanonicalText(raw.Lookup("type")),
		TS:            outboxes.Stamp(raw),
		SentAt:        findTime(raw, "sentAt"),
		DueAt:         findTime(raw, "dueAt"),
	}

	if raw.Lookup("sent").Unmarshal(&history.Sent) != nil {
		history.Sent = nil
	}
	return history
}

func findTime(raw bson.Raw, field string) *time.Time {
	ms, ok := raw.Lookup(field).DateTimeOK()
	if !ok {
		return nil
	}
	at := time.UnixMilli(ms).UTC()
	return &at
}

// filterSent returns the filter for the marked envelopes of the window and of the key. A list of stamps is not a stamp.
func (q HistoryQuery) filterSent() bson.D {
	// From is inclusive, so the window begins after the last stamp of the second before.
	window := bson.D{{Key: "$gt", Value: outboxes.LastStampBefore(q.From.Truncate(time.Second))}}
	if !q.To.IsZero() {
		window = append(window, bson.E{Key: "$lte", Value: outboxes.LastStampBefore(q.To)})
	}
	return append(outboxes.WithoutDueAt(
		envelope.Stamped(window...),
		envelope.Marked(),
	), keyFilter(q.Mapping, q.Key)...)
}

// keyFilter returns the condition for the canonical text of an ordering key. It matches the key in every type that has
// this text.
func keyFilter(mapping *envelope.Mapping, text string) bson.D {
	if text == "" {
		return nil
	}
	return bson.D{mapping.KeyFilter(KeyForms(text))}
}

// KeyForms returns the values whose canonical text is text.
func KeyForms(text string) bson.A {
	forms := bson.A{text}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		// An int64 is equal to an int32 of the same value.
		forms = append(forms, n)
	}
	if id := eventid.Parse(text); id != eventid.New(text) && id.String() == text {
		forms = append(forms, id)
	}
	return forms
}
