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

	"github.com/outrelay/outrelay/pkg/event"
)

// The size of a page of scheduled events.
const (
	DefaultPageSize = 100
	MaxPageSize     = 10_000
)

// ErrEmptyQuery says that CancelScheduled got a query without a condition; ScheduledQuery.All allows it.
var ErrEmptyQuery = errors.New("the query has no condition and would match every scheduled event; set All to mean that")

// ScheduledQuery selects scheduled events that no watcher has taken yet. Conditions are combined; none selects all.
type ScheduledQuery struct {
	IDs           []event.ID
	Type          string // exactly
	AggregateType string // exactly
	// DueFrom and DueBefore are a window of due times, the first inclusive and the second not; zero is open.
	DueFrom, DueBefore time.Time

	// All allows CancelScheduled without a condition.
	All bool

	// PageSize is how many events Scheduled returns at most. Defaults to DefaultPageSize; at most MaxPageSize.
	PageSize int
	// After is ScheduledPage.Next of the page before.
	After string
}

// ScheduledEvent is an event that waits for its time.
type ScheduledEvent struct {
	ID            event.ID
	AggregateType string
	AggregateID   string
	Type          string
	DueAt         time.Time
	ExpiresAt     time.Time // zero if it never expires
}

// ScheduledPage is a part of what a query selects, in the order of due times, events of the same time by id.
type ScheduledPage struct {
	Events []ScheduledEvent
	// Total is how many events the query selects at all, whatever the page.
	Total int64
	// Next is ScheduledQuery.After of the next page; "" if this is the last one. Events that are scheduled or moved between
	// two calls are seen where their time puts them.
	Next string
}

// ScheduledSummary counts the scheduled events of one type.
type ScheduledSummary struct {
	Type             string
	Count            int64
	Earliest, Latest time.Time
}

// Scheduled reads a page of the scheduled events of a query. It joins a transaction that is in ctx and needs none.
func (b *Box) Scheduled(ctx context.Context, q ScheduledQuery, opts ...CallOption) (ScheduledPage, error) {
	page, err := b.scheduled(call(ctx, opts), q)
	if err != nil {
		return ScheduledPage{}, fmt.Errorf("reading scheduled events of %s: %w", b.collection, err)
	}
	return page, nil
}

func (b *Box) scheduled(ctx context.Context, q ScheduledQuery) (ScheduledPage, error) {
	size := q.PageSize
	switch {
	case size == 0:
		size = DefaultPageSize
	case size < 0 || size > MaxPageSize:
		return ScheduledPage{}, fmt.Errorf("a page of %d; 1 to %d is allowed", size, MaxPageSize)
	}
	after, err := readPlace(q.After)
	if err != nil {
		return ScheduledPage{}, err
	}
	filter, err := q.filter()
	if err != nil {
		return ScheduledPage{}, err
	}
	if err := unitOf(ctx).err(); err != nil {
		return ScheduledPage{}, err
	}
	var page ScheduledPage
	if page.Total, err = b.coll.CountDocuments(ctx, filter); err != nil {
		return ScheduledPage{}, err
	}
	rest := filter
	if after != nil {
		rest = and(filter, after.behind())
	}
	bound, more, err := b.bound(ctx, rest, size)
	if err != nil {
		return ScheduledPage{}, err
	}
	if more {
		rest = and(rest, bson.D{{Key: "dueAt", Value: bson.D{{Key: "$lte", Value: bound}}}})
	}
	cur, err := b.coll.Find(ctx, rest, options.Find().SetSort(bson.D{{Key: "dueAt", Value: 1}, {Key: "_id", Value: 1}}).
		SetLimit(int64(size)).SetProjection(scheduledFields).SetAllowDiskUse(true))
	if err != nil {
		return ScheduledPage{}, err
	}
	var docs []scheduledDocument
	if err := cur.All(ctx, &docs); err != nil {
		return ScheduledPage{}, err
	}
	if more {
		end := place{Due: bound, ID: bson.RawValue{Type: bson.TypeMinKey}} // all that was found has gone since
		if len(docs) > 0 {
			end = place{Due: docs[len(docs)-1].DueAt, ID: docs[len(docs)-1].ID}
		}
		page.Next = end.String()
	}
	page.Events = make([]ScheduledEvent, len(docs))
	for i := range docs {
		page.Events[i] = docs[i].event()
	}
	return page, nil
}

// bound is the due time of the first event after a page, if there is one. The index has the due times in order, but not
// the ids of equal ones, so without a bound the server would sort all that the query selects.
func (b *Box) bound(ctx context.Context, filter bson.D, size int) (due bson.DateTime, more bool, err error) {
	var doc struct {
		DueAt bson.DateTime `bson:"dueAt"`
	}
	err = b.coll.FindOne(ctx, filter, options.FindOne().SetSort(bson.D{{Key: "dueAt", Value: 1}}).SetSkip(int64(size)).
		SetProjection(bson.D{{Key: "dueAt", Value: 1}})).Decode(&doc)
	if errors.Is(err, mongo.ErrNoDocuments) {
		return 0, false, nil
	}
	return doc.DueAt, true, err
}

// SummarizeScheduled counts the scheduled events of a query by type, in the order of the types.
func (b *Box) SummarizeScheduled(ctx context.Context, q ScheduledQuery, opts ...CallOption) ([]ScheduledSummary, error) {
	ctx = call(ctx, opts)
	filter, err := q.filter()
	if err == nil {
		err = unitOf(ctx).err()
	}
	var out []ScheduledSummary
	if err == nil {
		out, err = b.summarize(ctx, filter)
	}
	if err != nil {
		return nil, fmt.Errorf("summarising scheduled events of %s: %w", b.collection, err)
	}
	return out, nil
}

func (b *Box) summarize(ctx context.Context, filter bson.D) ([]ScheduledSummary, error) {
	cur, err := b.coll.Aggregate(ctx, mongo.Pipeline{
		{{Key: "$match", Value: filter}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: clipped("$type")},
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

// CancelScheduled takes back the scheduled events of a query that no watcher has taken yet, and returns how many those
// were; PageSize and After are not regarded. A query without a condition is ErrEmptyQuery unless All is set. It joins a
// transaction that is in ctx and needs none; outside of one, each event is cancelled by itself, and after an error some are.
func (b *Box) CancelScheduled(ctx context.Context, q ScheduledQuery, opts ...CallOption) (int64, error) {
	ctx = call(ctx, opts)
	filter, err := q.filter()
	if err == nil && !q.All && q.empty() {
		err = ErrEmptyQuery
	}
	if err == nil {
		err = unitOf(ctx).err()
	}
	if err != nil {
		return 0, fmt.Errorf("cancelling scheduled events of %s: %w", b.collection, err)
	}
	res, err := b.coll.DeleteMany(ctx, filter)
	if err != nil {
		unitOf(ctx).doom(err)
		return 0, fmt.Errorf("cancelling scheduled events of %s: %w", b.collection, err)
	}
	return res.DeletedCount, nil
}

func (q *ScheduledQuery) empty() bool {
	return q.IDs == nil && q.Type == "" && q.AggregateType == "" && q.DueFrom.IsZero() && q.DueBefore.IsZero()
}

// filter matches what the query selects, as long as nobody has taken it to send. N19
func (q *ScheduledQuery) filter() (bson.D, error) {
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

func and(parts ...bson.D) bson.D { return bson.D{{Key: "$and", Value: parts}} }

// maxListedText is how many characters of a text the server gives to a list: whoever inserts events chooses its length.
const maxListedText = 1024

// clipped is a field of which a list shows the beginning if it is a text, and only short values of other types.
func clipped(field string) bson.D {
	is := func(names ...string) bson.D {
		return bson.D{{Key: "$in", Value: bson.A{bson.D{{Key: "$type", Value: field}}, names}}}
	}
	return bson.D{{Key: "$switch", Value: bson.D{
		{Key: "branches", Value: bson.A{
			bson.D{{Key: "case", Value: is("string")}, {Key: "then", Value: bson.D{{Key: "$substrCP", Value: bson.A{field, 0, maxListedText}}}}},
			bson.D{{Key: "case", Value: is("int", "long", "objectId")}, {Key: "then", Value: field}},
			bson.D{{Key: "case", Value: is("binData")}, {Key: "then", Value: bson.D{{Key: "$cond", Value: bson.A{
				bson.D{{Key: "$lte", Value: bson.A{bson.D{{Key: "$binarySize", Value: field}}, 16}}}, field, nil,
			}}}}},
		}},
		{Key: "default", Value: nil},
	}}}
}

// scheduledFields are what a list needs.
var scheduledFields = bson.D{
	{Key: "_id", Value: 1},
	{Key: "aggregatetype", Value: clipped("$aggregatetype")},
	{Key: "aggregateid", Value: clipped("$aggregateid")},
	{Key: "type", Value: clipped("$type")},
	{Key: "dueAt", Value: 1},
	{Key: "expiresAt", Value: 1},
}

// scheduledDocument bears what a foreign writer put into it: what is not of its type is left out.
type scheduledDocument struct {
	ID            bson.RawValue `bson:"_id"`
	AggregateType bson.RawValue `bson:"aggregatetype"`
	AggregateID   bson.RawValue `bson:"aggregateid"`
	Type          bson.RawValue `bson:"type"`
	DueAt         bson.DateTime `bson:"dueAt"`
	ExpiresAt     bson.RawValue `bson:"expiresAt"`
}

func (d *scheduledDocument) event() ScheduledEvent {
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

// place is where a page ended.
type place struct {
	Due bson.DateTime `bson:"d"`
	ID  bson.RawValue `bson:"i"`
}

func (p place) String() string {
	raw, _ := bson.Marshal(p) // of a document that was read
	return base64.RawURLEncoding.EncodeToString(raw)
}

func readPlace(text string) (*place, error) {
	if text == "" {
		return nil, nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(text)
	p := new(place)
	if err == nil {
		err = bson.Unmarshal(raw, p)
	}
	if err != nil || p.ID.Type == 0 {
		return nil, fmt.Errorf("%q is not where a page ended", text)
	}
	return p, nil
}

// behind matches what comes after the place. Ids of several types are in one order for $expr alone.
func (p *place) behind() bson.D {
	return bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gte", Value: p.Due}}}, {Key: "$or", Value: bson.A{
		bson.D{{Key: "dueAt", Value: bson.D{{Key: "$gt", Value: p.Due}}}},
		bson.D{{Key: "$expr", Value: bson.D{{Key: "$gt", Value: bson.A{"$_id", bson.D{{Key: "$literal", Value: p.ID}}}}}}},
	}}}
}
