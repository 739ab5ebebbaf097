package admin

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/store"
)

// ErrCursor says that a page was asked for by a text that no page of that list gave.
var ErrCursor = errors.New("the cursor is none that a page of this list has given")

// EventFilter says which entries of the events log. What is set must hold all together.
type EventFilter struct {
	Watcher  string // "" is all of the state database
	Node     string
	Actor    string
	Kinds    []string
	From, To time.Time // at From or later, before To
}

// LogEvent is one entry of the events log.
type LogEvent struct {
	ID      string          `json:"id"`
	At      time.Time       `json:"at"` // of the server
	Kind    string          `json:"kind"`
	Watcher string          `json:"watcher,omitempty"`
	Node    string          `json:"node,omitempty"`
	Actor   string          `json:"actor,omitempty"` // of what people did
	Source  string          `json:"source,omitempty"`
	Fields  json.RawMessage `json:"fields"` // as relaxed Extended JSON
}

// EventPage is a page of the log, the newest first.
type EventPage struct {
	Events []LogEvent `json:"events"`
	Total  int64      `json:"total"` // that match, on all pages
	Next   string     `json:"next,omitempty"`
}

// eventPlace is where a page ended.
type eventPlace struct {
	At bson.DateTime `bson:"a"`
	ID bson.ObjectID `bson:"i"`
}

func (f EventFilter) query() bson.D {
	q := bson.D{}
	at := bson.D{}
	if !f.From.IsZero() {
		at = append(at, bson.E{Key: "$gte", Value: f.From})
	}
	if !f.To.IsZero() {
		at = append(at, bson.E{Key: "$lt", Value: f.To})
	}
	if len(at) > 0 {
		q = append(q, bson.E{Key: "at", Value: at})
	}
	for _, c := range []struct{ field, value string }{{"watcher", f.Watcher}, {"node", f.Node}, {"fields.actor", f.Actor}} {
		if c.value != "" {
			q = append(q, bson.E{Key: c.field, Value: c.value})
		}
	}
	if len(f.Kinds) > 0 {
		q = append(q, bson.E{Key: "kind", Value: bson.D{{Key: "$in", Value: f.Kinds}}})
	}
	return q
}

// Events reads a page of the log. The log has some ten thousand entries at most, of which those that match are counted.
func (k Desk) Events(ctx context.Context, f EventFilter, limit int, after string) (EventPage, error) {
	page := EventPage{Events: []LogEvent{}}
	coll := store.Majority(k.State.Collection("events"))
	query := f.query()
	total, err := coll.CountDocuments(ctx, query)
	if err != nil {
		return page, wrapped("counting the log of events", err)
	}
	page.Total = total
	if after != "" {
		var p eventPlace
		if err := parseCursor(after, &p); err != nil {
			return page, err
		}
		query = bson.D{{Key: "$and", Value: bson.A{query, behindPlace("at", p.At, p.ID)}}}
	}
	limit = pageSize(limit)
	cur, err := coll.Find(ctx, query, options.Find().SetSort(bson.D{{Key: "at", Value: -1}, {Key: "_id", Value: -1}}).SetLimit(int64(limit)))
	if err != nil {
		return page, wrapped("reading the log of events", err)
	}
	var list []store.Event
	if err := cur.All(ctx, &list); err != nil {
		return page, wrapped("reading the log of events", err)
	}
	for i := range list {
		page.Events = append(page.Events, logEvent(&list[i]))
	}
	if n := len(list); n == limit {
		page.Next, err = cursorText(eventPlace{bson.NewDateTimeFromTime(list[n-1].At), list[n-1].ID})
	}
	return page, err
}

// behindPlace is what comes after a place in a list that is sorted by a date and the id, both descending.
func behindPlace(field string, at bson.DateTime, id any) bson.D {
	return bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: field, Value: bson.D{{Key: "$lt", Value: at}}}},
		bson.D{{Key: field, Value: at}, {Key: "_id", Value: bson.D{{Key: "$lt", Value: id}}}},
	}}}
}

func logEvent(e *store.Event) LogEvent {
	out := LogEvent{ID: e.ID.Hex(), At: e.At.UTC(), Kind: string(e.Kind), Watcher: e.Watcher, Node: e.Node, Fields: extJSON(e.Fields)}
	out.Actor, _ = e.Fields.Lookup("actor").StringValueOK()
	out.Source, _ = e.Fields.Lookup("source").StringValueOK()
	return out
}

// extJSON is a document as relaxed Extended JSON; {} for none, or for one that cannot be written as such.
func extJSON(raw bson.Raw) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("{}")
	}
	out, err := bson.MarshalExtJSON(raw, false, false)
	if err != nil || !json.Valid(out) {
		return json.RawMessage("{}")
	}
	return out
}

// EventsTrim removes the oldest entries beyond the newest keep, and returns how many those were. It does nothing where keep
// is 0 or less, or where there are no more than that. The entry about the trim itself comes on top.
func (k Desk) EventsTrim(ctx context.Context, keep int) (int64, error) {
	if keep <= 0 {
		return 0, nil
	}
	coll := store.Majority(k.State.Collection("events"))
	var last store.Event
	err := coll.FindOne(ctx, bson.D{}, options.FindOne().SetSort(bson.D{{Key: "at", Value: -1}, {Key: "_id", Value: -1}}).SetSkip(int64(keep)-1)).Decode(&last)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, nil
	}
	if err != nil {
		return 0, wrapped("trimming the log of events", err)
	}
	res, err := coll.DeleteMany(ctx, behindPlace("at", bson.NewDateTimeFromTime(last.At), last.ID))
	if err != nil {
		return 0, wrapped("trimming the log of events", err)
	}
	if res.DeletedCount == 0 {
		return 0, nil
	}
	return res.DeletedCount, k.note(ctx, "events_trimmed", bson.D{{Key: "removed", Value: res.DeletedCount}, {Key: "kept", Value: keep}})
}

// cursorText makes a cursor of a place.
func cursorText(place any) (string, error) {
	b, err := bson.Marshal(place)
	if err != nil {
		return "", fmt.Errorf("making a cursor: %w", err)
	}
	return base64.RawURLEncoding.EncodeToString(b), nil
}

// parseCursor reads what cursorText made; anything else is an [ErrCursor].
func parseCursor(text string, place any) error {
	b, err := base64.RawURLEncoding.DecodeString(text)
	if err != nil || bson.Raw(b).Validate() != nil || bson.Unmarshal(b, place) != nil {
		return ErrCursor
	}
	return nil
}

// wrapped says what was being done; nil stays nil.
func wrapped(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
