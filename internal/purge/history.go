package purge

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/outboxes"
	"github.com/outrelay/outrelay/pkg/event"
)

// History is what a marked envelope tells of its delivery, and an envelope that is asked for by id of its state. It has
// no payload.
type History struct {
	NS            string         `bson:"-"`
	ID            bson.RawValue  `bson:"_id"`
	AggregateType string         `bson:"aggregatetype"`
	AggregateID   bson.RawValue  `bson:"aggregateid"`
	Key           bson.RawValue  `bson:"key"`
	Type          string         `bson:"type"`
	TS            bson.Timestamp `bson:"-"`      // zero: no stamp
	SentAt        *time.Time     `bson:"sentAt"` // nil: not marked
	Sent          []Position     `bson:"sent"`
	State         string         `bson:"state"`
	DueAt         *time.Time     `bson:"dueAt"`
	ScheduledFor  *time.Time     `bson:"scheduledFor"`
	Delivery      int32          `bson:"delivery"`
}

// HistoryQuery asks for envelopes by id, or for marked ones by the time at which they were written and, if Key is not empty,
// by ordering key. That time is the stamp, by which there is an index; what was never stamped has that of its delivery.
type HistoryQuery struct {
	IDs      []event.ID // whatever their state; the rest of the query is not looked at then
	Key      string     // canonical text of the ordering key
	From, To time.Time  // of the stamp, in whole seconds: From ≤ ts < To; zero is no bound
	After    string     // HistoryPage.Next of the page before
	Limit    int        // at most this many; 100 if 0 or less, 10,000 at most
}

// HistoryPage is one page, the oldest first. Next is where the following page begins, "" after the last.
type HistoryPage struct {
	Envelopes []History
	Next      string
}

// ErrBadCursor says that a place to go on from was not made by this query's kind.
var ErrBadCursor = errors.New("no such place in the history: pass on the text that the page before gave")

const (
	historyLimit = 100
	historyMost  = 10_000
)

// place is where a page ended: everything up to this id of this stamp was shown.
type place struct {
	At bson.Timestamp `bson:"t"`
	ID bson.RawValue  `bson:"i"`
}

func (p place) String() string {
	raw, err := bson.Marshal(p)
	if err != nil {
		return ""
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

func parsePlace(s string) (p place, err error) {
	raw, err := base64.RawURLEncoding.DecodeString(s)
	if err == nil {
		err = bson.Unmarshal(raw, &p)
	}
	if err != nil || p.At.IsZero() {
		return place{}, ErrBadCursor
	}
	return p, nil
}

// SentHistory reads the history of coll. A page costs what is read of the index on ts until it is full: a key, or an outbox
// that is not marked, is looked for within the whole window. The pages are stable: what is delivered meanwhile comes later,
// and what is purged is missing.
func SentHistory(ctx context.Context, coll *mongo.Collection, q HistoryQuery) (HistoryPage, error) {
	limit := min(q.Limit, historyMost)
	if limit <= 0 {
		limit = historyLimit
	}
	h := historian{coll: mongodb.Majority(coll), key: keyFilter(q.Key)}
	if len(q.IDs) > 0 {
		found, err := h.find(ctx, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: q.IDs}}}}, "_id", 0)
		return HistoryPage{Envelopes: found}, err
	}
	var page HistoryPage
	after := bson.Timestamp{} // of which nothing is shown
	if s := q.From.Unix(); !q.From.IsZero() && s > 0 {
		after = bson.Timestamp{T: uint32(min(s, math.MaxUint32)) - 1, I: math.MaxUint32}
	}
	if q.After != "" {
		last, err := parsePlace(q.After)
		if err != nil {
			return page, err
		}
		// The rest of the stamp at which the page before ended, in the order of ids.
		if page.Envelopes, err = h.at(ctx, last, limit); err != nil {
			return page, err
		}
		after = last.At
	}
	if room := limit - len(page.Envelopes); room > 0 {
		more, err := h.window(ctx, after, q.To, room)
		if err != nil {
			return page, err
		}
		page.Envelopes = append(page.Envelopes, more...)
	}
	if n := len(page.Envelopes); n >= limit {
		end := page.Envelopes[n-1]
		page.Next = place{At: end.TS, ID: end.ID}.String()
	}
	return page, nil
}

type historian struct {
	coll *mongo.Collection
	key  bson.D // of an ordering key; nil for all
}

func (h historian) find(ctx context.Context, filter bson.D, sort string, limit int) ([]History, error) {
	project := bson.D{}
	for _, f := range []string{"aggregatetype", "aggregateid", "key", "type", "ts", "sentAt", "sent", "state", "dueAt", "scheduledFor", "delivery"} {
		project = append(project, bson.E{Key: f, Value: 1})
	}
	cur, err := h.coll.Find(ctx, filter, options.Find().SetSort(bson.D{{Key: sort, Value: 1}}).SetLimit(int64(limit)).SetProjection(project))
	if err != nil {
		return nil, mongodb.DescribeRefusal(err, "reading the history of "+mongodb.Namespace(h.coll), "find", mongodb.Namespace(h.coll), "")
	}
	var docs []struct {
		History `bson:",inline"`
		Stamp   bson.RawValue `bson:"ts"` // of any type
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, fmt.Errorf("reading the history of %s: %w", mongodb.Namespace(h.coll), err)
	}
	found := make([]History, len(docs))
	for i, d := range docs {
		found[i] = d.History
		found[i].NS = mongodb.Namespace(h.coll)
		found[i].TS.T, found[i].TS.I, _ = d.Stamp.TimestampOK()
	}
	return found, nil
}

// sent is the filter for marked envelopes whose stamp is in a range; a list of stamps is none.
func (h historian) sent(stamp bson.D, and ...bson.E) bson.D {
	f := outboxes.Healthy(append(and, bson.E{Key: "ts", Value: append(stamp, noArray)}, bson.E{Key: "sentAt", Value: bson.D{{Key: "$ne", Value: nil}}})...)
	return append(f, h.key...)
}

// at are the envelopes of one stamp behind an id.
func (h historian) at(ctx context.Context, p place, limit int) ([]History, error) {
	var and []bson.E
	if !p.ID.IsZero() {
		and = append(and, bson.E{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$_id", mongodb.Literal(p.ID)}}}}) // of any type
	}
	return h.find(ctx, h.sent(bson.D{{Key: "$eq", Value: p.At}}, and...), "_id", limit)
}

// window are the first of a window by time. Copied envelopes may share a stamp, and the index gives those in no order that
// a next page could go on in: so the last stamp of a full page is read once more, by id.
func (h historian) window(ctx context.Context, after bson.Timestamp, to time.Time, limit int) ([]History, error) {
	stamp := bson.D{{Key: "$gt", Value: after}}
	if s := to.Unix(); !to.IsZero() {
		if to.Nanosecond() > 0 {
			s++
		}
		stamp = append(stamp, bson.E{Key: "$lt", Value: bson.Timestamp{T: uint32(min(max(s, 0), math.MaxUint32))}})
	}
	found, err := h.find(ctx, h.sent(stamp), "ts", limit)
	if err != nil || len(found) < limit {
		return found, err
	}
	end := found[len(found)-1].TS
	whole := len(found)
	for whole > 0 && found[whole-1].TS == end {
		whole--
	}
	rest, err := h.at(ctx, place{At: end}, limit-whole)
	return append(found[:whole], rest...), err
}

// keyFilter finds envelopes by the canonical text of their ordering key, whatever the type it was written in.
func keyFilter(text string) bson.D {
	if text == "" {
		return nil
	}
	in := bson.D{{Key: "$in", Value: KeyForms(text)}}
	return bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: "key", Value: in}},
		bson.D{{Key: "key", Value: nil}, {Key: "aggregateid", Value: in}},
	}}}
}

// KeyForms are the values of which text is the canonical text.
func KeyForms(text string) bson.A {
	forms := bson.A{text}
	if n, err := strconv.ParseInt(text, 10, 64); err == nil && strconv.FormatInt(n, 10) == text {
		forms = append(forms, n) // equal to an int32 of that value
	}
	if id := event.ParseID(text); id != event.NewID(text) && id.String() == text {
		forms = append(forms, id)
	}
	return forms
}
