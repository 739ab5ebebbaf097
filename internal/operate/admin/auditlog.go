package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/internal/relay/stored/nodes"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo/options"
)

// AuditFilter selects entries of the audit log. An entry matches if it fulfills all conditions
// that are set.
type AuditFilter struct {
	ID      string    // of one entry
	Object  string    // an id that the operator named
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

// latestFirst is the order of the log.
var latestFirst = listing.Order{Field: "at", Down: true}

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
		{Key: "fields.ids", Value: f.Object},
	})...)
	if len(f.Kinds) > 0 {
		filter = append(filter, bson.E{Key: "kind", Value: bson.D{{Key: "$in", Value: f.Kinds}}})
	}
	return filter
}

// Audit returns a page of the log. It counts all matching entries. The log has at most some ten
// thousand entries.
func (o Operator) Audit(ctx context.Context, selected AuditFilter, limit int, after string) (Page[AuditEntry], error) {
	page := newPage[AuditEntry]()
	coll := mongodb.Majority(o.State.Collection("audit"))
	filter := selected.mongoFilter()

	total, err := coll.CountDocuments(ctx, filter)
	if err != nil {
		return page, wrapError("counting the audit log", err)
	}
	page.Total = total
	list, next, err := listing.ReadPage[nodes.AuditEntry](ctx, coll, latestFirst, filter, after, pageSize(limit), options.Find())
	if err != nil {
		return page, mongodb.DescribeError(err, "reading the audit log", "find", mongodb.Namespace(coll))
	}

	for i := range list {
		page.Items = append(page.Items, newAuditEntry(&list[i]))
	}
	page.Next = next
	return page, nil
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
