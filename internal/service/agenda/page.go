package agenda

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/mongodb/cursor"
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
	position, err := parsePagePosition(after)
	if err != nil {
		return Page{}, err
	}
	if position != nil {
		filter = andFilter(filter, position.afterFilter())
	}

	// All events up to the bound are sorted by the server, so the bound keeps that few.
	bound, more, err := pageBound(ctx, coll, filter, size)
	if err != nil {
		return Page{}, err
	}
	if more {
		filter = andFilter(filter, bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bound}}}})
	}

	cur, err := cursor.Find(ctx, coll, filter, options.Find().
		SetSort(bson.D{{Key: "dueAt", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(size)).
		SetProjection(query.listedFields()).
		SetAllowDiskUse(true))
	if err != nil {
		return Page{}, err
	}
	var docs []scheduledDocument
	if err := cur.All(ctx, &docs); err != nil {
		return Page{}, err
	}

	var page Page
	if more {
		// Without documents, all events of this page were removed in the meantime, and the next
		// page starts at the bound.
		end := pagePosition{Due: bound, ID: bson.RawValue{Type: bson.TypeMinKey}}
		if len(docs) > 0 {
			last := docs[len(docs)-1]
			end = pagePosition{Due: last.DueAt, ID: last.ID}
		}
		page.Next = end.String()
	}

	page.Events = make([]Event, len(docs))
	for i := range docs {
		page.Events[i] = docs[i].toEvent()
	}
	return page, nil
}

// pageBound returns the due time of the first event after a page of size events. more is false if
// there is no such event. The index orders events by due time, but not by id for equal due times.
// Without a bound, the server would sort all events that the query selects.
func pageBound(
	ctx context.Context, coll *mongo.Collection, filter bson.D, size int,
) (due bson.DateTime, more bool, err error) {
	var doc struct {
		DueAt bson.DateTime `bson:"dueAt"`
	}

	err = coll.FindOne(ctx, filter, options.FindOne().
		SetSort(bson.D{{Key: "dueAt", Value: 1}}).
		SetSkip(int64(size)).
		SetProjection(bson.D{{Key: "dueAt", Value: 1}})).Decode(&doc)

	// Fewer events than the size of a page are left.
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, false, nil
	}
	return doc.DueAt, true, err
}

func andFilter(parts ...bson.D) bson.D { return bson.D{{Key: "$and", Value: parts}} }

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

// toEvent converts the document. It ignores fields with an unexpected type.
func (d *scheduledDocument) toEvent() Event {
	scheduled := Event{DueAt: d.DueAt.Time().UTC()}
	_ = scheduled.ID.UnmarshalBSONValue(byte(d.ID.Type), d.ID.Value)
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

// pagePosition is the place of the last event of a page. Its text is Page.Next.
type pagePosition struct {
	Due bson.DateTime `bson:"d"`
	ID  bson.RawValue `bson:"i"`
}

func (p pagePosition) String() string {
	// Marshal cannot fail: the id was read from a document.
	raw, _ := bson.Marshal(p)
	return base64.RawURLEncoding.EncodeToString(raw)
}

// parsePagePosition returns nil for an empty text.
func parsePagePosition(text string) (*pagePosition, error) {
	if text == "" {
		return nil, nil
	}

	raw, err := base64.RawURLEncoding.DecodeString(text)
	position := new(pagePosition)
	if err == nil {
		err = bson.Unmarshal(raw, position)
	}
	if err != nil || position.ID.Type == 0 {
		return nil, fmt.Errorf("invalid page position %q: pass the Next of the previous page", text)
	}

	return position, nil
}

// afterFilter returns a filter for the events after p. Only $expr compares ids of different types
// in the order of the sort.
func (p *pagePosition) afterFilter() bson.D {
	return bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gte", Value: p.Due}}}, {Key: "$or", Value: bson.A{
		bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gt", Value: p.Due}}}},
		bson.D{{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$_id", bson.D{{Key: "$literal", Value: p.ID}}}}}}},
	}}}
}
