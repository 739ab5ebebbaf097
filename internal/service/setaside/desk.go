package setaside

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.mongodb.org/mongo-driver/v2/bson"
	"go.mongodb.org/mongo-driver/v2/mongo"
	"go.mongodb.org/mongo-driver/v2/mongo/options"

	"github.com/outrelay/outrelay/internal/contract/record"
	"github.com/outrelay/outrelay/internal/mongodb"
	"github.com/outrelay/outrelay/internal/mongodb/cursor"
)

// Desk is the view of operators on the messages of a database that are set aside, of all groups. Its changes are requests: the
// members of the group carry them out within about two seconds, or when one runs again. It is safe for concurrent use.
type Desk struct{ coll, counts *mongo.Collection }

// NewDesk returns the desk of the collection name of db. It does no I/O.
func NewDesk(db *mongo.Database, name string) *Desk {
	return &Desk{coll: mongodb.Majority(db.Collection(name)), counts: mongodb.Majority(db.Collection(name + CountsSuffix))}
}

// Query selects messages that are set aside. A message must match all conditions that are set. An empty list of ids that is not nil
// selects nothing.
type Query struct {
	Group, Handler string
	Topic          string
	Key            string
	IDs            []string // ids of messages, or places in the form "<topic>/<partition>@<offset>"
	Messages       []Digest // ids of set-aside messages; together with IDs: messages of either
	Reason         string   // the beginning of the reason of one of the last failures
}

// Item is a message that is set aside, without its value, and with its headers for the id and the type alone.
type Item struct {
	Message     `bson:",inline"`
	AsideAt     time.Time  `bson:"at"`    // when the message was set aside
	Since       *time.Time `bson:"since"` // of the first failure; nil if none has failed
	Due         *time.Time `bson:"due"`   // of the next attempt; nil while the message waits untried after another one
	RequestedAt *time.Time `bson:"rq"`    // of the last request of an operator that was not carried out; nil without one
}

// Header returns the value of the first of these headers, or "".
func (i *Item) Header(names ...string) string {
	for _, h := range i.Headers {
		if slices.Contains(names, h.Key) {
			return string(h.Value)
		}
	}
	return ""
}

// FormatPlace returns the place of the message: "<topic>/<partition>@<offset>".
func (m *Message) FormatPlace() string {
	return record.FormatPlace(m.Topic, m.Partition, m.Offset)
}

// SplitHandler returns the group and the name of the handler.
func (p *Place) SplitHandler() (group, name string) {
	// The name of a handler has no slash.
	end := strings.LastIndexByte(p.Handler, '/')
	return p.Handler[:max(end, 0)], p.Handler[end+1:]
}

// Position is the place of a message in a list.
type Position struct {
	Place      `bson:",inline"`
	Queue      Digest `bson:"q"`
	Generation int64  `bson:"g"`
	Offset     int64  `bson:"o"`
}

// IDHeaders and TypeHeaders are the names of the headers with the id and the type of a message.
var (
	IDHeaders   = []string{record.HeaderID, record.HeaderCEID}
	TypeHeaders = []string{record.HeaderType, record.HeaderCEType}
)

// filter returns the conditions of the query. They always contain one on the first field of the index.
func (q Query) filter() bson.D {
	var filter bson.D
	switch {
	case q.Group != "" && q.Handler != "":
		filter = bson.D{{Key: "h", Value: q.Group + "/" + q.Handler}}
	case q.Group != "":
		filter = inGroup(q.Group)
	case q.Handler != "":
		filter = bson.D{{Key: "h", Value: bson.D{{Key: "$gt", Value: ""}, {Key: "$regex", Value: "/" + regexp.QuoteMeta(q.Handler) + "$"}}}}
	default:
		filter = bson.D{{Key: "h", Value: bson.D{{Key: "$gt", Value: ""}}}}
	}

	if q.Topic != "" {
		filter = append(filter, bson.E{Key: "t", Value: q.Topic})
	}
	if q.Key != "" {
		filter = append(filter, bson.E{Key: "k", Value: []byte(q.Key)})
	}
	if q.Reason != "" {
		filter = append(filter, bson.E{Key: "hist.reason", Value: bson.Regex{Pattern: "^" + regexp.QuoteMeta(q.Reason)}})
	}

	var alternatives bson.A
	for _, id := range q.IDs {
		header := bson.D{{Key: "k", Value: bson.D{{Key: "$in", Value: IDHeaders}}}, {Key: "v", Value: []byte(id)}}
		alternatives = append(alternatives, bson.D{{Key: "hd", Value: bson.D{{Key: "$elemMatch", Value: header}}}})
		if topic, partition, offset, ok := ParsePlace(id); ok {
			alternatives = append(alternatives, bson.D{{Key: "t", Value: topic}, {Key: "p", Value: partition}, {Key: "o", Value: offset}})
		}
	}
	if q.Messages != nil {
		alternatives = append(alternatives, bson.D{{Key: "_id", Value: bson.D{{Key: "$in", Value: q.Messages}}}})
	}
	switch {
	case alternatives != nil:
		filter = append(filter, bson.E{Key: "$or", Value: alternatives})
	case q.IDs != nil:
		// The server rejects an empty $or.
		filter = append(filter, bson.E{Key: "_id", Value: bson.D{{Key: "$in", Value: bson.A{}}}})
	}
	return filter
}

// ParsePlace returns the parts of a place in the form "<topic>/<partition>@<offset>".
func ParsePlace(text string) (topic string, partition int32, offset int64, ok bool) {
	topic, rest, _ := strings.Cut(text, "/")
	before, after, _ := strings.Cut(rest, "@")
	number, err := strconv.ParseUint(before, 10, 31)
	at, err2 := strconv.ParseUint(after, 10, 63)
	return topic, int32(number), int64(at), err == nil && err2 == nil
}

// List returns up to limit messages by handler, topic, partition and key, and within a key in the order of their attempts. after is
// the position of the last message of the page before, or nil. The second result is nil if the list ends with this page.
func (d *Desk) List(ctx context.Context, query Query, after *Position, limit int) ([]Item, *Position, error) {
	isDescribing := bson.D{{Key: "$in", Value: bson.A{"$$this.k", slices.Concat(IDHeaders, TypeHeaders)}}}
	headers := bson.D{{Key: "$filter", Value: bson.D{{Key: "input", Value: "$hd"}, {Key: "cond", Value: isDescribing}}}}
	opts := options.Find().SetHint("queues").SetLimit(int64(limit) + 1).
		SetProjection(append(mongodb.Fields("_id", "h", "t", "p", "q", "g", "o", "k", "n", "hist", "at", "since", "due", "rq", "dc"), bson.E{Key: "hd", Value: headers}))

	// The bounds are in the order of the index, so that a page costs the same wherever it begins.
	first, last := bson.D{}, bson.D{}
	for _, field := range queueFields {
		first = append(first, bson.E{Key: field, Value: bson.MinKey{}})
		last = append(last, bson.E{Key: field, Value: bson.MaxKey{}})
	}
	if query.Group != "" {
		first[0].Value, last[0].Value = query.Group+"/", query.Group+"0"
	}
	if after != nil {
		for i, value := range []any{after.Handler, after.Topic, after.Partition, after.Queue, after.Generation, after.Offset, bson.MaxKey{}, bson.MaxKey{}} {
			first[i].Value = value
		}
	}
	opts.SetMin(first).SetMax(last)

	//nolint:forbidigo // Only a find takes bounds of an index. One page takes milliseconds.
	cur, err := d.coll.Find(ctx, query.filter(), opts)
	// The database of a service that runs no consumer has no such index.
	if mongodb.HasCode(err, badHint) {
		return nil, nil, nil
	}
	items, err := cursor.All[Item](ctx, "listing the messages of handlers in "+mongodb.Namespace(d.coll), cur, err)
	if err != nil || len(items) <= limit {
		return items, nil, err
	}
	items = items[:limit]
	end := &items[limit-1]
	return items, &Position{end.Place, end.Queue, end.Generation, end.Offset}, nil
}

// badHint is the code of the server for a hint that names no index.
const badHint = 2

// Count returns how many messages the query selects.
func (d *Desk) Count(ctx context.Context, query Query) (int64, error) {
	return d.countDocuments(ctx, query.filter())
}

// CountFailed returns how many of the messages that the query selects have failed.
func (d *Desk) CountFailed(ctx context.Context, query Query) (int64, error) {
	return d.countDocuments(ctx, append(query.filter(), hasFailed...))
}

func (d *Desk) countDocuments(ctx context.Context, filter bson.D) (int64, error) {
	n, err := d.coll.CountDocuments(ctx, filter)
	if err != nil {
		return 0, fmt.Errorf("counting the messages of handlers in %s: %w", mongodb.Namespace(d.coll), err)
	}
	return n, nil
}

// CountHandlers counts the messages of each handler, of all topics. It reads the index alone, up to limit messages.
func (d *Desk) CountHandlers(ctx context.Context, limit int64) ([]Count, error) {
	cur, err := cursor.Aggregate(ctx, d.coll, mongo.Pipeline{
		{{Key: "$match", Value: Query{}.filter()}},
		{{Key: "$limit", Value: limit}},
		{{Key: "$project", Value: bson.D{{Key: "_id", Value: 0}, {Key: "h", Value: 1}, {Key: "since", Value: 1}}}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: "$h"},
			{Key: "n", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "since", Value: bson.D{{Key: "$min", Value: "$since"}}},
		}}},
		{{Key: "$set", Value: bson.D{{Key: "h", Value: "$_id"}}}},
	})
	return cursor.All[Count](ctx, "counting the messages of handlers in "+mongodb.Namespace(d.coll), cur, err)
}

// Sum describes the messages of a handler that wait in one topic.
type Sum struct {
	Handler   string    `bson:"h"`
	Topic     string    `bson:"t"`
	Count     int64     `bson:"count"`
	Failed    int64     `bson:"failed"`    // the others wait untried after a failed message of their key
	Discarded int64     `bson:"discarded"` // and not given up yet
	Since     time.Time `bson:"since"`     // of the first failure; zero if none has failed
	Due       time.Time `bson:"due"`       // of the next attempt; zero if none has failed
}

// Summarize returns the sums of the messages that the query selects, by handler and topic.
func (d *Desk) Summarize(ctx context.Context, query Query) ([]Sum, error) {
	oneIf := func(field string) bson.D {
		return bson.D{{Key: "$sum", Value: bson.D{{Key: "$cond", Value: bson.A{bson.D{{Key: "$gt", Value: bson.A{field, nil}}}, 1, 0}}}}}
	}
	cur, err := cursor.Aggregate(ctx, d.coll, mongo.Pipeline{
		{{Key: "$match", Value: query.filter()}},
		{{Key: "$group", Value: bson.D{
			{Key: "_id", Value: bson.D{{Key: "h", Value: "$h"}, {Key: "t", Value: "$t"}}},
			{Key: "count", Value: bson.D{{Key: "$sum", Value: 1}}},
			{Key: "failed", Value: oneIf("$due")},
			{Key: "discarded", Value: oneIf("$dc.at")},
			{Key: "since", Value: bson.D{{Key: "$min", Value: "$since"}}},
			{Key: "due", Value: bson.D{{Key: "$min", Value: "$due"}}},
		}}},
		{{Key: "$sort", Value: bson.D{{Key: "_id", Value: 1}}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$$ROOT", "$_id"}}}}},
	})

	return cursor.All[Sum](ctx, "summarizing the messages of handlers in "+mongodb.Namespace(d.coll), cur, err)
}

// NextAttempt is the next attempt of a handler, with the reason why the attempt before it failed.
type NextAttempt struct {
	Handler string    `bson:"h"`
	Due     time.Time `bson:"due"`
	Reason  string    `bson:"reason"`
}

// NextAttempts returns the next attempt of each handler of a group that has one. It reads all messages of the group that have failed.
func (d *Desk) NextAttempts(ctx context.Context, group string) ([]NextAttempt, error) {
	first := bson.D{{Key: "sortBy", Value: bson.D{{Key: "due", Value: 1}}}, {Key: "output", Value: bson.D{
		{Key: "due", Value: "$due"}, {Key: "reason", Value: bson.D{{Key: "$last", Value: "$hist.reason"}}},
	}}}
	cur, err := cursor.Aggregate(ctx, d.coll, mongo.Pipeline{
		{{Key: "$match", Value: append(Query{Group: group}.filter(), hasFailed...)}},
		{{Key: "$group", Value: bson.D{{Key: "_id", Value: "$h"}, {Key: "first", Value: bson.D{{Key: "$top", Value: first}}}}}},
		{{Key: "$replaceWith", Value: bson.D{{Key: "$mergeObjects", Value: bson.A{"$first", bson.D{{Key: "h", Value: "$_id"}}}}}}},
	})
	return cursor.All[NextAttempt](ctx, "reading the next attempts of handlers in "+mongodb.Namespace(d.coll), cur, err)
}

// Retry requests an attempt now for the messages that the query selects and that have failed. It returns their number. Messages that
// wait untried follow the failed message of their key without a request.
func (d *Desk) Retry(ctx context.Context, query Query) (int64, error) {
	return d.request(ctx, append(query.filter(), hasFailed...), bson.D{{Key: "due", Value: "$$NOW"}, {Key: "rq", Value: "$$NOW"}})
}

// Discard orders that the messages that the query selects are given up without another attempt. It returns their number. actor is
// part of the reason of their dead letters.
func (d *Desk) Discard(ctx context.Context, query Query, actor string) (int64, error) {
	return d.request(ctx, query.filter(), bson.D{
		{Key: "rq", Value: "$$NOW"},
		{Key: "dc", Value: bson.D{{Key: "by", Value: mongodb.Literal(actor)}, {Key: "at", Value: "$$NOW"}}},
	})
}

// request sets fields of messages that are not discarded.
func (d *Desk) request(ctx context.Context, filter, fields bson.D) (int64, error) {
	filter = append(filter, bson.E{Key: "dc", Value: nil})
	res, err := d.coll.UpdateMany(ctx, filter, mongo.Pipeline{{{Key: "$set", Value: fields}}})
	if err != nil {
		return 0, fmt.Errorf("changing the messages of handlers in %s: %w", mongodb.Namespace(d.coll), err)
	}
	return res.MatchedCount, nil
}

// hasFailed matches messages that have failed. An untried message has no due time.
var hasFailed = bson.D{{Key: "due", Value: bson.D{{Key: "$gt", Value: time.Time{}}}}}
