package admin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"

	"github.com/outrelay/outrelay/internal/deadletter"
	"github.com/outrelay/outrelay/internal/record"
	"github.com/outrelay/outrelay/internal/store"
	"github.com/outrelay/outrelay/pkg/event"
)

// DeadFilter says which dead letters, as people type it. What is set must hold all together.
type DeadFilter struct {
	Collection    string    // an outbox as database.collection; "" is all of the watcher's
	IDs           []string  // of envelopes, as in the header `id`
	From, To      time.Time // when they died: at From or later, before To
	Topic         string
	Type          string
	AggregateType string
	Key           string // the ordering key
	Class         string
	Message       string // the reason begins with it
	Source        string // relay or handler
	Stand         string // any, replayable or replayed; "" is any
	All           bool   // lets a filter without any condition requeue or discard
}

// Classes are the classes that a dead letter may have.
func Classes() []string {
	return []string{
		string(record.Malformed), string(record.MessageTooLarge), string(record.NotAllowed), string(record.PartitionOutOfRange),
		string(record.Expired), string(record.RecordRefused), string(record.AttemptsExhausted), string(record.Handler),
	}
}

// query checks what only few values make sense for.
func (f DeadFilter) query() (deadletter.Query, error) {
	q := deadletter.Query{
		From: f.From, To: f.To, Topic: f.Topic, Type: f.Type, AggregateType: f.AggregateType, Key: f.Key,
		Class: record.Class(f.Class), Message: f.Message, SourceKind: f.Source, All: f.All,
	}
	var wrong []error
	oneOf := func(what, got string, allowed ...string) {
		if got != "" && !slices.Contains(allowed, got) {
			wrong = append(wrong, fmt.Errorf("%s %q is none of %s", what, got, strings.Join(allowed, ", ")))
		}
	}
	oneOf("class", f.Class, Classes()...)
	oneOf("source", f.Source, deadletter.FromRelay, deadletter.FromHandler)
	oneOf("stand", f.Stand, "any", string(deadletter.Replayable), string(deadletter.Requeued))
	if f.Stand != "any" {
		q.Stand = deadletter.Stand(f.Stand)
	}
	if !f.From.IsZero() && !f.To.IsZero() && !f.From.Before(f.To) {
		wrong = append(wrong, fmt.Errorf("the window from %s to %s is empty", f.From.Format(time.RFC3339), f.To.Format(time.RFC3339)))
	}
	for _, text := range f.IDs {
		ids, err := idValues(text)
		if err != nil {
			wrong = append(wrong, err)
		}
		q.IDs = append(q.IDs, ids...)
	}
	return q, errors.Join(wrong...)
}

// audit is the filter for the events log.
func (f DeadFilter) audit() bson.D {
	d := bson.D{}
	for _, c := range []struct{ name, value string }{
		{"collection", f.Collection},
		{"topic", f.Topic},
		{"type", f.Type},
		{"aggregate_type", f.AggregateType},
		{"key", f.Key},
		{"class", f.Class},
		{"message", f.Message},
		{"source", f.Source},
		{"stand", f.Stand},
	} {
		if c.value != "" {
			d = append(d, bson.E{Key: c.name, Value: c.value})
		}
	}
	if !f.From.IsZero() {
		d = append(d, bson.E{Key: "from", Value: f.From})
	}
	if !f.To.IsZero() {
		d = append(d, bson.E{Key: "to", Value: f.To})
	}
	if len(f.IDs) > 0 {
		d = append(d, bson.E{Key: "ids", Value: f.IDs[:min(len(f.IDs), 100)]})
	}
	if f.All {
		d = append(d, bson.E{Key: "all", Value: true})
	}
	return d
}

// idValues are the ids that a text may mean: a string may look like a UUID or an ObjectId.
func idValues(text string) ([]bson.RawValue, error) {
	if text == "" {
		return nil, errors.New("an id is empty")
	}
	ids := []event.ID{event.ParseID(text)}
	if plain := event.NewID(text); plain != ids[0] {
		ids = append(ids, plain)
	}
	out := make([]bson.RawValue, len(ids))
	for i, id := range ids {
		typ, data, err := id.MarshalBSONValue()
		if err != nil {
			return nil, fmt.Errorf("id %q: %w", text, err)
		}
		out[i] = bson.RawValue{Type: bson.Type(typ), Value: data}
	}
	return out, nil
}

// Collections are the outboxes that the watcher reads, or the one of them that is named.
func (o Operator) Collections(ctx context.Context, only string) ([]string, error) {
	claims, err := store.NewRegistry(o.State.Collection("collections")).Claims(ctx, o.Watcher)
	if err != nil {
		return nil, err
	}
	all := make([]string, len(claims))
	for i, c := range claims {
		all[i] = c.NS
	}
	switch {
	case len(all) == 0:
		return nil, fmt.Errorf("watcher %s in %s: %w; check its name and the state database, or start outrelay run once", o.Watcher, o.State.Name(), ErrNoCollections)
	case only == "":
		return all, nil
	case !slices.Contains(all, only):
		return nil, fmt.Errorf("watcher %s does not read %s; its collections are %s", o.Watcher, only, strings.Join(all, ", "))
	}
	return []string{only}, nil
}

// scope is the collections and the query of a filter.
func (o Operator) scope(ctx context.Context, f DeadFilter) ([]string, deadletter.Query, error) {
	q, err := f.query()
	if err != nil {
		return nil, q, err
	}
	namespaces, err := o.Collections(ctx, f.Collection)
	return namespaces, q, err
}

// DeadPage is a page of dead letters, the latest first, without their envelopes.
type DeadPage struct {
	Letters []DeadLetter `json:"letters"`
	Total   int64        `json:"total"`          // on all pages
	Next    string       `json:"next,omitempty"` // the cursor of the next page; "" at the end
}

// DeadList reads a page; limit 0 is 100, and after is Next of the page before.
func (o Operator) DeadList(ctx context.Context, f DeadFilter, limit int, after string) (DeadPage, error) {
	page := DeadPage{Letters: []DeadLetter{}}
	namespaces, q, err := o.scope(ctx, f)
	if err != nil {
		return page, err
	}
	got, err := deadletter.List(ctx, o.State.Client(), namespaces, q, deadletter.Page{Limit: limit, After: after})
	if err != nil {
		return page, err
	}
	for i := range got.Letters {
		page.Letters = append(page.Letters, letter(&got.Letters[i]))
	}
	page.Total, page.Next = got.Total, got.Next
	return page, nil
}

// DeadCount is how many letters match.
func (o Operator) DeadCount(ctx context.Context, f DeadFilter) (int64, error) {
	namespaces, q, err := o.scope(ctx, f)
	if err != nil {
		return 0, err
	}
	return deadletter.Count(ctx, o.State.Client(), namespaces, q)
}

// DeadGroup is the letters of one topic, type and class.
type DeadGroup struct {
	Topic      string    `json:"topic"`
	Type       string    `json:"type"`
	Class      string    `json:"class"`
	Count      int64     `json:"count"`
	Replayable int64     `json:"replayable"` // of them, not requeued yet
	First      time.Time `json:"first"`
	Last       time.Time `json:"last"`
}

// DeadSummary counts the letters that match by topic, type and class, the most frequent first.
func (o Operator) DeadSummary(ctx context.Context, f DeadFilter) ([]DeadGroup, error) {
	namespaces, q, err := o.scope(ctx, f)
	if err != nil {
		return nil, err
	}
	groups, err := deadletter.Summarize(ctx, o.State.Client(), namespaces, q)
	out := make([]DeadGroup, 0, len(groups))
	for _, g := range groups {
		out = append(out, DeadGroup{g.Topic, g.Type, string(g.Class), g.Count, g.Replayable, g.First, g.Last})
	}
	return out, err
}

// DeadRef names one letter.
type DeadRef struct {
	Collection string // "" looks in all of the watcher's
	ID         string // of the envelope, as in the header `id`
	Delivery   int    // below 0 is the latest that died
}

// DeadShow reads one letter with its envelope. The payload, and fields that are none of an envelope, are shown only if
// payload asks for them.
func (o Operator) DeadShow(ctx context.Context, ref DeadRef, payload bool) (DeadLetter, error) {
	d, err := o.find(ctx, ref)
	if err != nil {
		return DeadLetter{}, err
	}
	out := letter(&d)
	out.Envelope = envelopeJSON(d.Envelope, payload)
	return out, nil
}

// find reads the letter that ref names. An id that two collections, or two types of id, have is not decided by chance.
func (o Operator) find(ctx context.Context, ref DeadRef) (deadletter.Dead, error) {
	var none deadletter.Dead
	namespaces, q, err := o.scope(ctx, DeadFilter{Collection: ref.Collection, IDs: []string{ref.ID}})
	if err != nil {
		return none, err
	}
	got, err := deadletter.List(ctx, o.State.Client(), namespaces, q, deadletter.Page{Limit: deadletter.MaxPageSize})
	if err != nil {
		return none, err
	}
	var found *deadletter.Dead
	for i := range got.Letters {
		d := &got.Letters[i]
		switch {
		case ref.Delivery >= 0 && int(d.ID.Delivery) != ref.Delivery:
		case found == nil:
			found = d
		case found.ID.NS != d.ID.NS:
			return none, fmt.Errorf("both %s and %s have dead letters of id %s; name the collection", found.ID.NS, d.ID.NS, ref.ID)
		case found.ID.ID.Type != d.ID.ID.Type:
			return none, fmt.Errorf("%s has dead letters of id %s in two BSON types; one of them cannot be named by its text", d.ID.NS, ref.ID)
		case d.ID.Delivery > found.ID.Delivery:
			found = d
		}
	}
	if found == nil {
		return none, fmt.Errorf("no dead letter of id %s is there in %s: %w", ref.ID, strings.Join(namespaces, ", "), store.ErrNotFound)
	}
	db, _, _ := strings.Cut(found.ID.NS, ".")
	return deadletter.Open(ctx, o.State.Client().Database(db), found.ID)
}

// Empty reports whether nothing says which letters, but whether they were requeued, and where they are.
func (f DeadFilter) Empty() bool {
	return len(f.IDs) == 0 && f.From.IsZero() && f.To.IsZero() && f.Topic == "" && f.Type == "" && f.AggregateType == "" &&
		f.Key == "" && f.Class == "" && f.Message == "" && f.Source == ""
}
