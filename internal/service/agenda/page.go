package agenda

import (
	"context"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/listing"
	"github.com/outrelay/outrelay/pkg/event"
)

// MaxPageSize is the largest page, in events.
const MaxPageSize = 10_000

// Event is a scheduled event. See outbox.ScheduledEvent.
type Event struct {
	ID               event.ID
	Aggregate        event.Aggregate
	Name             string
	DueAt, ExpiresAt time.Time // ExpiresAt is zero if the event never expires
}

// Page is a part of the events that a query selects, ordered by due time, and by id if the due times are equal.
type Page struct {
	Events []Event

	// Next is the argument after of the next page. It is empty on the last page. If an event is scheduled or
	// moved between two calls, a later page contains it only if its due time comes after the pages that were
	// read.
	Next string
}

// ReadPage returns a page of at most size events. after is the Next of the previous page. It takes up to two
// queries, which are sorted by an index.
func ReadPage(ctx context.Context, coll *mongo.Collection, query Query, size int, after string) (Page, error) {
	if size < 1 || size > MaxPageSize {
		return Page{}, fmt.Errorf("invalid page size %d: it must be between 1 and %d", size, MaxPageSize)
	}

	filter, err := query.buildFilter()
	if err != nil {
		return Page{}, err
	}

	docs, next, err := listing.ReadPage[scheduledDocument](ctx, coll, byDue, filter, after, size, options.Find().
		SetProjection(query.listedFields()).
		SetAllowDiskUse(true))
	if err != nil {
		return Page{}, err
	}
	page := Page{Events: make([]Event, len(docs)), Next: next}
	for i := range docs {
		page.Events[i] = docs[i].toEvent()
	}
	return page, nil
}

// byDue is the order of a list. The index of an outbox has only the due time.
var byDue = listing.Order{Field: "dueAt", FieldIndex: true}

// listedFields returns the projection of a list.
func (q Query) listedFields() bson.D {
	return bson.D{
		{Key: "_id", Value: 1},
		{Key: "aggregatetype", Value: clipField(q.Mapping.Ref("aggregatetype"))},
		{Key: "aggregateid", Value: clipField(q.Mapping.Ref("aggregateid"))},
		{Key: "type", Value: clipField(q.Mapping.Ref("type"))},
		{Key: "dueAt", Value: 1},
		{Key: "expiresAt", Value: q.Mapping.Ref("expiresAt")},
	}
}

// scheduledDocument accepts fields of any type, because other writers may have inserted the
// envelope. toEvent leaves out the fields with an unexpected type.
type scheduledDocument struct {
	ID            bson.RawValue `bson:"_id"`
	AggregateType bson.RawValue `bson:"aggregatetype"`
	AggregateID   bson.RawValue `bson:"aggregateid"`
	Type          bson.RawValue `bson:"type"`
	DueAt         bson.DateTime `bson:"dueAt"`
	ExpiresAt     bson.RawValue `bson:"expiresAt"`
}

// idOf returns the id of a document, or the zero id if its type is none of an event.
func idOf(value bson.RawValue) (id event.ID) {
	_ = id.UnmarshalBSONValue(byte(value.Type), value.Value)
	return id
}

// toEvent converts the document. It ignores fields with an unexpected type.
func (d *scheduledDocument) toEvent() Event {
	scheduled := Event{DueAt: d.DueAt.Time().UTC()}
	scheduled.ID = idOf(d.ID)
	scheduled.Aggregate.Type, _ = d.AggregateType.StringValueOK()
	scheduled.Name, _ = d.Type.StringValueOK()

	var id event.ID
	switch d.AggregateID.Type {
	case bson.TypeInt32, bson.TypeInt64:
		scheduled.Aggregate.ID = fmt.Sprint(d.AggregateID.AsInt64())
	default:
		if id.UnmarshalBSONValue(byte(d.AggregateID.Type), d.AggregateID.Value) == nil {
			scheduled.Aggregate.ID = id.String()
		}
	}
	if ms, ok := d.ExpiresAt.DateTimeOK(); ok {
		scheduled.ExpiresAt = time.UnixMilli(ms).UTC()
	}

	return scheduled
}
