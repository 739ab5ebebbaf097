package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// AuditFilter selects entries of the audit log. An entry matches if it fulfills all conditions
// that are set.
type AuditFilter struct {
	ID      string    // of one entry
	Watcher string    // "" means all watchers of the state database
	Node    string    `query:"node" maxLength:"200"`
	Actor   string    `query:"actor" maxLength:"200"`
	Kinds   []string  `query:"kind" maxItems:"100" doc:"Only these kinds, separated by commas."`
	From    time.Time `query:"from" doc:"At this time or later."`
	To      time.Time `query:"to" doc:"Before this time."`
}

// AuditEntry is one entry of the audit log.
type AuditEntry struct {
	ID      string          `json:"id"`
	At      time.Time       `json:"at"` // server time
	Kind    string          `json:"kind"`
	Watcher string          `json:"watcher,omitempty"`
	Node    string          `json:"node,omitempty"`
	Actor   string          `json:"actor,omitempty"` // for actions of operators
	Source  string          `json:"source,omitempty"`
	Fields  json.RawMessage `json:"fields"` // relaxed Extended JSON
}

// AuditPage is a page of the log, newest first.
type AuditPage struct {
	Entries []AuditEntry `json:"entries"`
	Total   int64        `json:"total"` // number of matching entries on all pages
	Next    string       `json:"next,omitempty"`
}

// auditPlace is the place of the last entry of a page.
type auditPlace struct {
	At bson.DateTime `bson:"a"`
	ID bson.ObjectID `bson:"i"`
}

func (f AuditFilter) mongoFilter() bson.D {
	filter := bson.D{}
	if f.ID != "" {
		// A text that is no id is the id of no entry.
		id, _ := bson.ObjectIDFromHex(f.ID)
		filter = append(filter, bson.E{Key: "_id", Value: id})
	}
	// Every entry has a time. With a condition on it, each query and count uses the index of the log.
	at := bson.D{{Key: "$gte", Value: f.From}}
	// The end is excluded, so that adjacent ranges have no entry in common.
	if !f.To.IsZero() {
		at = append(at, bson.E{Key: "$lt", Value: f.To})
	}
	filter = append(filter, bson.E{Key: "at", Value: at})

	filter = append(filter, setFields(bson.D{
		{Key: "watcher", Value: f.Watcher},
		{Key: "node", Value: f.Node},
		{Key: "fields.actor", Value: f.Actor},
	})...)
	if len(f.Kinds) > 0 {
		filter = append(filter, bson.E{Key: "kind", Value: bson.D{{Key: "$in", Value: f.Kinds}}})
	}
	return filter
}

// Audit returns a page of the log. It counts all matching entries. The log has at most some ten
// thousand entries.
func (o Operator) Audit(ctx context.Context, selected AuditFilter, limit int, after string) (AuditPage, error) {
	page := AuditPage{Entries: []AuditEntry{}}
	coll := mongodb.Majority(o.State.Collection("audit"))
	filter := selected.mongoFilter()

	total, err := coll.CountDocuments(ctx, filter)
	if err != nil {
		return page, wrapError("counting the audit log", err)
	}
	page.Total = total

	if after != "" {
		var place auditPlace
		if err := mongodb.ParseCursor(after, &place); err != nil {
			return page, err
		}
		filter = bson.D{{Key: "$and", Value: bson.A{filter, afterPlace("at", place.At, place.ID)}}}
	}
	limit = pageSize(limit)
	list, err := mongodb.FindAll[nodes.AuditEntry](ctx, coll, "reading the audit log", filter, options.Find().
		SetSort(bson.D{{Key: "at", Value: -1}, {Key: "_id", Value: -1}}).
		SetLimit(int64(limit)))
	if err != nil {
		return page, err
	}

	for i := range list {
		page.Entries = append(page.Entries, newAuditEntry(&list[i]))
	}
	// Another page may follow a full one.
	if n := len(list); n == limit {
		last := &list[n-1]
		page.Next, err = mongodb.EncodeCursor(auditPlace{bson.NewDateTimeFromTime(last.At), last.ID})
	}
	return page, err
}

// afterPlace returns the filter for the entries after a place in a list that is sorted by a date
// and the id, both descending.
func afterPlace(field string, moment bson.DateTime, id any) bson.D {
	return bson.D{{Key: "$or", Value: bson.A{
		bson.D{{Key: field, Value: bson.D{{Key: "$lt", Value: moment}}}},
		bson.D{{Key: field, Value: moment}, {Key: "_id", Value: bson.D{{Key: "$lt", Value: id}}}},
	}}}
}

func newAuditEntry(stored *nodes.AuditEntry) AuditEntry {
	event := AuditEntry{
		ID:      stored.ID.Hex(),
		At:      stored.At.UTC(),
		Kind:    string(stored.Kind),
		Watcher: stored.Watcher,
		Node:    stored.Node,
		Fields:  toExtJSON(stored.Fields),
	}
	event.Actor, _ = stored.Fields.Lookup("actor").StringValueOK()
	event.Source, _ = stored.Fields.Lookup("source").StringValueOK()
	return event
}

// toExtJSON returns a document as relaxed Extended JSON. It returns {} for no document, and for a
// document that cannot be expressed as such.
func toExtJSON(raw bson.Raw) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("{}")
	}
	out, err := bson.MarshalExtJSON(raw, false, false)
	if err != nil || !json.Valid(out) {
		return json.RawMessage("{}")
	}
	return out
}

// TrimAudit removes all entries except the newest, whose number is keep, and returns the number of
// removed entries. It does nothing if keep is 0 or less. The entry about the trim itself is not
// included in keep.
func (o Operator) TrimAudit(ctx context.Context, keep int) (int64, error) {
	if keep <= 0 {
		return 0, nil
	}

	removed, err := nodes.NewAuditLog(mongodb.Majority(o.State.Collection("audit")), o.Watcher, "").Trim(ctx, int64(keep))
	if err != nil || removed == 0 {
		return 0, err
	}
	return removed, o.logAction(ctx, "audit_trimmed", bson.D{
		{Key: "removed", Value: removed},
		{Key: "kept", Value: keep},
	})
}

// wrapError adds the failed action to err. It returns nil if err is nil.
func wrapError(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}
