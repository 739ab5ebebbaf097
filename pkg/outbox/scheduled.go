package outbox

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"math"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/transaction"
	"github.com/outrelay/outrelay/pkg/event"
)

// Page sizes of Scheduled, in events.
const (
	DefaultPageSize = 100    // used if ScheduledQuery.PageSize is 0
	MaxPageSize     = 10_000 // the largest allowed value
)

// ErrEmptyQuery means that CancelScheduled got a query without a condition. Set ScheduledQuery.All
// to cancel all events.
var ErrEmptyQuery = errors.New("the query has no condition and would match every scheduled event; set All to mean that")

// ScheduledQuery selects scheduled events that no watcher has claimed yet. An event must match all
// conditions that are set. Without a condition, the query selects all events.
type ScheduledQuery struct {
	// IDs selects events by id. If it is nil, events of any id match.
	IDs []event.ID

	// Type and AggregateType must match exactly. If empty, all values match.
	Type          string
	AggregateType string

	// DueFrom (inclusive) and DueBefore (exclusive) limit the due time. Zero means no limit.
	DueFrom, DueBefore time.Time

	// All allows CancelScheduled without a condition.
	All bool

	// PageSize is the largest number of events that Scheduled returns. Defaults to DefaultPageSize.
	// It must not exceed MaxPageSize.
	PageSize int

	// After is ScheduledPage.Next of the previous page. If empty, the first page is returned.
	After string
}

// ScheduledEvent is an event that waits for its due time.
type ScheduledEvent struct {
	ID            event.ID
	AggregateType string
	AggregateID   string
	Type          string
	DueAt         time.Time
	ExpiresAt     time.Time // zero if it never expires
}

// ScheduledPage is one page of the events that a query selects. The events are ordered by due time,
// and by id if the due times are equal.
type ScheduledPage struct {
	// Events are the events of this page.
	Events []ScheduledEvent

	// Total is the number of events on all pages.
	Total int64

	// Next is the value of ScheduledQuery.After for the next page. It is empty on the last page. If
	// an event is scheduled or moved between two calls, a later page contains it only if its due
	// time comes after the pages that were read.
	Next string
}

// ScheduledSummary counts the scheduled events of one type.
type ScheduledSummary struct {
	Type             string
	Count            int64
	Earliest, Latest time.Time
}

// Scheduled returns one page of the scheduled events that q selects. If ctx has a transaction, it
// reads in it. The error reports an invalid q or a failed read. It takes up to three
// queries, which are sorted by an index.
func (b *Box) Scheduled(ctx context.Context, q ScheduledQuery) (ScheduledPage, error) {
	page, err := b.readScheduled(ctx, q)
	if err != nil {
		return ScheduledPage{}, fmt.Errorf("reading scheduled events of %s: %w", b.collection, err)
	}
	return page, nil
}

// readScheduled reads the total, the bound of the page and the page.
func (b *Box) readScheduled(ctx context.Context, q ScheduledQuery) (ScheduledPage, error) {
	size := q.PageSize
	switch {
	case size == 0:
		size = DefaultPageSize
	case size < 0 || size > MaxPageSize:
		return ScheduledPage{}, fmt.Errorf("invalid page size %d: it must be between 1 and %d", size, MaxPageSize)
	}

	after, err := parsePagePosition(q.After)
	if err != nil {
		return ScheduledPage{}, err
	}
	filter, err := q.buildFilter()
	if err != nil {
		return ScheduledPage{}, err
	}
	if err := transaction.CheckOptional(ctx); err != nil {
		return ScheduledPage{}, err
	}

	// The total does not depend on the page.
	var page ScheduledPage
	if page.Total, err = b.coll.CountDocuments(ctx, filter); err != nil {
		return ScheduledPage{}, err
	}

	rest := filter
	if after != nil {
		rest = andFilter(filter, after.afterFilter())
	}

	// All events up to the bound are sorted by the server, so the bound keeps that few.
	bound, more, err := b.pageBound(ctx, rest, size)
	if err != nil {
		return ScheduledPage{}, err
	}
	if more {
		rest = andFilter(rest, bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bound}}}})
	}

	cur, err := b.coll.Find(ctx, rest, options.Find().
		SetSort(bson.D{{Key: "dueAt", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(size)).
		SetProjection(scheduledFields).
		SetAllowDiskUse(true))
	if err != nil {
		return ScheduledPage{}, err
	}
	var docs []scheduledDocument
	if err := cur.All(ctx, &docs); err != nil {
		return ScheduledPage{}, err
	}

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

	page.Events = make([]ScheduledEvent, len(docs))
	for i := range docs {
		page.Events[i] = docs[i].toEvent()
	}
	return page, nil
}

// pageBound returns the due time of the first event after a page of size events. more is false if
// there is no such event. The index orders events by due time, but not by id for equal due times.
// Without a bound, the server would sort all events that the query selects.
func (b *Box) pageBound(ctx context.Context, filter bson.D, size int) (due bson.DateTime, more bool, err error) {
	var doc struct {
		DueAt bson.DateTime `bson:"dueAt"`
	}
	err = b.coll.FindOne(ctx, filter, options.FindOne().
		SetSort(bson.D{{Key: "dueAt", Value: 1}}).
		SetSkip(int64(size)).
		SetProjection(bson.D{{Key: "dueAt", Value: 1}})).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, false, nil
	}
	return doc.DueAt, true, err
}

// SummarizeScheduled counts the scheduled events that q selects by event type, sorted by type.
// PageSize and After are ignored. If ctx has a transaction, it reads in it.
func (b *Box) SummarizeScheduled(ctx context.Context, q ScheduledQuery) ([]ScheduledSummary, error) {
	filter, err := q.buildFilter()
	if err == nil {
		err = transaction.CheckOptional(ctx)
	}

	var out []ScheduledSummary
	if err == nil {
		out, err = b.summarizeByType(ctx, filter)
	}
	if err != nil {
		return nil, fmt.Errorf("summarizing scheduled events of %s: %w", b.collection, err)
	}
	return out, nil
}

func (b *Box) summarizeByType(ctx context.Context, filter bson.D) ([]ScheduledSummary, error) {
	cur, err := b.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: clipField("$type")},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: int64(1)}}},
			{Key: "earliest", Value: bson.D{{Key: "$min", Value: "$dueAt"}}},
			{Key: "latest", Value: bson.D{{Key: "$max", Value: "$dueAt"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
	})
	if err != nil {
		return nil, err
	}

	var docs []struct {
		Type     bson.RawValue `bson:"_id"`
		Count    int64         `bson:"count"`
		Earliest time.Time     `bson:"earliest"`
		Latest   time.Time     `bson:"latest"`
	}
	if err := cur.All(ctx, &docs); err != nil {
		return nil, err
	}

	out := make([]ScheduledSummary, len(docs))
	for i, d := range docs {
		out[i] = ScheduledSummary{Count: d.Count, Earliest: d.Earliest, Latest: d.Latest}
		out[i].Type, _ = d.Type.StringValueOK()
	}

	return out, nil
}

// CancelScheduled removes the scheduled events that q selects and returns their number. Events that
// a watcher has claimed are not selected, and PageSize and After are ignored. A query without a
// condition returns ErrEmptyQuery unless All is set.
//
// If ctx has a transaction, CancelScheduled joins it. Otherwise each event is removed separately,
// and after an error some of them may be gone.
func (b *Box) CancelScheduled(ctx context.Context, q ScheduledQuery) (int64, error) {
	filter, err := q.buildFilter()
	if err == nil && !q.All && q.isEmpty() {
		err = ErrEmptyQuery
	}
	if err == nil {
		err = transaction.CheckOptional(ctx)
	}
	if err != nil {
		return 0, fmt.Errorf("canceling scheduled events of %s: %w", b.collection, err)
	}

	res, err := b.coll.DeleteMany(ctx, filter)
	if err != nil {
		transaction.SetRollbackOnly(ctx, err)
		return 0, fmt.Errorf("canceling scheduled events of %s: %w", b.collection, err)
	}

	return res.DeletedCount, nil
}

// isEmpty reports whether no condition is set. A list of ids without elements is a condition.
func (q *ScheduledQuery) isEmpty() bool {
	return q.IDs == nil && q.Type == "" && q.AggregateType == "" && q.DueFrom.IsZero() && q.DueBefore.IsZero()
}

// buildFilter returns a filter for the events that q selects and that no watcher has claimed. It
// fails if an id is zero. N19
func (q *ScheduledQuery) buildFilter() (bson.D, error) {
	// A comparison with a date matches dates only, so this excludes all events that are not scheduled.
	window := bson.D{{Key: "$gte", Value: bson.DateTime(math.MinInt64)}}
	if !q.DueFrom.IsZero() {
		window[0].Value = bson.NewDateTimeFromTime(q.DueFrom)
	}
	if !q.DueBefore.IsZero() {
		window = append(window, bson.E{Key: "$lt", Value: bson.NewDateTimeFromTime(q.DueBefore)})
	}

	f := bson.D{{Key: "dueAt", Value: window}, {Key: "claim", Value: nil}, {Key: "state", Value: nil}}
	if q.IDs != nil {
		for _, id := range q.IDs {
			if id.IsZero() {
				return nil, errors.New("an id is zero")
			}
		}
		f = append(f, bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: q.IDs}}})
	}

	if q.Type != "" {
		f = append(f, bson.E{Key: "type", Value: q.Type})
	}
	if q.AggregateType != "" {
		f = append(f, bson.E{Key: "aggregatetype", Value: q.AggregateType})
	}

	return f, nil
}

func andFilter(parts ...bson.D) bson.D { return bson.D{{Key: "$and", Value: parts}} }

// maxListedText limits the characters of a text field that a list returns. The writer of an event
// controls its length.
const maxListedText = 1024

// clipField returns an expression for a field of a list: the beginning of a text, or a short value
// of another type, or null.
func clipField(field string) bson.D {
	is := func(names ...string) bson.D {
		return bson.D{{Key: "$in", Value: bson.A{bson.D{{Key: "$type", Value: field}}, names}}}
	}

	return bson.D{{Key: "$switch", Value: bson.D{
		{Key: "branches", Value: bson.A{
			bson.D{{Key: "case", Value: is("string")}, {Key: "then", Value: bson.D{
				{Key: "$substrCP", Value: bson.A{field, 0, maxListedText}},
			}}},
			bson.D{{Key: "case", Value: is("int", "long", "objectId")}, {Key: "then", Value: field}},
			bson.D{{Key: "case", Value: is("binData")}, {Key: "then", Value: bson.D{{Key: "$cond", Value: bson.A{
				bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$binarySize", Value: field}}, 16}}}, field, nil,
			}}}}},
		}},
		{Key: "default", Value: nil},
	}}}
}

// scheduledFields is the projection of a list.
var scheduledFields = bson.D{
	{Key: "_id", Value: 1},
	{Key: "aggregatetype", Value: clipField("$aggregatetype")},
	{Key: "aggregateid", Value: clipField("$aggregateid")},
	{Key: "type", Value: clipField("$type")},
	{Key: "dueAt", Value: 1},
	{Key: "expiresAt", Value: 1},
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
func (d *scheduledDocument) toEvent() ScheduledEvent {
	s := ScheduledEvent{DueAt: d.DueAt.Time().UTC()}
	_ = s.ID.UnmarshalBSONValue(byte(d.ID.Type), d.ID.Value)
	s.AggregateType, _ = d.AggregateType.StringValueOK()
	s.Type, _ = d.Type.StringValueOK()

	var id event.ID
	switch d.AggregateID.Type {
	case bson.TypeInt32, bson.TypeInt64:
		s.AggregateID = fmt.Sprint(d.AggregateID.AsInt64())
	default:
		if id.UnmarshalBSONValue(byte(d.AggregateID.Type), d.AggregateID.Value) == nil {
			s.AggregateID = id.String()
		}
	}
	if ms, ok := d.ExpiresAt.DateTimeOK(); ok {
		s.ExpiresAt = time.UnixMilli(ms).UTC()
	}

	return s
}

// pagePosition is the place of the last event of a page. Its text is ScheduledPage.Next.
type pagePosition struct {
	Due bson.DateTime `bson:"d"`
	ID  bson.RawValue `bson:"i"`
}

func (p pagePosition) String() string {
	raw, _ := bson.Marshal(p) // cannot fail: the id was read from a document
	return base64.RawURLEncoding.EncodeToString(raw)
}

// parsePagePosition returns nil for an empty text.
func parsePagePosition(text string) (*pagePosition, error) {
	if text == "" {
		return nil, nil
	}

	raw, err := base64.RawURLEncoding.DecodeString(text)
	p := new(pagePosition)
	if err == nil {
		err = bson.Unmarshal(raw, p)
	}
	if err != nil || p.ID.Type == 0 {
		return nil, fmt.Errorf("invalid page position %q: pass the Next of the previous page", text)
	}

	return p, nil
}

// afterFilter returns a filter for the events after p. Only $expr compares ids of different types
// in the order of the sort.
func (p *pagePosition) afterFilter() bson.D {
	return bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gte", Value: p.Due}}}, {Key: "$or", Value: bson.A{
		bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gt", Value: p.Due}}}},
		bson.D{{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$_id", bson.D{{Key: "$literal", Value: p.ID}}}}}}},
	}}}
}
