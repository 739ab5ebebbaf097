package purge

import (
	"context"
	"slices"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/envelope"
	"github.com/outrelay/outrelay/internal/contract/eventid"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/outboxes"
)

// History is the delivery of a marked envelope, or an envelope that was requested by id. It has no payload.
type History struct {
	NS            string           `bson:"-"`
	ID            bson.RawValue    `bson:"_id"`
	AggregateType string           `bson:"aggregatetype"`
	AggregateID   bson.RawValue    `bson:"aggregateid"`
	Key           bson.RawValue    `bson:"key"`
	Type          string           `bson:"type"`
	TS            bson.Timestamp   `bson:"-"`      // zero: no stamp
	SentAt        *time.Time       `bson:"sentAt"` // nil: not marked
	Sent          []outboxes.Place `bson:"sent"`
	DueAt         *time.Time       `bson:"dueAt"`
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

// cursor is the end of a page: the page included everything up to this id of this stamp.
type cursor struct {
	At bson.Timestamp `bson:"t"`
	ID bson.RawValue  `bson:"i"`
}

// SentHistory reads the history of coll. A page costs the entries of the index on ts that are read until the page is
// full. A search for a key, or in an outbox without marks, reads the whole window. The pages are stable: an envelope that
// is delivered between two pages is on a later page, and a purged envelope is missing.
func SentHistory(ctx context.Context, coll *mongo.Collection, query HistoryQuery) (HistoryPage, error) {
	limit := min(query.Limit, MaxHistory)
	if limit <= 0 {
		limit = defaultHistoryLimit
	}
	historian := historian{coll: mongodb.Majority(coll), key: keyFilter(query.Mapping, query.Key), mapping: query.Mapping}
	if len(query.IDs) > 0 {
		found, err := historian.findEnvelopes(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: query.IDs}}}}, "_id", 0)
		return HistoryPage{Envelopes: found}, err
	}

	// The page begins after this stamp. From is inclusive, so it is the last stamp of the second before.
	after := outboxes.LastStampBefore(query.From.Truncate(time.Second))

	// The previous page may have ended between two envelopes of one stamp. The others come first, in the order of ids.
	var page HistoryPage
	if query.After != "" {
		var last cursor
		if mongodb.ParseCursor(query.After, &last) != nil || last.At.IsZero() {
			return page, mongodb.ErrCursor
		}
		var err error
		if page.Envelopes, err = historian.findAtStamp(ctx, last, limit); err != nil {
			return page, err
		}
		after = last.At
	}

	if room := limit - len(page.Envelopes); room > 0 {
		more, err := historian.findInWindow(ctx, after, query.To, room)
		if err != nil {
			return page, err
		}
		page.Envelopes = append(page.Envelopes, more...)
	}
	if n := len(page.Envelopes); n >= limit {
		end := page.Envelopes[n-1]
		var err error
		if page.Next, err = mongodb.EncodeCursor(cursor{At: end.TS, ID: end.ID}); err != nil {
			return page, err
		}
	}
	return page, nil
}

// historian reads the history of one collection.
type historian struct {
	coll *mongo.Collection
	key  bson.D // condition on the ordering key; nil for all keys

	mapping *envelope.Mapping
}

// findEnvelopes returns the envelopes that filter matches, sorted by the field sort. limit 0 means no limit.
func (h historian) findEnvelopes(
	ctx context.Context, filter bson.D, sort string, limit int,
) ([]History, error) {
	project := h.mapping.Project("aggregatetype", "aggregateid", "key", "type", "ts", "sentAt", "sent", "dueAt")

	type document struct {
		History `bson:",inline"`
		Stamp   bson.RawValue `bson:"ts"` // of any type
	}
	docs, err := mongodb.FindAll[document](ctx, h.coll, "reading the history of "+mongodb.Namespace(h.coll), filter,
		options.Find().SetSort(bson.D{{Key: sort, Value: 1}}).SetLimit(int64(limit)).SetProjection(project))
	if err != nil {
		return nil, err
	}

	found := make([]History, len(docs))
	for i, d := range docs {
		found[i] = d.History
		found[i].NS = mongodb.Namespace(h.coll)
		// A service may have stored any type.
		found[i].TS.T, found[i].TS.I, _ = d.Stamp.TimestampOK()
	}
	return found, nil
}

// filterSent returns the filter for marked envelopes whose stamp is in a range. A list of stamps is not a stamp.
func (h historian) filterSent(stamp bson.D, and ...bson.E) bson.D {
	and = append(and,
		bson.E{Key: "ts", Value: append(stamp, noArray)},
		bson.E{Key: "sentAt", Value: bson.D{{Key: "$ne", Value: nil}}})
	return append(outboxes.Unscheduled(and...), h.key...)
}

// findAtStamp returns the envelopes of one stamp after an id, in the order of ids.
func (h historian) findAtStamp(ctx context.Context, cursor cursor, limit int) ([]History, error) {
	var and []bson.E
	if !cursor.ID.IsZero() {
		// $expr compares ids of different types.
		later := bson.D{{Key: "$gt", Value: bson.A{"$_id", mongodb.Literal(cursor.ID)}}}
		and = append(and, bson.E{Key: "$expr", Value: later})
	}
	return h.findEnvelopes(ctx, h.filterSent(bson.D{{Key: "$eq", Value: cursor.At}}, and...), "_id", limit)
}

// findInWindow returns the first envelopes with a stamp after start and before end. Copied envelopes may share a stamp,
// and the index returns them in an order in which a next page could not continue. So it reads the last stamp of a full
// page again, in the order of ids.
func (h historian) findInWindow(ctx context.Context, start bson.Timestamp, end time.Time, limit int) ([]History, error) {
	stamp := bson.D{{Key: "$gt", Value: start}}
	if !end.IsZero() {
		stamp = append(stamp, bson.E{Key: "$lte", Value: outboxes.LastStampBefore(end)})
	}

	found, err := h.findEnvelopes(ctx, h.filterSent(stamp), "ts", limit)
	if err != nil || len(found) < limit {
		return found, err
	}

	last := found[len(found)-1].TS
	whole := slices.IndexFunc(found, func(history History) bool { return history.TS == last })
	rest, err := h.findAtStamp(ctx, cursor{At: last}, limit-whole)
	return append(found[:whole], rest...), err
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
